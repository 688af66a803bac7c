"""Finds the served model and the adapters that a request names. An adapter may also be named in a model's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from core.errors import InvalidRequestError, ModelNotFoundError
from core.lora import Lora
from core.model_info import ModelInfo
from core.patches import Patch, PatchSet, patch_set
from core.sampler_defaults import LEFT_OPEN
from core.validation import check_choice


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What a request asks to be computed with."""

    model: ModelInfo  # never an adapter's; with the defaults that its adapters bring
    loras: tuple[Lora, ...] = ()  # by name
    patches: PatchSet = ()  # the same by content
    steps_without: int = 0  # some are still loading: the most first steps without, see LateAdapters; 0: none are


def choose_model(models: Mapping[str, ModelInfo], name: str, loras: Sequence[Lora] = ()) -> ModelChoice:
    """The model `name` ("" = the first) with these adapters; `name` may also be an adapter's. models: by name, at least
    one. Raises ModelNotFoundError; InvalidRequestError for an unknown adapter, and for one that is named twice.
    """
    if name and name not in models:
        raise ModelNotFoundError(name)
    named = models[name] if name else next(iter(models.values()))
    if not named.parent:
        patches = _patches(models, named, loras)
        return ModelChoice(_with_defaults(named, models, loras), tuple(loras), patches)
    if [lora.name for lora in loras] not in ([], [name]):
        message = f"Invalid 'lora': the model '{name}' is an adapter; name the model '{named.parent}' beside others."
        raise InvalidRequestError(message, param="lora")
    return choose_model(models, named.parent, loras or (Lora(name),))


def _with_defaults(model: ModelInfo, models: Mapping[str, ModelInfo], loras: Sequence[Lora]) -> ModelInfo:
    """The model with the defaults of these adapters, of each the first one's that has it. One at scale 0 is left out of
    the picture, and has none. Step schedules and skip levels were calibrated for other noise levels.
    """
    brought = LEFT_OPEN
    for lora in loras:
        if lora.scale:
            brought = brought.over(models[lora.name].defaults)
    named = {f"default_{name}": value for name, value in msgspec.structs.asdict(brought).items() if value is not None}
    if named.keys() & {"default_num_inference_steps", "default_shift"}:
        named["step_schedules"] = named["skip_levels"] = ()
    return msgspec.structs.replace(model, **named)


def _patches(models: Mapping[str, ModelInfo], model: ModelInfo, loras: Sequence[Lora]) -> PatchSet:
    adapters = {info.name: info for info in models.values() if info.parent == model.name}
    if loras and not adapters:
        message = f"Invalid 'lora': '{model.name}' is served without adapters; GET /v1/models lists what is served."
        raise InvalidRequestError(message, param="lora")
    names = [lora.name for lora in loras]
    for number, name in enumerate(names):
        check_choice("lora", name, list(adapters))
        if name in names[:number]:
            raise InvalidRequestError(f"Invalid 'lora': '{name}' is named twice.", param="lora")
    return patch_set([Patch(adapters[lora.name].patch, lora.scale) for lora in loras])
