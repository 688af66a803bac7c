"""The ControlNets that can be served: the class named in a checkpoint's config.json -> what runs it."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from core.errors import ConfigError
from model_executor.checkpoint.loader import CONFIGURATION_ERRORS, ModelCheckpoint, first_line
from model_executor.models.base import SteeredModel
from model_executor.models.controlnet.controlnet import ControlNet
from model_executor.models.controlnet.flux_controlnet import FluxControlNet
from model_executor.models.controlnet.sd3_controlnet import Sd3ControlNet
from model_executor.models.controlnet.unet_controlnet import UnetControlNet
from model_executor.models.controlnet.unet_union_controlnet import UnetUnionControlNet

KINDS: dict[str, type[ControlNet]] = {
    "ControlNetModel": UnetControlNet,
    "ControlNetUnionModel": UnetUnionControlNet,
    "FluxControlNetModel": FluxControlNet,
    "SD3ControlNetModel": Sd3ControlNet,
}


def make_controlnet(checkpoint: ModelCheckpoint, model: SteeredModel | None, modes: Collection[int]) -> ControlNet:
    """The ControlNet of a checkpoint for a model, without weights. model: None: one that has none. modes: as for
    `ControlNet`. Raises ConfigError if they do not go together."""
    name = checkpoint.class_name
    if name not in KINDS:
        raise ConfigError(f"{checkpoint.path}: {name} is no ControlNet; there are {', '.join(KINDS)}")
    if model is None or model.family not in KINDS[name].families:
        known = " and ".join(KINDS[name].families)
        raise ConfigError(f"{checkpoint.path}: {name} is a ControlNet of models of the family {known}")
    if model.why_none:
        raise ConfigError(f"{checkpoint.path}: no ControlNet goes with this model: {model.why_none}")
    try:
        return KINDS[name](checkpoint, model, modes)
    except CONFIGURATION_ERRORS as error:
        raise ConfigError(f"{checkpoint.path}: its configuration makes no {name}: {first_line(error)}") from error


def pack_controlnet(checkpoint: ModelCheckpoint, module: nn.Module) -> None:
    """See `ControlNet.pack`. module: of a checkpoint that `make_controlnet` takes."""
    KINDS[checkpoint.class_name].pack(checkpoint, module)
