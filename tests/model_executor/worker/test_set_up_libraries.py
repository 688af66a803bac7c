"""What a worker sets before it imports PyTorch."""

from __future__ import annotations

import os

import pytest

from model_executor.worker.main import ALLOCATOR_SETTINGS, GROWING_SEGMENTS, set_up_libraries


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy, without allocator settings."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in ALLOCATOR_SETTINGS})


def test_a_gpus_segments_grow() -> None:
    set_up_libraries(1, compiles=False, may_use_gpu=True)
    assert os.environ[ALLOCATOR_SETTINGS[0]] == GROWING_SEGMENTS


@pytest.mark.parametrize("name", ALLOCATOR_SETTINGS)
def test_what_the_user_has_set_stays(name: str) -> None:
    os.environ[name] = ""
    set_up_libraries(1, compiles=False, may_use_gpu=True)
    assert {key: os.environ[key] for key in ALLOCATOR_SETTINGS if key in os.environ} == {name: ""}


def test_a_cpu_has_no_such_allocator() -> None:
    set_up_libraries(1, compiles=False, may_use_gpu=False)
    assert not set(ALLOCATOR_SETTINGS) & set(os.environ)
