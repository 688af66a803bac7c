"""What is told of a served model's weights, from what the engines' workers say they have loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from core.costs.load_report import EngineStats
from core.model_info import ModelInfo

ModelState = Literal["loaded", "loading"]
"""loaded: an engine has all of its components."""


def model_state(model: ModelInfo, stats: Iterable[EngineStats | None]) -> ModelState:
    """The state of a model, or of the one that an adapter is for. stats: of the engines that serve; None: not known."""
    for each in stats:
        if each is not None and {loaded.key for loaded in each.resident_models}.issuperset(model.components):
            return "loaded"
    return "loading"
