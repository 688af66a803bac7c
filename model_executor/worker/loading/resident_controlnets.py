"""ResidentControlnets: the ControlNets of a worker's models. Models with equal ones share one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import nn

from core.config import ControlNetConfig, ModelConfig
from core.control_type import ControlType
from core.errors import ConfigError
from core.handles import ModelKey
from core.model_info import ModelInfo
from core.scheduling.ops.controlnet import CONTROLNET
from model_executor.checkpoint.loader import CONTROLNET_PART, ModelCheckpoint
from model_executor.models.controlnet.controlnet import ControlNet
from model_executor.models.controlnet.registry import make_controlnet
from model_executor.worker.loading.component_keys import Opened, Part, component_keys


@dataclass(frozen=True, slots=True)
class _Own:
    """A ControlNet of one model."""

    model: str
    name: str
    key: ModelKey


class ResidentControlnets:
    """nets: model -> name -> the ControlNet, for models that have some."""

    def __init__(
        self,
        nets: Mapping[str, Mapping[str, ControlNet]],
        controls: Mapping[str, Mapping[str, ControlType]],
        keys: Mapping[str, Mapping[str, ModelKey]],
    ) -> None:
        """controls: model -> control type -> what it stands for. keys: model -> name -> the component."""
        self._controls = controls
        self._every = [_Own(model, name, keys[model][name]) for model, its in nets.items() for name in its]
        self._nets: dict[ModelKey, ControlNet] = {}  # equal ones are one
        for own in self._every:
            self._nets.setdefault(own.key, nets[own.model][own.name])
        self.nets = {model: {name: self._nets[keys[model][name]] for name in its} for model, its in nets.items()}

    @classmethod
    def open(cls, configs: Sequence[ModelConfig], opened: Mapping[str, Opened], folder: Path) -> ResidentControlnets:
        """Open those of all models, without weights. folder: the user's cache. Raises ConfigError."""
        nets = {
            config.name: {each.name: _opened(config, each, opened[config.name]) for each in config.steering}
            for config in configs
            if config.steering
        }
        controls = {config.name: _controls(config, nets.get(config.name, {})) for config in configs}
        return cls(nets, controls, component_keys(_parts(nets), folder))

    @property
    def keys(self) -> list[ModelKey]:
        return list(self._nets)

    def users_of(self, key: ModelKey) -> list[str]:
        return list(dict.fromkeys(own.model for own in self._every if own.key == key))

    def origin(self, key: ModelKey) -> tuple[ModelCheckpoint, str]:
        return self._nets[key].checkpoint, CONTROLNET_PART

    def put(self, key: ModelKey, module: nn.Module) -> None:
        self._nets[key].put(module)

    def drop(self, key: ModelKey) -> None:
        self._nets[key].drop()

    def told_in(self, info: ModelInfo) -> ModelInfo:
        mine = {own.name: own.key for own in self._every if own.model == info.name}
        return msgspec.structs.replace(info, controlnets=mine, controls=dict(self._controls[info.name]))


def _opened(config: ModelConfig, wanted: ControlNetConfig, model: Opened) -> ControlNet:
    """It computes as its model does."""
    dtype, variant = str(model.checkpoint.dtype).removeprefix("torch."), ""
    own = {"model": wanted.path, "variant": variant, "dtype": dtype, "quantization": "none", "offload": "none"}
    try:
        checkpoint = ModelCheckpoint.open(msgspec.structs.replace(config, device=str(model.checkpoint.device), **own))
        checkpoint.check_formats()
        return make_controlnet(checkpoint, model.family.steered, wanted.types.values())
    except ConfigError as error:
        raise ConfigError(f"{config.name}: controlnets: {wanted.name}: {error}") from error


def _controls(config: ModelConfig, nets: Mapping[str, ControlNet]) -> dict[str, ControlType]:
    """Control type of a model -> what it stands for. nets: by name."""
    return {
        name: msgspec.structs.replace(each, is_joint=nets[each.net].is_joint) for name, each in config.controls.items()
    }


def _parts(nets: Mapping[str, Mapping[str, ControlNet]]) -> Iterator[Part]:
    for model, its in nets.items():
        for name, net in its.items():
            yield Part(model, CONTROLNET.component, name, net.checkpoint, CONTROLNET_PART, net.recipe)
