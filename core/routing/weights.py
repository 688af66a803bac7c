"""Weights: what requests of a model need to be loaded."""

from __future__ import annotations

from typing import NamedTuple


class Weights(NamedTuple):
    """Those of a model, or of its segmenter, which only requests need whose mask is to be found."""

    model: str
    is_segmenter: bool = False
