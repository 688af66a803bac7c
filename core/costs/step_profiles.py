"""StepProfiles: how long one step takes by its size and the number of ranks that compute it, and up to which number
more ranks are useful.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from math import log2

from core.costs.latency_table import interpolated

MIN_REDUCTION = 1 / 3
"""Least share of a step's time that a doubling of its ranks must save for the ranks to be useful."""

CLASSES_PER_DOUBLING = 8
"""Size classes of which one begins at twice the tokens of the other; sizes of one class differ by 9 % at most."""

FORGET = 0.9
"""Weight of what was learnt of a size class before, after each new step: it is known within some tens of steps."""

MOST = 2.0
"""A step counts as at most this many times faster or slower than predicted: one that was preempted shows little."""


def useful_degree(seconds: Mapping[int, float]) -> int:
    """The largest degree 1, 2, 4, ... up to which every doubling saves at least a share MIN_REDUCTION of a step's time,
    z of equation 4 of DDiT (section 4.2.3). seconds: degree -> seconds of a step; degree 1 is among them.

    DDiT prints another rule: the degree whose z is largest. With the speeds that its text gives, this is 2 for 144p
    (where 2 ranks are slower than one), 240p and 360p; its own values are 1, 2 and 4, which a threshold gives.
    """
    degree = 1
    while (after := seconds.get(2 * degree)) is not None and 1 - after / seconds[degree] >= MIN_REDUCTION:
        degree *= 2
    return degree


class StepProfiles:
    """Seconds of steps of one request by kind of work (op, model, device), size class and degree.

    A size is a number of rows of one request and the tokens that each of them computes: the active ones in a mask-aware
    step; what they attend to is not told apart. Sizes that were not measured are interpolated in tokens, from those
    with as many rows if there are any; what steps of their class really take is learnt. At a degree that was never
    measured nothing is known.
    """

    def __init__(self) -> None:
        # (kind, degree) -> rows -> computed tokens of all of them -> seconds
        self._measured: dict[tuple[Hashable, int], dict[int, dict[int, float]]] = {}
        # (kind, rows, class) -> degree -> actual time, as a multiple of the interpolated one
        self._stretches: dict[tuple[Hashable, int, int], dict[int, float]] = defaultdict(dict)

    def add(self, kind: Hashable, degree: int, rows: int, tokens: int, seconds: float) -> None:
        """Add a measurement. tokens: of each row. Raises ValueError unless all numbers are above 0."""
        if min(degree, rows, tokens, seconds) <= 0:
            raise ValueError(f"a step profile needs numbers above 0, not {(degree, rows, tokens, seconds)}")
        self._measured.setdefault((kind, degree), {}).setdefault(rows, {})[rows * tokens] = seconds

    def observe(self, kind: Hashable, degree: int, rows: int, tokens: int, seconds: float) -> None:
        """Note how long a step has taken. One of an unknown kind or degree teaches nothing."""
        expected = self._interpolated(kind, degree, rows, tokens)
        if expected is None:
            return
        stretches = self._stretches[kind, rows, _class(tokens)]
        before = stretches.get(degree, 1.0)
        ratio = min(max(seconds / expected, before / MOST), before * MOST)
        stretches[degree] = FORGET * before + (1 - FORGET) * ratio

    def seconds(self, kind: Hashable, degree: int, rows: int, tokens: int) -> float | None:
        """Predicted time of a step; None if none of this kind and degree was measured. A degree of which no step of
        this class was seen is as far from the measured times as the others are in the mean.
        """
        expected = self._interpolated(kind, degree, rows, tokens)
        stretches = self._stretches.get((kind, rows, _class(tokens)))
        if expected is None or not stretches:
            return expected
        mean = sum(stretches.values()) / len(stretches)
        return expected * stretches.get(degree, mean)

    def _interpolated(self, kind: Hashable, degree: int, rows: int, tokens: int) -> float | None:
        by_rows = self._measured.get((kind, degree))
        if by_rows is None:
            return None
        points = by_rows.get(rows) or {size: seconds for of in by_rows.values() for size, seconds in of.items()}
        return interpolated(sorted(points.items()), rows * tokens)


def _class(tokens: int) -> int:
    return round(CLASSES_PER_DOUBLING * log2(max(1, tokens)))
