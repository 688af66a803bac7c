"""Edits that leave out steps, through all real processes, against diffusers' pipeline with the same noise levels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import FluxFillPipeline
from edits import box_mask, picture
from PIL import Image

from core.calibration import CALIBRATION, Calibration
from core.sampling_params import SamplingParams
from core.step_schedule import StepSchedule
from entrypoints import Edit, EditResult, ImageEngine
from tools.random_checkpoints import make_flux_fill

Pixels = npt.NDArray[np.uint8]
PROMPT = "a red shirt"
NUM_STEPS, COMPUTED = 12, (0, 1, 2, 4, 7)
SIZE = (64, 96)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that comes with a calibrated schedule for NUM_STEPS."""
    path = make_flux_fill(tmp_path_factory.mktemp("model") / "flux")
    schedule = StepSchedule(
        num_inference_steps=NUM_STEPS,
        computed=COMPUTED,
        full_steps=(0, 2),
        full_steps_from=0.1,
        ssim_mean=0.99,
        ssim_p10=0.98,
    )
    calibration = Calibration(
        keyframes=(1.0, 0.5, 0.0),
        dtype="int8",
        full_steps=0,
        mask_margin=0,
        step_schedules=(schedule,),
        safe=True,
        ssim_mean=0.99,
        ssim_p10=0.98,
        num_edits=1,
        num_inference_steps=NUM_STEPS,
    )
    (path / CALIBRATION).write_bytes(msgspec.json.encode(calibration))
    return path


@pytest.fixture(scope="module")
def image_engine(checkpoint: Path) -> Iterator[ImageEngine]:
    with ImageEngine(str(checkpoint), dtype="float32", threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> FluxFillPipeline:
    pipeline = FluxFillPipeline.from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(engine: ImageEngine, seed: int = 0, **fields: object) -> EditResult:
    edit = Edit(prompt=PROMPT, image=picture(seed, SIZE), mask_image=box_mask(SIZE) * 255)
    sampling = SamplingParams(seed=seed, num_inference_steps=NUM_STEPS, **fields)  # type: ignore[arg-type]
    (result,) = engine.generate([edit], sampling, use_tqdm=False)
    if result.error is not None:
        raise result.error
    return result


def pixels_of(result: EditResult) -> Pixels:
    return np.asarray(result.images[0])


@pytest.mark.parametrize("strength", [1.0, 0.75])
def test_an_exact_edit_equals_the_pipeline_with_the_same_noise_levels(
    image_engine: ImageEngine, pipeline: FluxFillPipeline, strength: float
) -> None:
    result = generate(image_engine, mask_aware=False, strength=strength, step_schedule="calibrated")
    first = NUM_STEPS - round(NUM_STEPS * strength)
    computed = [first, *(step for step in COMPUTED if step > first)]
    (report,) = result.reports
    assert (report.num_inference_steps, report.steps_computed) == (NUM_STEPS - first, len(computed))
    image, mask = picture(0, SIZE), box_mask(SIZE)
    height, width, _ = image.shape
    expected = pipeline(
        prompt=PROMPT,
        image=Image.fromarray(image),
        mask_image=Image.fromarray(mask * 255),
        height=height,
        width=width,
        sigmas=np.linspace(1.0, 1 / NUM_STEPS, NUM_STEPS)[computed],
        guidance_scale=image_engine.model.default_guidance_scale,
        generator=torch.Generator("cpu").manual_seed(0),
        max_sequence_length=image_engine.model.max_text_tokens,
        output_type="np",
    ).images[0]
    ours, theirs = pixels_of(result)[mask > 0].astype(int), np.rint(expected * 255).astype(int)[mask > 0]
    assert np.abs(ours - theirs).max() <= 2


def test_a_mask_aware_edit_computes_the_calibrated_steps_and_full_ones(image_engine: ImageEngine) -> None:
    (report,) = generate(image_engine, step_schedule="calibrated").reports
    assert report.exact_reason is None
    assert (report.steps_computed, report.full_steps) == (len(COMPUTED), 2)
    assert (report.cache, report.tier, report.primed) == ("own", None, False)
    (every,) = generate(image_engine).reports
    assert (every.steps_computed, every.full_steps) == (NUM_STEPS, 0), "full unless the request says otherwise"


def test_a_list_of_all_steps_changes_no_byte(image_engine: ImageEngine) -> None:
    listed = generate(image_engine, computed_steps=tuple(range(NUM_STEPS)))
    assert np.array_equal(pixels_of(listed), pixels_of(generate(image_engine)))


def test_over_its_own_pages_an_edit_comes_near_to_exact(image_engine: ImageEngine) -> None:
    """The more full steps the nearer; no pixel outside the mask changes; the same whatever is cached."""
    exact = pixels_of(generate(image_engine, 3, mask_aware=False)).astype(int)
    every, errors = tuple(range(NUM_STEPS)), []
    for own in ((0,), (0, 2), (0, 1, 2, 3, 6), every[:-1]):
        ours = pixels_of(generate(image_engine, 3, own_page_steps=own))
        assert np.array_equal(ours, pixels_of(generate(image_engine, 3, own_page_steps=own)))
        assert np.array_equal(ours[box_mask(SIZE) == 0], picture(3, SIZE)[box_mask(SIZE) == 0])
        errors.append(float(np.abs(ours - exact).mean()))
    assert errors == sorted(errors, reverse=True)
    (whole,) = generate(image_engine, 3, own_page_steps=every).reports
    assert whole.exact_reason == "full_steps"


def test_images_of_one_edit_have_pages_of_their_own(image_engine: ImageEngine) -> None:
    edit = Edit(prompt=PROMPT, image=picture(0, SIZE), mask_image=box_mask(SIZE) * 255)
    fields = {"seed": 0, "num_inference_steps": NUM_STEPS, "own_page_steps": (0, 3), "n": 2}
    (result,) = image_engine.generate([edit], SamplingParams(**fields), use_tqdm=False)
    assert [report.full_steps for report in result.reports] == [2, 2]
    assert np.array_equal(np.asarray(result.images[0]), pixels_of(generate(image_engine, own_page_steps=(0, 3))))
