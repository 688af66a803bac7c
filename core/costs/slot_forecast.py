"""SlotForecast: how long a waiting request takes at least, given the requests that run. Pure arithmetic on RequestLoads."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from core.costs.load_report import RequestLoad

Slot = tuple[float, float]
"""Steps left of a request, and the seconds it adds to each of them."""


def until_free(loads: Iterable[Slot], num_slots: int, base_seconds: float) -> tuple[float, list[Slot]]:
    """Seconds until one of the slots is free if these requests, in this order, go through them one step at a time, and
    who is in the other slots then.

    A slot that ends is taken by the next in line at once. Exact for a FIFO queue and O(log slots) per request: steps
    are counted from now on for all, so that each request has one end, and a heap tells the next.
    """
    ends: list[Slot] = []
    step = elapsed = 0.0
    pace = base_seconds
    for steps, seconds in loads:
        heappush(ends, (step + steps, seconds))
        pace += seconds
        if len(ends) == num_slots:
            end, gone = heappop(ends)
            elapsed += (end - step) * pace
            step = end
            pace -= gone
    return elapsed, [(end - step, seconds) for end, seconds in ends if end > step]


class SlotForecast:
    """How long a request that waits will take at least, given those that run."""

    def __init__(self, running: Iterable[RequestLoad], num_slots: int, base_seconds: float) -> None:
        slots = [(float(load.steps_left), load.step_seconds) for load in running if load.steps_left]
        self._base = base_seconds
        self._wait, self._others = until_free(slots, num_slots, base_seconds)

    def seconds(self, load: RequestLoad) -> float:
        """If it has the next free slot, beside those that run now and nobody else."""
        beside = sum(min(load.steps_left, steps) * seconds for steps, seconds in self._others)
        return self._wait + alone(load, self._base) + beside


def alone(load: RequestLoad, base_seconds: float) -> float:
    """Seconds that a request takes that nobody shares a step with."""
    return load.steps_left * (base_seconds + load.step_seconds) + load.other_seconds
