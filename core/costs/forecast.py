"""Forecast: when requests that take turns in the slots of a lane are done, and when a slot is free.

A lane makes the steps of its requests. All of them that have a slot share each step; a request that has made its last
step gives its slot to the next in line. The planner asks which of them can be in time (`lane_filling.py`). Pure
arithmetic, in seconds from now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple


class SlotTask(NamedTuple):
    """The remaining work of one request."""

    steps: int  # above 0
    size: float  # that it adds to the steps of its batch, in the unit of a Pace
    before: float = 0.0  # seconds of other work before its first step
    after: float = 0.0  # seconds of other work after its last step
    due_in: float = inf  # seconds until it is due; inf: it has no due time, or is late already
    must: bool = False  # it is served even if others become late because of it
    group: tuple[str, int] = ("", 0)  # owner and priority class: it gives way only within these
    ranks: tuple[int, ...] = ()  # indexes of the ranks that can serve it; none: all can
    call: str = ""  # id of the call that is answered when all of its tasks are done; "": of its own
    has_due: bool = False  # it has a due time, which it may be unable to meet


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a step: by number of requests a constant, and a slope over the sum of their sizes. Both tuples are for
    1, 2, ... requests; more than that cost as many more of the last one's.
    """

    fixed: tuple[float, ...]
    slope: tuple[float, ...]

    def seconds(self, number: int, size: float) -> float:
        most = len(self.fixed)
        if number <= most:
            return self.fixed[number - 1] + self.slope[number - 1] * size
        return (self.fixed[-1] + self.slope[-1] * size * most / number) * number / most


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one lane."""

    number: int
    pace: Pace
    blocks: bool = True  # the rank also does the work before and after the steps, and makes none meanwhile
    start: float = 0.0  # seconds until it is free

    def seconds_alone(self, task: SlotTask) -> float:
        """Seconds of a task if no other one shares its steps."""
        return task.before + task.steps * self.pace.seconds(1, task.size) + task.after

    def ends(self, tasks: Sequence[SlotTask]) -> list[float]:
        """Seconds until each is done, if they take the slots in this order."""
        found = [0.0] * len(tasks)
        for index, end in self._ends(tasks):
            found[index] = end
        return found

    def end_of_last(self, tasks: Sequence[SlotTask]) -> float:
        """Seconds until the last of these tasks is done; inf if any would be late. tasks: at least one. See `ends`."""
        last, found = len(tasks) - 1, 0.0
        for index, end in self._ends(tasks):
            if end > tasks[index].due_in:
                return inf
            if index == last:
                found = end
        return found

    def _ends(self, tasks: Sequence[SlotTask]) -> Iterator[tuple[int, float]]:
        """(index, end), the earliest last step first. All ends are counted in steps from now on and kept in a heap."""
        heap: list[tuple[int, int]] = []  # (steps made when it is done, index)
        elapsed, made, size, following = self.start, 0, 0.0, 0
        while heap or following < len(tasks):
            while following < len(tasks) and len(heap) < self.number:
                task = tasks[following]
                heappush(heap, (made + task.steps, following))
                size += task.size
                elapsed += task.before if self.blocks else 0.0
                following += 1
            end, index = heappop(heap)
            elapsed += (end - made) * self.pace.seconds(len(heap) + 1, size)
            made, task = end, tasks[index]
            size -= task.size
            yield index, elapsed + task.after + (0.0 if self.blocks else task.before)
            elapsed += task.after if self.blocks else 0.0
