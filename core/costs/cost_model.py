"""CostModel: predicts how long work takes, by a linear model per kind of work that every result refines.

Seconds are predicted from a few features of a batch (requests, tokens, attention, a constant), and for a copy from its
bytes. A kind of work that was profiled is predicted from its table of latencies instead, as far as that reaches. A
kind of work is named by everything that changes its line: family, components, op, device, number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from core.costs.profile import Profile
from core.graph.work import Work
from core.handles import ModelKey, Tier

_Vector = npt.NDArray[np.floating[Any]]

FEATURES = ("constant", "requests", "kilotokens", "attention", "cached requests", "cached kilotokens")
"""kilotokens: tokens / 1000, of encoders and decoders image tokens. attention: sum over requests of (queries / 1000) *
(keys / 1000). cached: keys that are not queries come from pages, which are read, interpolated and joined to the rest.
"""

COPY_FEATURES = ("constant", "megabytes")

FORGET = 0.995
"""Weight of earlier observations after each new one: drifts of the machine are followed within a few hundred steps."""

RIDGE = 1e-6
"""Pull towards the former coefficients, relative to a feature's scale: undetermined ones stay as they were."""

OUTLIER = 3.0
"""Number of usual deviations beyond which an observation counts for less: a process that the kernel preempted for a
moment shows nothing about the work.
"""

FEW, MOST_WAITING = 8, 15
"""A line is fitted again after every observation, and once it has many, after several: at most one more than
MOST_WAITING, which is reached after FEW * MOST_WAITING observations. Fitting takes as long as all else that a scheduler
does for two requests of a step, and sixteen of some hundred observations change little: after 60 batches of training,
the median error on held-out ones is within half a percentage point of that with an FEW of 32.
"""

ENOUGH = 16
"""Batches of a size that have to run before its predictions are relied on: the first ones take longer, and a line that
was fitted to small batches says little about large ones.
"""

MIN_SECONDS = 1e-6
"""Shorter times count as this, since errors are relative."""

SPREAD_FORGET = 0.95
"""As FORGET, for the usual deviation: if a machine becomes slower, its times count in full after some tens of steps."""


_NEXT_FASTER: dict[Tier, Tier] = {"disk": "host", "host": "device"}


class CostKey(msgspec.Struct, frozen=True, cache_hash=True):
    """The kind of work that one fitted line predicts. Models of one family that share components share their lines."""

    family: str  # whose code runs it
    components: tuple[ModelKey, ...]  # that it computes with
    op: str  # name of the cost line, see Op
    device: str
    degree: int  # ranks that share the work


def features_of(work: Work) -> tuple[float, ...]:
    """A batch's features, in the order of FEATURES."""
    pairs = list(zip(work.queries, work.keys, strict=True))
    attention = sum(q * k for q, k in pairs) / 1e6
    cached = [k - q for q, k in pairs if k > q]
    tokens = sum(work.queries) / 1e3
    return 1.0, len(pairs), tokens, attention, len(cached), sum(cached) / 1e3


def extra_seconds(coefficients: Sequence[float], queries: int, keys: int) -> float:
    """Seconds that another request of this size adds to a batch. coefficients: of FEATURES."""
    _, request, kilotokens, attention, cached, cached_kilotokens = coefficients
    seconds = request + kilotokens * queries / 1e3 + attention * queries * keys / 1e6
    return seconds + cached + cached_kilotokens * (keys - queries) / 1e3 if keys > queries else seconds


def token_seconds(coefficients: Sequence[float], work: Work) -> float:
    """The part of a batch's time that grows with its computed tokens."""
    _, _, kilotokens, attention, _, _ = coefficients
    pairs = zip(work.queries, work.keys, strict=True)
    return sum(kilotokens * queries / 1e3 + attention * queries * keys / 1e6 for queries, keys in pairs)


