"""How a request's sampling parameters are resolved for a model: kind and scale of guidance, negative prompt, steps."""

from __future__ import annotations

from typing import Any

import fakes
import msgspec
import pytest

from core.errors import InvalidRequestError
from core.sampling_params import SamplingParams
from engine.client.sampling_defaults import resolve

DISTILLED = msgspec.structs.replace(fakes.MODEL, has_guidance=True)
BOTH = msgspec.structs.replace(DISTILLED, has_true_cfg=True)
CLASSIFIER_FREE = msgspec.structs.replace(
    fakes.MODEL, has_guidance=True, is_guidance_cfg=True, default_guidance_scale=7.0
)


def guidance(model: Any, **fields: Any) -> tuple[float | None, float | None, str | None, int]:
    sampling = resolve(SamplingParams(**fields), model)
    return sampling.guidance_scale, sampling.true_cfg_scale, sampling.negative_prompt, sampling.num_rows


@pytest.mark.parametrize(
    ("model", "fields", "expected"),
    [
        (DISTILLED, {}, (30.0, None, None, 1)),
        (DISTILLED, {"true_cfg_scale": 4.0, "negative_prompt": "x"}, (30.0, None, None, 1)),
        (BOTH, {"true_cfg_scale": 4.0}, (30.0, None, None, 1)),
        (BOTH, {"negative_prompt": "x"}, (30.0, None, None, 1)),
        (BOTH, {"true_cfg_scale": 1.0, "negative_prompt": "x"}, (30.0, None, None, 1)),
        (BOTH, {"true_cfg_scale": 4.0, "negative_prompt": ""}, (30.0, 4.0, "", 2)),
        (CLASSIFIER_FREE, {}, (7.0, 7.0, "", 2)),
        (CLASSIFIER_FREE, {"negative_prompt": "x", "guidance_scale": 2.0}, (2.0, 2.0, "x", 2)),
        (CLASSIFIER_FREE, {"negative_prompt": "x", "guidance_scale": 1.0}, (1.0, None, None, 1)),
        (CLASSIFIER_FREE, {"true_cfg_scale": 4.0, "guidance_scale": 0.0}, (0.0, None, None, 1)),
    ],
)
def test_guidance_is_decided_as_diffusers_pipelines_do(model: Any, fields: Any, expected: Any) -> None:
    assert guidance(model, **fields) == expected


@pytest.mark.parametrize(
    ("strength", "steps", "done"), [(1.0, 5, 5), (0.6, 5, 3), (0.5, 5, 2), (0.99, 50, 49), (0.56, 25, 14), (0.1, 10, 1)]
)
def test_unets_leave_out_a_step_that_strength_covers_in_part(strength: float, steps: int, done: int) -> None:
    """As `get_timesteps` of the pipelines does: min(int(num_inference_steps * strength), num_inference_steps)."""
    model = msgspec.structs.replace(fakes.MODEL, rounds_strength_down=True, extra_steps=1)
    resolved = resolve(SamplingParams(strength=strength, num_inference_steps=steps), model)
    assert done == min(int(steps * strength), steps)
    assert resolved.num_denoising_steps == done
    assert model.num_steps(resolved) == done + 1


def test_strength_that_covers_no_whole_step_is_refused() -> None:
    model = msgspec.structs.replace(fakes.MODEL, rounds_strength_down=True)
    with pytest.raises(InvalidRequestError, match="leaves no step to do") as caught:
        resolve(SamplingParams(strength=0.1, num_inference_steps=5), model)
    assert caught.value.param == "strength"


@pytest.mark.parametrize(("rounds_down", "strength", "steps"), [(False, 0.5, 3), (True, 0.5, 2), (True, 1.0, 5)])
def test_a_second_pass_rounds_its_strength_as_the_first_does(rounds_down: bool, strength: float, steps: int) -> None:
    model = msgspec.structs.replace(fakes.MODEL, rounds_strength_down=rounds_down, solver_order=2, extra_steps=1)
    two = resolve(SamplingParams(num_inference_steps=5, hires_scale=2, hires_strength=strength), model)
    assert (two.num_denoising_steps, two.num_hires_steps) == (5, steps)
    assert model.num_steps_by_pass(two) == (10, 2 * steps)
    assert resolve(SamplingParams(num_inference_steps=5, strength=strength), model).num_denoising_steps == steps
    one = resolve(SamplingParams(num_inference_steps=5, hires_strength=strength), model)
    assert model.num_steps_by_pass(one) == (model.num_steps(one),) == (10,)


def test_a_second_pass_without_a_step_is_refused() -> None:
    unet = msgspec.structs.replace(fakes.MODEL, rounds_strength_down=True)
    for model, strength in ((unet, 0.1), (fakes.MODEL, 0.0)):
        with pytest.raises(InvalidRequestError, match="leaves no step to do") as caught:
            resolve(SamplingParams(hires_scale=2, hires_strength=strength, num_inference_steps=5), model)
        assert caught.value.param == "hires_strength"
        resolve(SamplingParams(hires_strength=strength, num_inference_steps=5), model)


def test_fewer_steps_than_the_sampler_can_do_are_refused() -> None:
    model = msgspec.structs.replace(fakes.MODEL, min_inference_steps=2)
    assert resolve(SamplingParams(num_inference_steps=2), model).num_inference_steps == 2
    assert resolve(SamplingParams(num_inference_steps=2, strength=0.5), model).num_denoising_steps == 1
    with pytest.raises(InvalidRequestError, match="num_inference_steps") as caught:
        resolve(SamplingParams(num_inference_steps=1), model)
    assert caught.value.param == "num_inference_steps"
