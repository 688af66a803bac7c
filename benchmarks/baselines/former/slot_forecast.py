"""SlotForecast: lower bound on how long a waiting request takes, given the running ones.

An engine has a fixed number of slots (`max_num_seqs`); each running request has one, and all advance together, step by
step. Pure arithmetic on RemainingLoads.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappush, heappushpop

from benchmarks.baselines.former.remaining_loads import RemainingLoad

Slot = tuple[float, float]
"""The request in a slot: its steps left, and the seconds it adds to each of them."""


def until_free(loads: Iterable[Slot], num_slots: int, base_seconds: float) -> tuple[float, list[Slot]]:
    """Seconds until a slot is free if these requests go through the slots in this order, and the contents of the other
    slots at that time.

    A free slot is taken at once by the next in line. Exact for a FIFO queue, and O(log slots) per request: all ends are
    counted in steps from now on and kept in a heap.
    """
    ends: list[Slot] = []
    step = elapsed = 0.0
    pace = base_seconds
    for steps, seconds in loads:
        pace += seconds
        if len(ends) + 1 < num_slots:
            heappush(ends, (step + steps, seconds))
        else:
            end, gone = heappushpop(ends, (step + steps, seconds))
            elapsed += (end - step) * pace
            step = end
            pace -= gone
    return elapsed, [(end - step, seconds) for end, seconds in ends if end > step]


class SlotForecast:
    """Lower bounds for requests that wait for a slot, given those that run."""

    def __init__(self, running: Iterable[RemainingLoad], num_slots: int, base_seconds: float) -> None:
        slots = [(float(load.steps_left), load.step_seconds) for load in running if load.steps_left]
        self._base = base_seconds
        self._wait, self._others = until_free(slots, num_slots, base_seconds)

    def seconds(self, load: RemainingLoad, earliest: float = 0.0) -> float:
        """Seconds until it is done if it takes the next free slot, but in `earliest` seconds at the soonest, and shares
        its steps with the running ones alone.
        """
        beside = sum(min(load.steps_left, steps) * seconds for steps, seconds in self._others)
        return max(self._wait + beside, earliest) + alone(load, self._base)


def alone(load: RemainingLoad, base_seconds: float) -> float:
    """Seconds that a request takes if it shares its steps with no other one."""
    return load.steps_left * (base_seconds + load.step_seconds) + load.other_seconds