class FittedLine:
    """Exponentially forgetting least squares with coefficients that are never negative.

    Errors are weighted roughly relative to the measured time, since times of batches differ by a factor of a hundred.
    """

    def __init__(self, size: int) -> None:
        self._normal: _Vector = np.zeros((size, size))
        self._moment: _Vector = np.zeros(size)
        self.coefficients: tuple[float, ...] = (0.0,) * size
        """Seconds per feature, none below zero."""
        self._waiting: list[tuple[Sequence[float], float]] = []  # observations that it is not fitted to yet
        self._num_observed = 0
        self._spread = 1.0  # usual deviation, relative to what was expected
        self._weight = 0.0
        self._sum = 0.0
        self._sum_squares = 0.0
        self._residual = 0.0

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Add one measurement. features: as many as the line's size."""
        self._waiting.append((features, max(seconds, MIN_SECONDS)))
        self._num_observed += 1
        if len(self._waiting) > min(MOST_WAITING, self._num_observed // FEW):
            self._fit()

    def predict(self, features: Sequence[float]) -> float:
        """Seconds; 0 before the first observation."""
        return sum(each * by for each, by in zip(self.coefficients, features, strict=True))

    def _fit(self) -> None:
        """Take in all observations that wait, of which the last one counts in full."""
        features, seconds = (np.array(each) for each in zip(*self._waiting, strict=True))
        # Between absolute errors, which matter to waiting clients, and relative ones: with 2, relative errors alone,
        # R^2 on 200 held-out batches was 0.965 and the median error 6.3 %, with 1.5 they were 0.985 and 3.9 %.
        trust = [self._trust(*each) for each in self._waiting]
        self._waiting.clear()
        number = len(seconds)
        weights = trust / seconds**1.5 * FORGET ** np.arange(number - 1, -1, -1)
        weighted = features * weights[:, None]
        self._normal *= FORGET**number
        self._normal += weighted.T @ features
        self._moment *= FORGET**number
        self._moment += weighted.T @ seconds
        before = np.array(self.coefficients)
        self.coefficients = tuple(_solve_non_negative(self._normal, self._moment, before).tolist())

    def _trust(self, features: Sequence[float], seconds: float) -> float:
        """How much an observation counts: 1, or less for an outlier (Huber's weight). The error of its prediction is
        noted.
        """
        expected = self.predict(features) if self._weight else seconds
        self._weight = FORGET * self._weight + 1.0
        self._sum = FORGET * self._sum + seconds
        self._sum_squares = FORGET * self._sum_squares + seconds**2
        self._residual = FORGET * self._residual + (seconds - expected) ** 2
        deviation, limit = abs(seconds - expected) / max(expected, seconds), OUTLIER * self._spread
        self._spread = SPREAD_FORGET * self._spread + (1 - SPREAD_FORGET) * deviation
        return 1.0 if deviation <= limit else limit / deviation

    @property
    def r_squared(self) -> float:
        """Share of the variance explained by one-step-ahead predictions; 0 while there is no variance."""
        if self._weight == 0.0:
            return 0.0
        variance = self._sum_squares - self._sum**2 / self._weight
        return 1.0 - self._residual / variance if variance > 0 else 0.0


class CostModel:
    """One fitted line per kind of work and per copy, and the profiles. Owned by one scheduler."""

    def __init__(self) -> None:
        self._lines: dict[CostKey, FittedLine] = {}
        self._profiles: dict[CostKey, Profile] = {}
        self._kin: dict[CostKey, list[Profile]] = {}  # key at degree 1 -> the profiles at any degree
        self._num_seen: dict[CostKey, Counter[int]] = {}  # rows of a batch -> how many were observed
        self._copies: dict[Tier, FittedLine] = {}  # of pages, from this tier to the next faster one
        self._loads = FittedLine(len(COPY_FEATURES))  # of models' components
        self.num_observed = 0
        """Batches that were observed."""

    def observe(self, key: CostKey, work: Work, seconds: float) -> None:
        self.num_observed += 1
        self._lines.setdefault(key, FittedLine(len(FEATURES))).observe(features_of(work), seconds)
        self._num_seen.setdefault(key, Counter())[len(work.queries)] += 1
        if key in self._profiles:
            self._profiles[key].observe(work, seconds)

    def forget(self, gone: Set[ModelKey]) -> None:
        """Forget the work of classes; none was profiled."""
        for key in [key for key in self._lines if not gone.isdisjoint(key.components)]:
            del self._lines[key], self._num_seen[key]

    def add_profile(self, key: CostKey, profile: Profile) -> None:
        """Predict this kind of work from its tables, as far as they reach."""
        profile.kin = self._kin.setdefault(msgspec.structs.replace(key, degree=1), [])
        profile.kin.append(profile)
        self._profiles[key] = profile

    def predict_step(self, key: CostKey, work: Work) -> float:
        """Seconds of a step of one request at the key's degree; 0 for a degree above 1 that was not profiled."""
        return self.predict(key, work) if key.degree == 1 or key in self._profiles else 0.0

    def largest_seen(self, key: CostKey) -> int:
        """Rows of the largest batches of this kind of work of which ENOUGH were observed; 0: of none."""
        seen: Mapping[int, int] = self._num_seen.get(key, {})
        return max((rows for rows, number in seen.items() if number >= ENOUGH), default=0)

    def profile(self, key: CostKey) -> Profile | None:
        """The profile of this kind of work; None if it has none."""
        return self._profiles.get(key)

    def predict(self, key: CostKey, work: Work) -> float:
        """Seconds that this work will take; 0 if its kind was never observed."""
        profile = self._profiles.get(key)
        seconds = profile.seconds(work) if profile else None
        if seconds is not None:
            return seconds
        line = self._lines.get(key)
        return line.predict(features_of(work)) if line else 0.0

    def observe_copy(self, source: Tier, target: Tier, nbytes: int, seconds: float) -> None:
        """Note a copy of pages; only those to the next faster tier are predicted."""
        if _NEXT_FASTER.get(source) == target:
            self._copies.setdefault(source, FittedLine(len(COPY_FEATURES))).observe(_copy_features(nbytes), seconds)

    def predict_copy(self, source: Tier, nbytes: int) -> float:
        """Seconds that a copy of pages from this tier to the next faster one will take; 0 if none was observed."""
        line = self._copies.get(source)
        return line.predict(_copy_features(nbytes)) if line else 0.0

    def observe_load(self, nbytes: int, seconds: float) -> None:
        self._loads.observe(_copy_features(nbytes), seconds)

    def predict_load(self, nbytes: int) -> float:
        """Seconds that loading a component of this many bytes will take; 0 if none was observed."""
        return self._loads.predict(_copy_features(nbytes))

    def coefficients(self, key: CostKey) -> tuple[float, ...]:
        """Seconds per feature of FEATURES; zeros if this kind was never observed."""
        line = self._lines.get(key)
        return line.coefficients if line else (0.0,) * len(FEATURES)

    def lines(self) -> dict[CostKey, tuple[float, ...]]:
        """The seconds per feature of every kind of work observed."""
        return {key: line.coefficients for key, line in self._lines.items()}

    def copy_lines(self) -> dict[Tier, tuple[float, ...]]:
        """Tier that pages were copied from, to the next faster one -> seconds per feature of COPY_FEATURES."""
        return {source: line.coefficients for source, line in self._copies.items()}

    def r_squared(self) -> dict[CostKey, float]:
        return {key: line.r_squared for key, line in self._lines.items()}


def _copy_features(nbytes: int) -> tuple[float, ...]:
    return 1.0, nbytes / 1e6


def _solve_non_negative(normal: _Vector, moment: _Vector, before: _Vector) -> _Vector:
    """Least-squares coefficients >= 0 from the normal equations, pulled slightly towards those `before`.

    A coefficient that comes out negative is set to 0 and the others are solved again: not always the optimum, but close
    and fast. Features are first scaled to each other.
    """
    scale = 1.0 / np.sqrt(np.maximum(normal.diagonal(), np.finfo(float).tiny))
    matrix = normal * scale * scale[:, None]
    matrix.flat[:: len(moment) + 1] += RIDGE
    right = moment * scale + RIDGE * before / scale
    solved = np.linalg.solve(matrix, right)
    free = np.arange(len(moment))
    while len(free) > 1 and solved.min() < 0:
        free = np.delete(free, solved.argmin())
        solved = np.linalg.solve(matrix[np.ix_(free, free)], right[free])
    result = np.zeros(len(moment))
    result[free] = np.maximum(solved, 0.0) * scale[free]
    return result
