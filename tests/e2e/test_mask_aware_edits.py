"""Mask-aware edits through all real processes: when they run mask-aware, what is reported, and which pixels stay."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pictures import Pixels, photo

from core.calibration import CALIBRATION, Calibration
from core.config import CacheConfig
from core.sampling_params import SamplingParams
from engine.client.edit_types import EditReport
from entrypoints import Edit, ImageEngine

SIDE, TOKENS = 128, 64
HOST_BYTES = 2**28
FOUND = Calibration(
    keyframes=(1.0, 0.75, 0.5, 0.25, 0.0),
    dtype="int8",
    full_steps=2,
    full_steps_from=0.4,
    mask_margin=8,
    safe=True,
    ssim_mean=0.99,
    ssim_p10=0.98,
    num_edits=16,
    num_inference_steps=6,
)


@contextmanager
def engine_of(checkpoint: Path, **settings: Any) -> Iterator[ImageEngine]:
    settings = {"cache": CacheConfig(host_bytes=HOST_BYTES)} | settings
    with ImageEngine(str(checkpoint), dtype="float32", threads=1, **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageEngine]:
    """An engine with a calibration that gives large masks full steps."""
    calibrated = tmp_path_factory.mktemp("calibrated") / "tiny"
    shutil.copytree(tiny_checkpoint, calibrated)
    (calibrated / CALIBRATION).write_bytes(msgspec.json.encode(FOUND))
    with engine_of(calibrated) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain_engine(tiny_checkpoint: Path) -> Iterator[ImageEngine]:
    with engine_of(tiny_checkpoint, mask_aware=False) as engine:
        yield engine


def box_mask(left: int = 20, top: int = 36, right: int = 58, bottom: int = 60) -> Pixels:
    """White = edit, uint8 [side, side]. The default touches 3 x 2 tokens."""
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[top:bottom, left:right] = 255
    return mask


def make_edit(seed: int = 0, **box: int) -> Edit:
    return Edit(prompt="a red shirt", image=photo(SIDE, SIDE, seed), mask_image=box_mask(**box))


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"num_inference_steps": 6, "seed": 5, "mask_margin": 0, "full_steps": 0} | fields)


def run(engine: ImageEngine, edit: Edit, **fields: Any) -> tuple[Pixels, EditReport]:
    (result,) = engine.generate([edit], params(**fields), use_tqdm=False)
    if result.error is not None:
        raise result.error
    return np.asarray(result.images[0]), result.reports[0]


def test_a_cold_edit_equals_the_warm_one(engine: ImageEngine) -> None:
    edit = make_edit(seed=1)
    cold, before = run(engine, edit)
    warm, after = run(engine, edit)
    np.testing.assert_array_equal(cold, warm)
    assert (before.cache, before.primed, after.cache, after.primed) == ("miss", True, "hit", False)
    assert (after.tier, after.exact_reason) == ("host", None)
    assert (after.active_tokens, after.image_tokens, after.mask_ratio) == (6, TOKENS, 6 / TOKENS)
    assert before.ms["prime"] > 0 == after.ms["prime"]


def test_one_primed_template_serves_every_step_count_and_mask(engine: ImageEngine) -> None:
    image = photo(SIDE, SIDE, 2)
    template = engine.create_template(image)
    assert (template.primed, template.image_tokens) == (True, TOKENS)
    for steps in (1, 2, 7):
        edit = Edit(prompt="a hat", template_id=template.id, mask_image=box_mask(left=64, right=72 + 8 * steps))
        by_id, report = run(engine, edit, num_inference_steps=steps)
        assert report.cache == "hit"
        by_image, _ = run(engine, replace(edit, image=image, template_id=None), num_inference_steps=steps)
        np.testing.assert_array_equal(by_id, by_image)


def test_nothing_outside_the_mask_changes(engine: ImageEngine) -> None:
    edit = make_edit(seed=3)
    out, _ = run(engine, edit, mask_margin=20)
    inside = box_mask() > 0
    np.testing.assert_array_equal(out[~inside], photo(SIDE, SIDE, 3)[~inside])
    assert (out[inside] != photo(SIDE, SIDE, 3)[inside]).mean() > 0.5


def test_other_edits_in_the_batch_change_nothing(engine: ImageEngine) -> None:
    """Other masks, step counts and exact edits in the same batch; other matrix shapes may change the last bit."""
    alone, _ = run(engine, make_edit(seed=4))
    others = [make_edit(seed=10), make_edit(seed=4, left=0, right=128), make_edit(seed=11, top=0), make_edit(seed=12)]
    sampling = [
        params(),
        params(num_inference_steps=9),
        params(mask_aware=False),
        params(full_steps=2),
        params(num_inference_steps=3, seed=8),
    ]
    results = engine.generate([make_edit(seed=4), *others], sampling, use_tqdm=False)
    assert [result.error for result in results] == [None] * 5
    difference = np.abs(np.asarray(results[0].images[0]).astype(int) - alone.astype(int))
    assert difference.max() <= 1


def test_an_exact_edit_equals_that_of_a_server_without_mask_aware_execution(
    engine: ImageEngine, plain_engine: ImageEngine
) -> None:
    edit = make_edit(seed=5)
    expected, plain = run(plain_engine, edit, seed=7)
    assert (plain.exact_reason, plain.cache, plain.tier) == ("disabled", "off", None)
    exact, report = run(engine, edit, seed=7, mask_aware=False)
    np.testing.assert_array_equal(exact, expected)
    assert (report.exact_reason, report.cache, report.primed, report.full_steps) == ("asked", "off", False, 6)
    assert (report.active_tokens, report.mask_ratio) == (TOKENS, 6 / TOKENS)
    all_full, report = run(engine, edit, seed=7, full_steps=6)
    np.testing.assert_array_equal(all_full, expected)
    assert report.exact_reason == "full_steps"
    aware, _ = run(engine, edit, seed=7)
    assert not np.array_equal(aware, expected)


def test_a_mask_over_every_token_runs_exact(engine: ImageEngine) -> None:
    everywhere = make_edit(seed=6, left=0, top=0, right=SIDE, bottom=SIDE)
    by_mask, report = run(engine, everywhere)
    assert (report.exact_reason, report.active_tokens, report.mask_ratio) == ("mask_covers_all", TOKENS, 1.0)
    exact, _ = run(engine, everywhere, mask_aware=False)
    np.testing.assert_array_equal(by_mask, exact)
    _, report = run(engine, make_edit(seed=6), mask_margin=SIDE)
    assert report.exact_reason == "mask_covers_all"


def test_the_margin_enlarges_only_the_computed_area(engine: ImageEngine) -> None:
    """The box spans 20..58 x 36..60, tokens are 16 px wide."""
    counts = [run(engine, make_edit(seed=7), mask_margin=margin)[1].active_tokens for margin in (0, 4, 5, 12)]
    assert counts == [3 * 2, 3 * 2, 4 * 4, 5 * 4]


@pytest.mark.parametrize(("right", "full_steps"), [(58, 0), (122, 2)])
def test_defaults_come_from_the_calibration(engine: ImageEngine, right: int, full_steps: int) -> None:
    """Full steps for a mask ratio of 32/64 with the margin, none for one of 20/64."""
    edit = make_edit(seed=8, right=right)
    by_default, report = run(engine, edit, mask_margin=None, full_steps=None)
    by_value, same = run(engine, edit, mask_margin=FOUND.mask_margin, full_steps=full_steps)
    np.testing.assert_array_equal(by_default, by_value)
    assert (report.active_tokens, report.exact_reason, report.full_steps) == (same.active_tokens, None, full_steps)
    other, report = run(engine, edit, mask_margin=None, full_steps=1)
    assert report.full_steps == 1
    assert not np.array_equal(other, by_default)


def test_full_steps_come_nearer_to_exact(engine: ImageEngine) -> None:
    """In the sum over several pictures: with random weights one alone may be the other way round."""
    errors = np.zeros(3)
    for seed in range(9, 13):
        edit = make_edit(seed=seed, left=8, top=8, right=SIDE - 40, bottom=SIDE - 8)
        exact, _ = run(engine, edit, mask_aware=False)
        edits = (run(engine, edit, full_steps=full)[0] for full in (0, 3, 5))
        errors += [float(np.square(each.astype(float) - exact).mean()) for each in edits]
    assert errors[0] > errors[2]
    assert errors[1] > 0
