"""What the server holds of the machine over time, and by how much that grows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.soaking.tree import Holdings, Role

MB = 1e6


@dataclass(frozen=True)
class Sample:
    """seconds: since the start of the traffic. is_whole: all engines served."""

    seconds: float
    held: Holdings
    is_whole: bool


class Samples:
    """What counts comes after the warm-up and, but for the API server's own, was taken while all engines served: one
    that is being started holds less. Deaths make the engines' memory a saw, which begins anew with every restart: so
    each minute counts with its median.
    """

    def __init__(self, warm_up_seconds: float) -> None:
        self._warm_up_seconds = warm_up_seconds
        self._samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def memory_slope(self, role: Role | None = None) -> float:
        """MB per minute: least squares over the minutes' medians; of one role or of all. NaN when there are fewer than
        three."""
        minutes = self._minutes(lambda held: _sum(held.pss, role) / MB, role)
        if len(minutes) < 3:
            return float("nan")
        times, values = np.array(minutes).T
        return float(np.polyfit(times, values, deg=1)[0])

    def memory(self, role: Role | None = None) -> tuple[float, float]:
        """MB in the first and in the last minute; NaN without samples."""
        return self._ends(lambda held: _sum(held.pss, role) / MB, role)

    def fds(self, role: Role | None = None) -> tuple[float, float]:
        """File descriptors, likewise."""
        return self._ends(lambda held: _sum(held.fds, role), role)

    def threads(self) -> tuple[float, float]:
        return self._ends(lambda held: _sum(held.threads))

    def processes(self) -> tuple[float, float]:
        return self._ends(lambda held: _sum(held.processes))

    def _ends(self, value: Callable[[Holdings], float], role: Role | None = None) -> tuple[float, float]:
        minutes: Sequence[tuple[float, float]] = self._minutes(value, role) or [(0.0, float("nan"))]
        return minutes[0][1], minutes[-1][1]

    def _minutes(self, value: Callable[[Holdings], float], role: Role | None) -> list[tuple[float, float]]:
        """(minute, median) of those that count."""
        by_minute: dict[int, list[float]] = {}
        for sample in self._samples:
            if sample.seconds >= self._warm_up_seconds and (sample.is_whole or role == "server"):
                by_minute.setdefault(int(sample.seconds // 60), []).append(value(sample.held))
        return [(minute, statistics.median(values)) for minute, values in by_minute.items()]


def _sum(counts: Counter[str], role: Role | None = None) -> float:
    return counts[role] if role else counts.total()
