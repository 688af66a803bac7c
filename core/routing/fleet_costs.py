"""FleetCosts: what a request costs, from the cost models that engines report.

The engines of a fleet are of one kind, and learn the same from different batches: what one of them said last holds for
all. With prices of its own, one that had learnt in a slow moment would get no more work, and so never learn better.
Where none has said anything, costs are in proportion to tokens, which is enough to compare engines and no prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from core.costs.cost_model import COPY_FEATURES, FEATURES
from core.costs.load_report import EngineCosts
from core.handles import Tier

Vector = npt.NDArray[np.float64]

STAGES = ("denoise", "text_encode", "image_encode", "decode", "prime")
"""Stages with a line of their own in a table, in this order."""

GUESS_PER_KILOTOKEN = 0.02
"""Seconds, where nothing is known."""

MAX_SIZES = 64
"""Sizes of pictures whose costs are kept; most clients send a few."""

Size = tuple[str, int, int, int, int]
"""Model, image, condition and text tokens, and bytes of a keyframe's pages."""

Features = tuple[float, ...]
"""One value for each of `core.costs.cost_model.FEATURES`."""

_NUM_FEATURES = len(FEATURES)
_STARTS = {stage: index * _NUM_FEATURES for index, stage in enumerate(STAGES)}


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """What does not depend on the mask, in seconds. base: a step, whoever is in it. other: encoding prompt and image,
    and decoding. prime: one keyframe of the template. template: encoding it. load: one keyframe from the next slower
    tier; engines prime what would take longer to load.
    """

    base: float
    other: float
    prime: float
    template: float
    load: float


def work_features(queries: int, keys: int, constant: float = 1.0) -> Features:
    """One request's batch of its own; with a constant of 0, what it adds to a batch that runs anyway."""
    cached = keys - queries
    return constant, 1.0, queries / 1e3, queries * keys / 1e6, float(cached > 0), cached / 1e3


class FleetCosts:
    """A column of coefficients per model, shape [stages * features], and one of copies."""

    def __init__(self) -> None:
        self._columns: dict[str, Vector] = {}  # model -> coefficients
        self._sizes: dict[Size, SizeCosts] = {}  # since something was learnt
        self._copies = (0.0,) * len(COPY_FEATURES)  # from the tier below the one that computes

    def is_known(self, model: str) -> bool:
        """Whether any engine has said what this model costs."""
        return model in self._columns

    def step(self, model: str, features: Features) -> float:
        """Seconds that a request of these features adds to a step."""
        return float(np.dot(features, self._column(model)[:_NUM_FEATURES]))

    def of_size(self, size: Size) -> SizeCosts:
        """Valid until the next report."""
        costs = self._sizes.get(size)
        if costs is None:
            if len(self._sizes) == MAX_SIZES:
                self._sizes.clear()
            costs = self._sizes[size] = self._costs_of(size)
        return costs

    def observe(self, costs: EngineCosts) -> None:
        """Take in what an engine has learnt."""
        self._columns |= _columns(costs)
        copies: dict[Tier, tuple[float, ...]] = {line.source: line.coefficients for line in costs.copies}
        self._copies = copies.get("host") or copies.get("disk") or self._copies
        self._sizes.clear()

    def _costs_of(self, size: Size) -> SizeCosts:
        model, *tokens, entry_bytes = size
        base, other, prime, template = (_size_weights(*tokens) @ self._column(model)).tolist()
        load = float(np.dot((1.0, entry_bytes / 1e6), self._copies))
        return SizeCosts(base, other, prime, template, min(load, prime))

    def _column(self, model: str) -> Vector:
        return self._columns.get(model, _GUESS)


@lru_cache(MAX_SIZES)
def _size_weights(image_tokens: int, condition_tokens: int, text_tokens: int) -> Vector:
    """What a column is multiplied by for the first fields of SizeCosts."""
    every = image_tokens + condition_tokens + text_tokens
    text, image = work_features(text_tokens, text_tokens), work_features(image_tokens, image_tokens)
    fields = (
        {"denoise": (1.0,) + (0.0,) * (_NUM_FEATURES - 1)},
        {"text_encode": text, "image_encode": image, "decode": image},
        {"prime": work_features(every, every)},
        {"image_encode": image},
    )
    weights = np.zeros((len(fields), len(STAGES), _NUM_FEATURES))
    for field, by_stage in zip(weights, fields, strict=True):
        for stage, features in by_stage.items():
            field[STAGES.index(stage)] = features
    return weights.reshape(len(fields), -1)


def _columns(costs: EngineCosts) -> dict[str, Vector]:
    """Each model's coefficients."""
    columns: dict[str, Vector] = {}
    for line in costs.lines:
        start = _STARTS.get(line.stage)
        if start is not None:
            column = columns.setdefault(line.model.model, np.zeros(len(STAGES) * _NUM_FEATURES))
            column[start : start + _NUM_FEATURES] = line.coefficients
    return columns


def _guessed() -> Vector:
    column = np.zeros((len(STAGES), _NUM_FEATURES))
    column[[STAGES.index("denoise"), STAGES.index("prime")], FEATURES.index("kilotokens")] = GUESS_PER_KILOTOKEN
    return column.reshape(-1)


_GUESS = _guessed()
