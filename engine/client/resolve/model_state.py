"""The state of a served model's weights, from the statistics of the engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from core.costs.load_report import EngineStats, ModelState
from core.model_info import ModelInfo

STATES: tuple[ModelState, ...] = get_args(ModelState)
"""The best first."""


def model_state(model: ModelInfo, stats: Iterable[EngineStats | None]) -> ModelState:
    """The state of a model, or of the one that an adapter is for: the best that any engine tells. stats: of the engines
    that serve; None: not known yet, as is the case for a moment after their start."""
    reported = {each.models.get(model.parent or model.name, "loading") for each in stats if each is not None}
    return next((state for state in STATES if state in reported), "loading")
