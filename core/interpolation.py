"""Interpolation: how latents are enlarged, as PyTorch's `interpolate` names it."""

from __future__ import annotations

from typing import Literal

Interpolation = Literal["bilinear", "nearest-exact", "area", "bicubic"]
