"""What work costs: a linear model per kind of work, refined by every result.

Seconds are predicted from a few features of the work (tokens, requests, a constant). The key names everything that
changes the line: which component of which model, which stage, on which device, on how many ranks at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from core.handles import ModelKey

Vector = npt.NDArray[np.floating[Any]]

FEATURES = ("constant", "requests", "kilotokens", "attention")
"""attention: sum over requests of (queries / 1000) * (keys / 1000); kilotokens: tokens / 1000, of encoders and
decoders image tokens.
"""

FORGET = 0.995
"""Weight kept by what was seen before, per observation: drifts of the machine are followed within some hundreds of
steps.
"""

RIDGE = 1e-6


class CostKey(msgspec.Struct, frozen=True):
    """What one fitted line is about."""

    model: ModelKey
    stage: str
    device: str
    degree: int  # ranks that share the work


class Work(msgspec.Struct, frozen=True):
    """The size of a batch: one entry per request of its computed tokens (queries) and of the tokens these attend to
    (keys).
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def of(cls, tokens: Iterable[int]) -> Work:
        """Work whose every token attends to all tokens of its own request."""
        queries = tuple(tokens)
        return cls(queries, queries)

    @classmethod
    def of_pairs(cls, pairs: Iterable[tuple[int, int]]) -> Work:
        """Work of requests given as (queries, keys)."""
        pairs = tuple(pairs)
        return cls(tuple(q for q, _ in pairs), tuple(k for _, k in pairs))

    def __add__(self, other: Work) -> Work:
        """Both in one batch."""
        return Work(self.queries + other.queries, self.keys + other.keys)

    def features(self) -> Vector:
        """Shape [4], in the order of FEATURES."""
        attention = sum(q * k for q, k in zip(self.queries, self.keys, strict=True)) / 1e6
        return np.array([1.0, len(self.queries), sum(self.queries) / 1e3, attention])


class Line:
    """Exponentially forgetting least squares with non-negative use: a prediction is never below zero."""

    def __init__(self) -> None:
        size = len(FEATURES)
        self._normal: Vector = np.zeros((size, size))
        self._moment: Vector = np.zeros(size)
        self._weight = 0.0
        self._sum = 0.0
        self._sum_squares = 0.0
        self._residual = 0.0
        self._coefficients: Vector | None = None  # solved when first asked for after an observation

    def observe(self, features: Vector, seconds: float) -> None:
        """Take one measurement in."""
        error = seconds - self.predict(features) if self._weight else 0.0
        self._normal *= FORGET
        self._normal += np.outer(features, features)
        self._moment *= FORGET
        self._moment += features * seconds
        self._weight = FORGET * self._weight + 1.0
        self._sum = FORGET * self._sum + seconds
        self._sum_squares = FORGET * self._sum_squares + seconds**2
        self._residual = FORGET * self._residual + error**2
        self._coefficients = None

    def coefficients(self) -> Vector:
        """Seconds per feature, shape [4]."""
        if self._coefficients is None:
            ridge = RIDGE * np.eye(len(FEATURES)) * max(1.0, self._weight)
            self._coefficients = np.linalg.solve(self._normal + ridge, self._moment)
        return self._coefficients

    def predict(self, features: Vector) -> float:
        """Seconds; 0 before the first observation."""
        return max(0.0, float(self.coefficients() @ features))

    @property
    def r_squared(self) -> float:
        """Share of the variance that one-step-ahead predictions explain; 0 before there is any."""
        if self._weight == 0.0:
            return 0.0
        variance = self._sum_squares - self._sum**2 / self._weight
        return 1.0 - self._residual / variance if variance > 0 else 0.0


class CostModel:
    """Lines by key. Owned by one scheduler."""

    def __init__(self) -> None:
        self._lines: dict[CostKey, Line] = {}

    def observe(self, key: CostKey, work: Work, seconds: float) -> None:
        self._lines.setdefault(key, Line()).observe(work.features(), seconds)

    def predict(self, key: CostKey, work: Work) -> float:
        """Seconds this work will take; 0 when nothing like it was seen yet."""
        line = self._lines.get(key)
        return line.predict(work.features()) if line else 0.0

    def r_squared(self) -> dict[CostKey, float]:
        return {key: line.r_squared for key, line in self._lines.items()}
