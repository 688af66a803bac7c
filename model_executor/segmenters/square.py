"""Square: prepares pictures for SAM 2 and 3 as transformers' image processors do, which need torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import Tensor

from core.errors import ConfigError
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.segmenters.files import read_preparation

Channels = tuple[float, float, float]


class _Size(msgspec.Struct):
    height: int
    width: int


class _Settings(msgspec.Struct):
    """The entries that are used of a preprocessor_config.json."""

    size: _Size
    image_mean: Channels
    image_std: Channels
    rescale_factor: float = 1 / 255
    resample: Literal[2] = 2  # PIL's number of bilinear resizing
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True


@dataclass(frozen=True, slots=True)
class Square:
    """Resizes pictures to a square, whatever their shapes, and normalises them."""

    side: int  # in pixels
    mean: Channels  # of values in 0..1
    std: Channels
    factor: float  # that brings a pixel's bytes to 0..1

    @classmethod
    def of_checkpoint(cls, checkpoint: ModelCheckpoint, side: int) -> Square:
        """As the checkpoint's files say. side: of the square that its model reads. Raises ConfigError."""
        file, content = read_preparation(checkpoint)
        try:
            settings = msgspec.convert(content, _Settings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{file}: {error}") from error
        if (settings.size.height, settings.size.width) != (side, side):
            asked = f"{settings.size.width}x{settings.size.height} pixels where config.json has {side}x{side}"
            raise ConfigError(f"{file} prepares {asked}; are both of one checkpoint?")
        if not (settings.do_resize and settings.do_rescale and settings.do_normalize) or 0 in settings.image_std:
            raise ConfigError(f"{file} prepares pictures without resizing or normalising them, which is not supported")
        return cls(side, settings.image_mean, settings.image_std, settings.rescale_factor)

    def prepare(self, pictures: Sequence[Tensor]) -> Tensor:
        """float32 [pictures, 3, side, side] on the CPU, of uint8 [height, width, 3] each."""
        pixels = torch.stack([self._resize(picture) for picture in pictures]).float()
        mean, std = (torch.tensor(values)[:, None, None] / self.factor for values in (self.mean, self.std))
        return (pixels - mean) / std

    def _resize(self, picture: Tensor) -> Tensor:
        """uint8 [3, side, side], rounded after resizing as torchvision does."""
        channels_first = picture.permute(2, 0, 1)[None]
        side = (self.side, self.side)
        return torch.nn.functional.interpolate(channels_first, side, mode="bilinear", antialias=True)[0]
