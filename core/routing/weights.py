"""Weights: what requests need to be loaded."""

from __future__ import annotations

from typing import NamedTuple

from core.costs.load_report import WeightsKind


class Weights(NamedTuple):
    """What is loaded as one: a model, its segmenter, one of its ControlNets, or a user's class."""

    name: str  # of the model or the class
    kind: WeightsKind = "model"
    controlnet: str = ""  # its name, if they are of one
