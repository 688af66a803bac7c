"""diffusers' pipeline as a baseline: which steps it leaves out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.baselines.fill_pipeline import FillEdit, FillPipeline
from tools.random_checkpoints import make_flux_fill

STEPS = 6


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> FillPipeline:
    path: Path = make_flux_fill(tmp_path_factory.mktemp("model") / "flux")
    return FillPipeline(str(path), "float32", 1)


def run(pipeline: FillPipeline, computed: tuple[int, ...] | None = None, threshold: float | None = None) -> Image.Image:
    template = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    mask = np.zeros((64, 64), np.uint8)
    mask[16:48, 16:48] = 255
    edit = FillEdit("a hat", Image.fromarray(template), Image.fromarray(mask), STEPS, 0, computed, threshold)
    (picture,) = pipeline([edit])
    return picture


def test_an_edit_computes_the_steps_it_names(pipeline: FillPipeline) -> None:
    with pipeline.counting_steps() as count:
        some = run(pipeline, (0, 1, 3))
        assert count() == 3
        whole = run(pipeline)
        assert count() == 3 + STEPS
    assert run(pipeline, tuple(range(STEPS))) == whole
    assert some != whole


def test_a_first_block_cache_is_of_one_edit_alone(pipeline: FillPipeline) -> None:
    whole = run(pipeline)
    with pipeline.counting_steps() as count:
        run(pipeline, threshold=1e6)  # every change is smaller
        assert count() == 1
        assert run(pipeline, threshold=0.0) == whole
        assert run(pipeline) == whole
        assert count() == 1 + 2 * STEPS
