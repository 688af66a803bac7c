"""FleetCosts: what a request costs on every engine at once, from the cost models that engines report.

Engines may be of different speed. One that has said nothing yet is taken for the mean of those that have; where none
has, costs are in proportion to tokens, which is enough to compare engines and no prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from core.cost_model import COPY_FEATURES, FEATURES
from core.handles import Tier
from core.load_report import EngineCosts

Vector = npt.NDArray[np.float64]

STAGES = ("denoise", "text_encode", "image_encode", "decode", "prime")
"""Stages with a line of their own in a table, in this order."""

GUESS_PER_KILOTOKEN = 0.02
"""Seconds, where nothing is known."""

MAX_SIZES = 64
"""Sizes of pictures whose costs are kept; most clients send a few."""

Size = tuple[str, int, int, int]
"""Model, image tokens, text tokens, and bytes of a keyframe's pages."""

Features = tuple[float, ...]
"""One value for each of `core.cost_model.FEATURES`."""

_NUM_FEATURES = len(FEATURES)
_STARTS = {stage: index * _NUM_FEATURES for index, stage in enumerate(STAGES)}


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """What does not depend on the mask: seconds on each engine, shape [engines] each. base: a step, whoever is in it.
    other: encoding prompt and image, and decoding. prime: one keyframe of the template. template: encoding it. load:
    one keyframe from the next slower tier; engines prime what would take longer to load.
    """

    base: Vector
    other: Vector
    prime: Vector
    template: Vector
    load: Vector


def work_features(queries: int, keys: int, constant: float = 1.0) -> Features:
    """One request's batch of its own; with a constant of 0, what it adds to a batch that runs anyway."""
    cached = keys - queries
    return constant, 1.0, queries / 1e3, queries * keys / 1e6, float(cached > 0), cached / 1e3


class FleetCosts:
    """A table of coefficients per model, shape [stages * features, engines], and one of copies."""

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._tables: dict[str, Vector] = {}  # model -> coefficients
        self._known: dict[str, set[int]] = {}  # model -> engines that have reported theirs
        self._sizes: dict[Size, tuple[int, SizeCosts]] = {}  # with how much had been learnt, oldest first
        self._num_learnt = 0  # times that a table has changed
        self._copies: Vector = np.zeros((len(COPY_FEATURES), num_engines))  # from the tier below the one that computes
        self._guess = np.tile(_guessed()[:, None], num_engines)

    def is_known(self, model: str) -> bool:
        """Whether any engine has said what this model costs."""
        return bool(self._known.get(model))

    def step(self, model: str, features: Features) -> Vector:
        """Seconds that a request of these features adds to a step, shape [engines]."""
        seconds: Vector = np.dot(features, self._table(model)[:_NUM_FEATURES])
        return seconds

    def step_at(self, engine: int, model: str, features: Features) -> float:
        """The same on one engine."""
        return float(np.dot(features, self._table(model)[:_NUM_FEATURES, engine]))

    def of_size(self, size: Size) -> SizeCosts:
        """Valid until the next report."""
        known = self._sizes.get(size)
        if known is not None and known[0] == self._num_learnt:
            return known[1]
        if known is None and len(self._sizes) == MAX_SIZES:
            del self._sizes[next(iter(self._sizes))]
        costs = self._costs_of(size)
        self._sizes[size] = self._num_learnt, costs
        return costs

    def observe(self, engine: int, costs: EngineCosts) -> None:
        for model, column in _columns(costs).items():
            self._learn(engine, model, column)
        copies: dict[Tier, Sequence[float]] = {line.source: line.coefficients for line in costs.copies}
        self._copies[:, engine] = copies.get("host") or copies.get("disk") or 0.0
        self._num_learnt += 1

    def forget(self, engine: int) -> None:
        for model, known in self._known.items():
            known.discard(engine)
            self._fill_unknown(model)
        self._copies[:, engine] = 0.0
        self._num_learnt += 1

    def _costs_of(self, size: Size) -> SizeCosts:
        model, image_tokens, text_tokens, entry_bytes = size
        base, other, prime, template = _size_weights(image_tokens, text_tokens) @ self._table(model)
        load = np.dot((1.0, entry_bytes / 1e6), self._copies)
        return SizeCosts(base, other, prime, template, np.minimum(load, prime))

    def _table(self, model: str) -> Vector:
        return self._tables.get(model, self._guess)

    def _learn(self, engine: int, model: str, column: list[float]) -> None:
        if model not in self._tables:
            self._tables[model] = self._guess.copy()
            self._known[model] = set()
        self._known[model].add(engine)
        self._tables[model][:, engine] = column
        if len(self._known[model]) < self._num_engines:
            self._fill_unknown(model)

    def _fill_unknown(self, model: str) -> None:
        """Take engines that have said nothing for the mean of the others."""
        known, table = sorted(self._known[model]), self._tables[model]
        unknown = [engine for engine in range(self._num_engines) if engine not in self._known[model]]
        table[:, unknown] = (table[:, known].mean(axis=1) if known else self._guess[:, 0])[:, None]


@lru_cache(MAX_SIZES)
def _size_weights(image_tokens: int, text_tokens: int) -> Vector:
    """What a table is multiplied by for the first fields of SizeCosts."""
    every = image_tokens + text_tokens
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


def _columns(costs: EngineCosts) -> dict[str, list[float]]:
    """One engine's column of each model's table."""
    columns: dict[str, list[float]] = {}
    for line in costs.lines:
        start = _STARTS.get(line.stage)
        if start is not None:
            column = columns.setdefault(line.model.model, [0.0] * (len(STAGES) * _NUM_FEATURES))
            column[start : start + _NUM_FEATURES] = line.coefficients
    return columns


def _guessed() -> Vector:
    column = np.zeros((len(STAGES), _NUM_FEATURES))
    column[[STAGES.index("denoise"), STAGES.index("prime")], FEATURES.index("kilotokens")] = GUESS_PER_KILOTOKEN
    return column.reshape(-1)
