"""ResidentSegmenters: the segmenters of a worker's models. Models with equal ones share one."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import nn

from core.config import ModelConfig
from core.errors import ConfigError
from core.handles import ModelKey
from core.model_info import ModelInfo
from core.scheduling.ops.segment import SEGMENT
from model_executor.checkpoint.loader import ONE_PART, ModelCheckpoint
from model_executor.segmenters.registry import make_segmenter
from model_executor.segmenters.segmenter import Segmenter
from model_executor.worker.loading.component_keys import Part
from model_executor.worker.stores.mask_finder import MaskFinder


def open_segmenter(config: ModelConfig, device: torch.device) -> Segmenter | None:
    """The segmenter of a model, with what turns pictures and words into its inputs, and without weights; None: it has
    none. On a CPU it computes in float32 whatever the model does: it is small, and a mask's edge is where its numbers
    are close. Raises ConfigError."""
    if not config.segmenter_checkpoints:
        return None
    dtype = "float32" if device.type == "cpu" else config.dtype
    wanted = [ModelConfig(model=each, dtype=dtype, device=str(device)) for each in config.segmenter_checkpoints]
    try:
        return make_segmenter([ModelCheckpoint.open(each) for each in wanted])
    except ConfigError as error:
        raise ConfigError(f"{config.name}: segmenter: {error}") from error


class ResidentSegmenters:
    """segmenters: model -> its segmenter, for models that have one. keys: model -> part of its segmenter -> the
    component."""

    def __init__(
        self, segmenters: Mapping[str, Segmenter], keys: Mapping[str, Mapping[str, ModelKey]], *, together: bool
    ) -> None:
        """together: see MaskFinder."""
        own = {tuple(keys[name].values()): each for name, each in segmenters.items()}
        self._segmenters = {name: own[tuple(keys[name].values())] for name in segmenters}
        self._keys = keys
        finders = {id(each): MaskFinder(each, together=together) for each in own.values()}
        self.finders = {name: finders[id(each)] for name, each in self._segmenters.items()}

    @property
    def keys(self) -> list[ModelKey]:
        """All components."""
        return list(dict.fromkeys(key for keys in self._keys.values() for key in keys.values()))

    def keys_of(self, model: str) -> tuple[ModelKey, ...]:
        """The components of a model's segmenter; none if it has none."""
        return tuple(self._keys.get(model, {}).values())

    def users_of(self, key: ModelKey) -> list[str]:
        """The models whose segmenter has this component."""
        return [name for name, keys in self._keys.items() if key in keys.values()]

    def origin(self, key: ModelKey) -> tuple[ModelCheckpoint, str]:
        """(checkpoint, part of it) of a component. Raises KeyError if no segmenter has it."""
        (segmenter, part), *_ = self._places(key)
        return segmenter.parts[part], ONE_PART

    def _places(self, key: ModelKey) -> list[tuple[Segmenter, str]]:
        """The (segmenter, part) that are this component; at least one. Raises KeyError if there is none."""
        every = [(self._segmenters[name], part, own) for name, keys in self._keys.items() for part, own in keys.items()]
        if not (places := [(segmenter, part) for segmenter, part, own in every if own == key]):
            raise KeyError(f"no segmenter consists of {key}")
        return places

    def put(self, key: ModelKey, module: nn.Module) -> None:
        """Put a component that was loaded in use."""
        for segmenter, part in self._places(key):
            segmenter.put(part, module)

    def drop(self, key: ModelKey) -> None:
        """Drop a component's weights, and what they have made of pictures."""
        for segmenter, part in self._places(key):
            segmenter.drop(part)
        for model in self.users_of(key):
            self.finders[model].forget_pictures()

    def told_in(self, info: ModelInfo) -> ModelInfo:
        """The info of a model, with its segmenter if it has one."""
        if info.name not in self._segmenters:
            return info
        takes = tuple(sorted(self._segmenters[info.name].takes))
        return msgspec.structs.replace(info, segmenter=self.keys_of(info.name), selects_by=takes)


def segmenter_parts(segmenters: Mapping[str, Segmenter]) -> list[Part]:
    """The parts of all segmenters. segmenters: model -> its segmenter."""
    return [
        Part(name, SEGMENT.component, part, checkpoint, ONE_PART)
        for name, segmenter in segmenters.items()
        for part, checkpoint in segmenter.parts.items()
    ]
