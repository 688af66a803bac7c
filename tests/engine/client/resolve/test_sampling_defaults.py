"""How a request's sampling parameters are resolved for a model: kind and scale of guidance, negative prompt, steps."""

from __future__ import annotations

from typing import Any

import fakes
import msgspec
import pytest

from core.errors import InvalidRequestError
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.sampling_params import SamplingParams
from core.step_schedule import StepSchedule
from engine.client.resolve.chosen_workflow import rounds_of
from engine.client.resolve.sampling_defaults import resolve

DISTILLED = msgspec.structs.replace(fakes.MODEL, has_guidance=True)
BOTH = msgspec.structs.replace(DISTILLED, has_true_cfg=True)
CLASSIFIER_FREE = msgspec.structs.replace(
    fakes.MODEL, has_guidance=True, is_guidance_cfg=True, default_guidance_scale=7.0
)
FROM_ZERO = msgspec.structs.replace(CLASSIFIER_FREE, neutral_guidance_scale=0.0)


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
        (FROM_ZERO, {"guidance_scale": 0.5}, (0.5, 0.5, "", 2)),
        (FROM_ZERO, {"negative_prompt": "x", "guidance_scale": 0.0}, (0.0, None, None, 1)),
    ],
)
def test_guidance_is_decided_as_diffusers_pipelines_do(model: Any, fields: Any, expected: Any) -> None:
    assert guidance(model, **fields) == expected


FLOWING = msgspec.structs.replace(fakes.MODEL, has_shift=True, takes_sigmas=True, min_inference_steps=2)
FEW = msgspec.structs.replace(FLOWING, default_num_inference_steps=3, default_shift=3.0, default_sigmas=(1.0, 0.6, 0.3))


@pytest.mark.parametrize(
    ("model", "fields", "expected"),
    [
        (FLOWING, {}, (8, None, None)),
        (FLOWING, {"shift": 2.0, "num_inference_steps": 1}, (1, 2.0, None)),
        (FLOWING, {"sigmas": (1.0, 0.5)}, (2, None, (1.0, 0.5))),
        (FEW, {}, (3, 3.0, (1.0, 0.6, 0.3))),
        (FEW, {"num_inference_steps": 4, "shift": 2.0}, (4, 2.0, None)),
        (msgspec.structs.replace(FEW, takes_sigmas=False), {}, (3, 3.0, None)),
        (FEW, {"sigmas": (1.0, 0.5)}, (2, 3.0, (1.0, 0.5))),
    ],
)
def test_noise_levels_are_the_requests_then_the_models(model: Any, fields: Any, expected: Any) -> None:
    sampling = resolve(SamplingParams(**fields), model)
    assert (sampling.num_inference_steps, sampling.shift, sampling.sigmas) == expected


@pytest.mark.parametrize("fields", [{"shift": 2.0}, {"sigmas": (1.0, 0.5)}])
def test_noise_levels_that_a_scheduler_cannot_have_are_refused(fields: Any) -> None:
    (name,) = fields
    with pytest.raises(
        InvalidRequestError, match=f"Invalid '{name}': the scheduler of .* takes none; leave it out"
    ) as e:
        resolve(SamplingParams(**fields), fakes.MODEL)
    assert e.value.param == name
    with pytest.raises(InvalidRequestError, match="num_inference_steps"):
        resolve(SamplingParams(num_inference_steps=1), FLOWING)


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
    assert (two.num_denoising_steps, two.steps_at(two.hires_strength)) == (5, steps)
    assert rounds_of(HIRES, model, two) == (10, 2 * steps)
    assert resolve(SamplingParams(num_inference_steps=5, strength=strength), model).num_denoising_steps == steps
    one = resolve(SamplingParams(num_inference_steps=5, hires_strength=strength), model)
    assert rounds_of(INPAINT, model, one) == (model.num_steps(one),) == (10,)


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


SCHEDULE = StepSchedule(num_inference_steps=10, computed=(0, 1, 2, 4, 7), ssim_mean=0.99, ssim_p10=0.98)
SKIPPING = msgspec.structs.replace(fakes.MODEL, can_skip_steps=True, step_schedules=(SCHEDULE,))


@pytest.mark.parametrize(
    ("fields", "default", "computed"),
    [
        ({}, "full", None),
        ({}, "calibrated", (0, 1, 2, 4, 7)),
        ({"step_schedule": "full"}, "calibrated", None),
        ({"step_schedule": "calibrated"}, "full", (0, 1, 2, 4, 7)),
        ({"step_schedule": "calibrated", "computed_steps": (0, 9)}, "full", (0, 9)),
        ({"computed_steps": (0, 9)}, "calibrated", (0, 9)),
        ({"mask_aware": False}, "calibrated", None),
        ({"mask_aware": False, "step_schedule": "calibrated"}, "full", (0, 1, 2, 4, 7)),
    ],
)
def test_the_request_says_which_steps_are_computed_else_the_server(
    fields: Any, default: Any, computed: tuple[int, ...] | None
) -> None:
    sampling = resolve(SamplingParams(num_inference_steps=10, **fields), SKIPPING, default)
    assert sampling.computed_steps == computed
    assert SKIPPING.num_steps(sampling) == len(computed or range(10))


def test_a_run_of_lower_strength_begins_with_its_own_first_step() -> None:
    sampling = resolve(SamplingParams(num_inference_steps=10, strength=0.7, step_schedule="calibrated"), SKIPPING)
    assert sampling.computed_of_last(sampling.num_denoising_steps) == (0, 1, 4), "steps 3, 4 and 7 of ten"
    two = resolve(
        SamplingParams(num_inference_steps=10, hires_scale=2, hires_strength=0.3, step_schedule="calibrated"), SKIPPING
    )
    assert rounds_of(HIRES, SKIPPING, two) == (5, 1)


def test_a_server_that_asks_for_schedules_serves_models_without_one_in_full() -> None:
    assert resolve(SamplingParams(), fakes.MODEL, "calibrated").computed_steps is None


@pytest.mark.parametrize(
    ("fields", "model", "words"),
    [
        ({"step_schedule": "calibrated"}, fakes.MODEL, "no calibrated step schedule"),
        ({"computed_steps": (0, 1)}, fakes.MODEL, "cannot leave out steps"),
        ({"computed_steps": (0, 8)}, SKIPPING, "only 8 steps"),
    ],
)
def test_steps_that_cannot_be_left_out_are_refused(fields: Any, model: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        resolve(SamplingParams(**fields), model)
    assert caught.value.param == next(iter(fields))
