"""Resolves an edit's sampling parameters for its model: defaults for what was not given, and a random seed."""

from __future__ import annotations

import secrets

import msgspec

from core.errors import InvalidRequestError
from core.graph.workflow import Workflow
from core.model_info import ModelInfo
from core.sampling_params import MAX_IMAGES, SamplingParams
from core.step_schedule import StepScheduleName, schedule_for
from core.validation import check_integer

MAX_RANDOM_SEED = 2**53 - MAX_IMAGES
"""Keeps all seeds of an edit (one per image) below 2**53, which every language reads exactly from a JSON number."""


def resolve(
    sampling: SamplingParams,
    model: ModelInfo,
    step_schedule: StepScheduleName = "full",
    workflow: Workflow | None = None,
) -> SamplingParams:
    """Fill in the model's defaults, except full_steps and mask_margin, and draw a seed if there is none. step_schedule:
    the server's, which models without a calibrated one and edits that ask to be exact do not follow. workflow: of all
    its requests; None: they choose. Raises InvalidRequestError for values that the model does not support.
    """
    if model.num_classes:  # there is neither text nor a picture
        sampling = msgspec.structs.replace(sampling, max_sequence_length=None, negative_prompt=None, strength=1.0)
    length = sampling.max_sequence_length or model.max_text_tokens or None
    if length is not None:
        check_integer("max_sequence_length", length, high=model.max_text_tokens)
    shift = model.default_shift if sampling.shift is None else sampling.shift
    for name, value, can in (("shift", shift, model.has_shift), ("sigmas", sampling.sigmas, model.takes_sigmas)):
        if value is not None and not can:
            raise _cannot(name, f"the scheduler of {model.name} takes none; leave it out")
    steps, sigmas = _steps(sampling, model)
    check_integer("num_inference_steps", steps, low=model.min_inference_steps if shift is None else 1)
    schedule, computed = _computed_steps(sampling, model, steps, step_schedule)
    if sampling.own_page_steps and not model.can_skip_steps:
        raise _cannot("own_page_steps", f"{model.name} reads its template's pages only")
    guidance = model.default_guidance_scale if sampling.guidance_scale is None else sampling.guidance_scale
    true_cfg_scale, negative_prompt = _classifier_free(sampling, model, guidance)
    resolved = msgspec.structs.replace(
        sampling,
        num_inference_steps=steps,
        shift=shift,
        sigmas=sigmas,
        step_schedule=schedule,
        computed_steps=computed,
        strength=_resolve_strength(sampling.strength, steps, model),
        hires_strength=_resolve_strength(sampling.hires_strength, steps, model),
        guidance_scale=guidance,
        true_cfg_scale=true_cfg_scale,
        negative_prompt=negative_prompt,
        seed=secrets.randbelow(MAX_RANDOM_SEED) if sampling.seed is None else sampling.seed,
        max_sequence_length=length,
    )
    _check_steps_left("strength", sampling.strength, resolved.num_denoising_steps)
    if sampling.hires_scale is not None:
        _check_steps_left("hires_strength", sampling.hires_strength, resolved.steps_at(resolved.hires_strength))
    start = _refiner_start(sampling, model, resolved.num_denoising_steps, workflow)
    return msgspec.structs.replace(resolved, refiner_start=start)


def _steps(sampling: SamplingParams, model: ModelInfo) -> tuple[int, tuple[float, ...] | None]:
    """(number of steps, their noise levels or None). Default levels are of the default number of steps, and not for a
    run that the model shares with a refiner, of which it takes none."""
    if sampling.sigmas is not None:
        return len(sampling.sigmas), sampling.sigmas
    steps, sigmas = sampling.num_inference_steps or model.default_num_inference_steps, model.default_sigmas
    return steps, sigmas if model.takes_sigmas and sigmas is not None and len(sigmas) == steps else None


def _refiner_start(
    sampling: SamplingParams, model: ModelInfo, num_steps: int, workflow: Workflow | None
) -> float | None:
    """Where the refiner takes over; of one step nothing is left for it. num_steps: that are run."""
    says_itself = workflow is not None and all(port.name != "refiner_start" for port in workflow.inputs)
    is_shared = any(each.is_part for each in workflow.regions) if workflow else "refiner" in model.roles
    if not is_shared:
        return sampling.refiner_start
    if num_steps > 1:
        is_open = sampling.refiner_start is None and not says_itself
        return model.default_refiner_start if is_open else sampling.refiner_start
    if model.workflow:
        raise _cannot("num_inference_steps", "one step is run, which leaves none for the refiner; give more")
    if sampling.refiner_start is not None:
        raise _cannot("refiner_start", "one step is run, which leaves none for the refiner; leave it out")
    return None


def _computed_steps(
    sampling: SamplingParams, model: ModelInfo, steps: int, default: StepScheduleName
) -> tuple[StepScheduleName, tuple[int, ...] | None]:
    """(schedule by name, numbers of the computed steps, None for all). steps: the resolved num_inference_steps."""
    if sampling.computed_steps is not None:
        if not model.can_skip_steps:
            raise _cannot("computed_steps", f"the sampler of {model.name} cannot leave out steps")
        if sampling.computed_steps[-1] >= steps:
            raise _cannot("computed_steps", f"there are only {steps} steps")
        return "full", sampling.computed_steps
    name = sampling.step_schedule or (default if model.step_schedules and sampling.mask_aware else "full")
    if name == "full":
        return "full", None
    if not model.step_schedules:
        why = "has no calibrated step schedule for this; run python -m entrypoints.calibrate, or ask for 'full'"
        raise _cannot("step_schedule", f"{model.name} {why}")
    return name, schedule_for(model.step_schedules, steps).steps_of(steps)


def _cannot(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid '{name}': {why}.", param=name)


def _resolve_strength(strength: float, steps: int, model: ModelInfo) -> float:
    """The strength at which as many steps run as in the model's diffusers pipelines: those of UNets round their number
    down."""
    if not model.rounds_strength_down:
        return strength
    return max(int(steps * strength) - 0.5, 0.0) / steps  # half a step less, so that no rounding error adds one


def _check_steps_left(name: str, strength: float, num_steps: int) -> None:
    """num_steps: that a pass runs at this strength, the value of the field `name`."""
    if num_steps < 1:
        message = f"Invalid '{name}': {strength} leaves no step to do; give more than 0."
        raise InvalidRequestError(message, param=name)


def _classifier_free(
    sampling: SamplingParams, model: ModelInfo, guidance: float
) -> tuple[float, str] | tuple[None, None]:
    """Scale and negative prompt of classifier-free guidance as in diffusers' pipelines: none for a neutral scale, and
    without a negative prompt none for a model whose guidance is an embedding."""
    neutral = 1.0
    if model.is_guidance_cfg:
        scale, negative_prompt, neutral = guidance, sampling.negative_prompt or "", model.neutral_guidance_scale
    elif model.has_true_cfg and sampling.negative_prompt is not None:
        scale = model.default_true_cfg_scale if sampling.true_cfg_scale is None else sampling.true_cfg_scale
        negative_prompt = sampling.negative_prompt
    else:
        return None, None
    return (scale, negative_prompt) if scale > neutral else (None, None)
