"""Edits and generations of two passes through all real processes, against two calls of diffusers' pipeline."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from diffusers import FluxFillPipeline
from edits import box_mask, picture
from hires_rig import two_calls

from core.errors import InvalidRequestError
from core.sampling_params import SamplingParams
from entrypoints import Edit, EditResult, ImageEngine

Pixels = npt.NDArray[np.uint8]
PROMPT = "a red shirt"


def make_edit(size: tuple[int, int], seed: int = 0) -> Edit:
    return Edit(prompt=PROMPT, image=picture(seed, size), mask_image=box_mask(size) * 255)


def pixels_of(result: EditResult) -> Pixels:
    if result.error is not None:
        raise result.error
    return np.asarray(result.images[0])


def worst_difference(ours: Pixels, theirs: Pixels, mask: Pixels) -> int:
    """Largest difference inside the mask, in 1/255."""
    return int(np.abs(ours.astype(int) - theirs.astype(int))[mask > 0].max())


MIX = [((128, 128), 2.0, 0.6, (64, 64)), ((128, 96), 1.5, 0.4, (80, 64)), ((64, 96), 1.2, 0.8, (48, 80))]
"""(final size, hires_scale, hires_strength, size of the first pass)."""


def test_edits_of_two_passes_equal_the_pipelines_alone_and_in_a_batch(
    image_engine: ImageEngine, pipeline: FluxFillPipeline
) -> None:
    edits = [make_edit(size, seed) for seed, (size, *_) in enumerate(MIX)]
    params = [
        SamplingParams(num_inference_steps=5, seed=seed, hires_scale=scale, hires_strength=strength)
        for seed, (_, scale, strength, _) in enumerate(MIX)
    ]
    plain = SamplingParams(num_inference_steps=4, seed=9, mask_aware=False)
    *together, beside = image_engine.generate([*edits, make_edit((96, 96))], [*params, plain], use_tqdm=False)
    for seed, (size, _, _, first_size) in enumerate(MIX):
        image, mask, sampling = picture(seed, size), box_mask(size), params[seed]
        expected = two_calls(pipeline, PROMPT, image, mask, sampling, first_size)
        (alone,) = image_engine.generate([edits[seed]], sampling, use_tqdm=False)
        assert worst_difference(pixels_of(alone), expected, mask) <= 2
        assert worst_difference(pixels_of(together[seed]), expected, mask) <= 2
        assert np.array_equal(pixels_of(alone)[mask == 0], image[mask == 0])
    assert np.array_equal(
        pixels_of(beside), pixels_of(image_engine.generate([make_edit((96, 96))], plain, use_tqdm=False)[0])
    )


def test_a_generation_of_two_passes_equals_the_pipelines(image_engine: ImageEngine, pipeline: FluxFillPipeline) -> None:
    sampling = SamplingParams(num_inference_steps=5, seed=3, hires_scale=2, hires_strength=0.6)
    (result,) = image_engine.generate([Edit(prompt=PROMPT, size=(128, 96))], sampling, use_tqdm=False)
    grey, everything = np.full((96, 128, 3), 128, np.uint8), np.ones((96, 128), np.uint8)
    expected = two_calls(pipeline, PROMPT, grey, everything, sampling, (64, 48))
    assert worst_difference(pixels_of(result), expected, everything) <= 2


def test_an_edit_of_two_passes_says_that_it_ran_exact(image_engine: ImageEngine) -> None:
    sampling = SamplingParams(num_inference_steps=5, seed=3, strength=0.8, hires_scale=2, hires_strength=0.6)
    (result,) = image_engine.generate([make_edit((128, 96))], sampling, use_tqdm=False)
    pixels_of(result)
    (report,) = result.reports
    assert (report.exact_reason, report.cache) == ("hires", "off")
    assert report.num_inference_steps == report.full_steps == 4 + 3


def test_what_leaves_too_little_for_a_pass_is_refused(image_engine: ImageEngine) -> None:
    edit = make_edit((64, 48))
    for sampling, field in (
        (SamplingParams(hires_scale=3), "hires_scale"),
        (SamplingParams(hires_scale=1.5, hires_strength=0), "hires_strength"),
    ):
        (result,) = image_engine.generate([edit], sampling, use_tqdm=False)
        assert isinstance(result.error, InvalidRequestError)
        assert result.error.param == field
