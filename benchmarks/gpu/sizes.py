"""Sizes: `full` has published checkpoints' shapes, `tiny` runs on a CPU in seconds and means nothing.

In sizes.json `tiny` has only what differs from `full`. Configurations are diffusers' with its defaults, for a FLUX
transformer FLUX.1-dev's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.micro.unet_step import CONFIGS, LAYERS


class FluxSize(msgspec.Struct, frozen=True):
    transformer: dict[str, Any]  # differences from FLUX.1-dev
    autoencoder: dict[str, Any]
    t5: dict[str, int]  # shape of its layers
    side: int  # image tokens of a side
    text_tokens: int
    steps: int
    keyframes: int
    ratios: tuple[float, ...]  # mask ratios of timed steps; 1 is an exact one
    batches: tuple[int, ...]  # requests that share a step
    mixed: tuple[float, ...]  # mask ratios of edits that share a step, as many as the largest batch

    @property
    def image_tokens(self) -> int:
        return self.side**2


class FamilySize(msgspec.Struct, frozen=True):
    """A transformer beside FLUX.1's, whose steps are of one request."""

    transformer: dict[str, Any]
    side: int  # image tokens of a side
    text_tokens: int
    ratios: tuple[float, ...]


class SdxlSize(msgspec.Struct, frozen=True):
    """Edits with classifier-free guidance: two rows a step."""

    unet: dict[str, Any]  # differences from SDXL
    autoencoder: dict[str, Any]
    side: int  # image tokens of a side, of 32 pixels each
    text_tokens: int
    steps: int
    keyframes: int
    ratio: float

    @property
    def image_tokens(self) -> int:
        return self.side**2

    @property
    def unet_config(self) -> dict[str, Any]:
        return LAYERS | CONFIGS["sdxl"] | self.unet


class Size(msgspec.Struct, frozen=True):
    name: str
    flux: FluxSize
    sdxl: SdxlSize
    families: dict[str, FamilySize]  # by names of `family_steps.KINDS`
    rounds: int  # whose median every figure is
    backend: str  # of torch.compile
    checkpoints: tuple[str, ...]  # whose edits are compared with a CPU's
    overhead_steps: int  # steps whose scheduling is timed
    copy_bytes: int  # of the copy whose bandwidth is measured
    product_side: int  # of the square product that is timed


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        name: _merged(base[name], value) if isinstance(value, dict) and name in base else value
        for name, value in changes.items()
    }
    return {**base, **inner}


_READ = msgspec.json.decode(Path(__file__).with_name("sizes.json").read_bytes())
FULL = msgspec.convert(_READ["full"], Size)
TINY = msgspec.convert(_merged(_READ["full"], _READ["tiny"]), Size)
SIZES = {size.name: size for size in (FULL, TINY)}
