"""The edge ControlNet in the repository: small, part of the embedded model as it is served, and followed by edits."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from core.config import EMBEDDED_EDGES, EMBEDDED_NAME, ControlNetConfig, ModelConfig
from entrypoints import ImageEngine
from tools.train_edges.evaluate import Edited, held_out, likeness, mean_agreement, run
from tools.train_embedded.cases import Case

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(EMBEDDED_EDGES)
CASES = 4


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= 3_000_000


def test_it_is_part_of_the_wheel() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["model_executor"]
    for path in FOLDER.iterdir():
        assert any(fnmatch(f"{FOLDER.name}/{path.name}", pattern) for pattern in data), path.name


def test_others_that_are_named_take_its_place() -> None:
    other = ControlNetConfig("lines", "somewhere")
    assert [each.path for each in ModelConfig().steering] == [EMBEDDED_EDGES]
    assert ModelConfig(controlnets=(other,)).steering == (other,)
    assert ModelConfig(model="somewhere").steering == ()


@pytest.fixture(scope="module")
def edited(forked_engines: None) -> tuple[list[Case], Edited]:
    """Held-out edits by the embedded model as `python -m entrypoints.serve` serves it."""
    asked = held_out(True, CASES)
    with ImageEngine(dtype="float32", threads=1) as engine:
        assert [*engine.models[EMBEDDED_NAME].controls] == ["edges"]
        return asked, run(engine, asked)


def test_edits_follow_the_edges(edited: tuple[list[Case], Edited]) -> None:
    asked, made = edited
    controlled, others = (mean_agreement(images, asked) for images in (made.exact, made.without))
    assert controlled > others + 0.05


def test_mask_aware_edits_are_like_exact_ones(edited: tuple[list[Case], Edited]) -> None:
    asked, made = edited
    assert np.mean(likeness(made, asked)) >= 0.97
