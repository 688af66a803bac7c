"""Loads of components that fail in other ways than a lack of room."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
from user_classes import Panic

from core.config import ModelConfig
from core.memory_budget import Room
from core.messages.worker import ModelFailed, ModelLoaded
from model_executor.worker.loading.component_loader import ComponentLoader
from model_executor.worker.loading.loader_thread import LoaderThread
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.loading.weights_room import WeightsRoom


@pytest.mark.parametrize("error", [Panic, SystemExit, KeyboardInterrupt])
def test_whatever_a_load_raises_is_answered_and_the_next_one_is_done(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Libraries of Rust read files, and their panics are no Exceptions."""
    models = ResidentModels.open([ModelConfig(model=str(tiny_checkpoint), served_model_name="m", dtype="float32")])
    answers: queue.SimpleQueue[ModelLoaded | ModelFailed] = queue.SimpleQueue()
    room, thread = WeightsRoom(models, Room(1 << 40, "a test")), LoaderThread(models.device)
    loader, key = ComponentLoader(0, models, room, answers.put, thread), models.needs("m")[0]

    def fail(key: object) -> object:
        raise error("unwrap on None")

    with monkeypatch.context() as patch:
        patch.setattr(models, "read", fail)
        loader.load(key)
        failed = answers.get(timeout=5)
    assert isinstance(failed, ModelFailed)
    assert (failed.key, failed.failure.kind) == (key, "engine")
    assert failed.failure.message == f"{error.__name__}: unwrap on None"
    loader.load(key)
    assert isinstance(answers.get(timeout=5), ModelLoaded)
