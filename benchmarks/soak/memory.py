"""What the server holds of the machine over time, and by how much that grows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from benchmarks.soak.tree import Holdings, Role

MB = 1e6

WORKER_WARM_UP_SECONDS = 120.0
"""From a worker's start: it loads for some part of that, and then keeps compiled operators of the shapes that it meets,
until there is no more room for them (model_executor/worker.py)."""

PAIR_SECONDS = 20.0, 60.0
"""How far two samples of a worker are apart, at least and at most, that make a slope."""

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Sample:
    """seconds: since the start of the traffic. is_whole: all engines served."""

    seconds: float
    held: Holdings
    is_whole: bool


class Samples:
    """What counts comes after the warm-up and, but for the API server's own, was taken while all engines served: one
    that is being started holds less.

    Deaths make the workers' memory a saw, which begins anew with every restart and hides what a worker leaks: a soak
    without deaths shows that, and `worker_growth`.
    """

    def __init__(self, warm_up_seconds: float) -> None:
        self._warm_up_seconds = warm_up_seconds
        self._samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def memory_slope(self, *roles: Role) -> float:
        """MB per minute: least squares over the minutes' medians; of some roles together, or of all. NaN when there are
        fewer than three."""
        minutes = self._minutes(lambda held: _sum(held.memory, roles) / MB, roles)
        if len(minutes) < 3:
            return float("nan")
        times, values = np.array(minutes).T
        return float(np.polyfit(times, values, deg=1)[0])

    def worker_growth(self) -> float:
        """MB per minute that a worker grows by once it is warm: the median of the slopes between two samples of one
        life, over all pairs (Theil and Sen's estimate, of near samples alone). A jump to a new maximum of its heap,
        which comes once with the largest batch so far, is not in it. NaN where no life was seen for so long.
        """
        slopes = [_slopes(*life) for life in self._warm_lives()]
        every = np.concatenate(slopes) if slopes else np.empty(0)
        return float(np.median(every)) if len(every) else float("nan")

    def worker_growth_with_jumps(self) -> float:
        """Likewise, by least squares over all lives, each with a level of its own."""
        lives = [(ages - ages.mean(), sizes - sizes.mean()) for ages, sizes in self._warm_lives()]
        if not any(len(ages) for ages, _ in lives):
            return float("nan")
        ages, sizes = (np.concatenate(parts) for parts in zip(*lives, strict=True))
        return float(ages @ sizes / (ages @ ages))

    def warm_worker(self) -> float:
        """MB of a warm worker, the median; NaN where none was seen."""
        sizes = [size for _, sizes in self._warm_lives() for size in sizes]
        return statistics.median(sizes) if sizes else float("nan")

    def num_worker_lives(self) -> int:
        """Those that `worker_growth` was taken from."""
        return len(self._warm_lives())

    def memory(self, *roles: Role) -> tuple[float, float]:
        """MB in the first and in the last minute; NaN without samples."""
        return self._ends(lambda held: _sum(held.memory, roles) / MB, roles)

    def fds(self, *roles: Role) -> tuple[float, float]:
        """File descriptors, likewise."""
        return self._ends(lambda held: _sum(held.fds, roles), roles)

    def threads(self) -> tuple[float, float]:
        return self._ends(lambda held: _sum(held.threads))

    def processes(self) -> tuple[float, float]:
        return self._ends(lambda held: _sum(held.processes))

    def _ends(self, value: Callable[[Holdings], float], roles: Sequence[Role] = ()) -> tuple[float, float]:
        minutes: Sequence[tuple[float, float]] = self._minutes(value, roles) or [(0.0, float("nan"))]
        return minutes[0][1], minutes[-1][1]

    def _minutes(self, value: Callable[[Holdings], float], roles: Sequence[Role]) -> list[tuple[float, float]]:
        """(minute, median) of those that count."""
        by_minute: dict[int, list[float]] = {}
        for sample in self._samples:
            if sample.seconds >= self._warm_up_seconds and (sample.is_whole or roles == ("server",)):
                by_minute.setdefault(int(sample.seconds // 60), []).append(value(sample.held))
        return [(minute, statistics.median(values)) for minute, values in by_minute.items()]

    def _warm_lives(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ages in minutes and sizes in MB of each worker that was seen more than once when it was warm."""
        lives: dict[int, list[tuple[float, float]]] = {}
        for sample in self._samples:
            for worker in sample.held.workers if sample.is_whole else ():
                if worker.age >= WORKER_WARM_UP_SECONDS:
                    lives.setdefault(worker.pid, []).append((worker.age / 60, worker.memory / MB))
        columns = (np.array(life).T for life in lives.values() if len(life) > 1)
        return [(ages, sizes) for ages, sizes in columns]


def _slopes(ages: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """MB per minute between any two samples as far apart as they should be."""
    apart, (least, most) = ages[None] - ages[:, None], PAIR_SECONDS
    is_pair = (apart >= least / 60) & (apart <= most / 60)
    slopes: np.ndarray = (sizes[None] - sizes[:, None])[is_pair] / apart[is_pair]
    return slopes


def _sum(counts: Counter[str], roles: Iterable[Role] = ()) -> float:
    return sum(counts[role] for role in roles) if roles else counts.total()
