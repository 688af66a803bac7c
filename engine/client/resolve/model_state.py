"""The state of a served model's weights, from the statistics of the engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from core.costs.load_report import EngineStats, ModelState
from core.model_info import ModelInfo

STATES: tuple[ModelState, ...] = get_args(ModelState)
"""The best first."""


def model_state(model: ModelInfo, stats: Iterable[EngineStats | None]) -> ModelState:
    """The state of a model, or of the one that an adapter is for: the best that any engine tells which serves it.
    stats: of the engines that are up; None: not known yet, as is the case for a moment after their start."""
    name = model.parent or model.name
    reported = {each.models[name] for each in stats if each is not None and name in each.models}
    return next((state for state in STATES if state in reported), "loading")
