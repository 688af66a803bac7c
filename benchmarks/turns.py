"""Measurements in turns: a machine that slows down slows all that is compared, so the ratios of a round stay true."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Clock = Callable[[], float]


def timed(call: Callable[[], object], clock: Clock = time.perf_counter) -> Callable[[], float]:
    """`call`, returning its seconds."""

    def run() -> float:
        start = clock()
        call()
        return clock() - start

    return run


def in_turns(ways: Mapping[Name, Callable[[], float]], rounds: int, warm_ups: int = 1) -> dict[Name, list[float]]:
    """What each way returned in each round, in an order that is reversed from round to round. Warm-up rounds come first
    and do not count."""
    figures: dict[Name, list[float]] = {name: [] for name in ways}
    for number in range(-warm_ups, rounds):
        for name in list(ways)[:: 1 if (number + warm_ups) % 2 == 0 else -1]:
            figure = ways[name]()
            if number >= 0:
                figures[name].append(figure)
    return figures


def medians(ways: Mapping[Name, Callable[[], float]], rounds: int, warm_ups: int = 1) -> dict[Name, float]:
    """Of `in_turns`."""
    return {name: statistics.median(values) for name, values in in_turns(ways, rounds, warm_ups).items()}


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median over rounds."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
