"""Which requests go to which lanes: the largest set that can be in time, and of equal ones that of least latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import nsmallest
from math import inf

from core.costs.forecast import Forecast, Pace, SlotTask

MOST_TRIED = 4
"""Lanes that a request is tried in, those with least work. With many ranks more would cost more than they gain."""


@dataclass(slots=True)
class FilledLane:
    """The requests that one rank is to serve."""

    slots: Forecast
    tasks: Sequence[SlotTask]  # of all ranks
    chosen: list[int] = field(default_factory=list)  # indexes of its tasks, in the order in which they get slots
    most: int = 0  # the largest number of requests that were looked at together
    work: float = 0.0  # seconds that the chosen ones take one after the other, and until the rank is free
    _ends: tuple[list[int], list[float]] = field(default_factory=lambda: ([], []))  # of these tasks, see `ends`

    @property
    def ends(self) -> list[float]:
        """Seconds until each of the chosen ones is done."""
        if self._ends[0] != self.chosen:
            self._ends = [*self.chosen], self.slots.ends([self.tasks[index] for index in self.chosen])
        return self._ends[1]

    @property
    def is_in_time(self) -> bool:
        """Whether all that are chosen are."""
        return all(end <= self.tasks[index].due_in for index, end in zip(self.chosen, self.ends, strict=True))

    def add(self, index: int) -> None:
        """Serve a task, which is due last."""
        self.chosen.append(index)
        self.most = max(self.most, len(self.chosen))
        self.work += self.slots.seconds_alone(self.tasks[index])

    def end_with(self, index: int) -> float:
        """Seconds until a newcomer that is due last would be done; inf if it or a chosen one would be late."""
        self.most = max(self.most, len(self.chosen) + 1)
        return self.slots.end_of_last([self.tasks[other] for other in (*self.chosen, index)])

    def replace(self, old: int, new: int) -> None:
        """Serve task `new` instead of task `old`, if all are in time then."""
        without = [other for other in self.chosen if other != old]
        if self.slots.end_of_last([self.tasks[other] for other in (*without, new)]) < inf:
            self.chosen = [*without, new]
            self.work += self.slots.seconds_alone(self.tasks[new]) - self.slots.seconds_alone(self.tasks[old])


def fill_lanes(tasks: Sequence[SlotTask], ranks: Sequence[Forecast]) -> list[FilledLane]:
    """The lanes of these ranks, which together serve as many requests as can be in time. tasks: the one that is due
    first comes first.

    Each goes where least work is left, if all are in time then. Else Moore and Hodgson's algorithm: requests are added
    by due time, each to the lane where it is done first while all stay in time; if there is none, the one with most
    work left goes. For one rank it is optimal where a step takes as much longer as it has more requests; where batches
    are worth it, the number of slots matters, see `best_lanes`.
    """
    lanes = [FilledLane(slots, tasks, work=slots.start) for slots in ranks]
    for index, task in enumerate(tasks):
        min(_able(task, lanes), key=lambda lane: (lane.work, len(lane.chosen))).add(index)
    if all(lane.is_in_time for lane in lanes):
        return lanes
    lanes = [FilledLane(slots, tasks, work=slots.start) for slots in ranks]
    for index, task in enumerate(tasks):
        able = nsmallest(MOST_TRIED, _able(task, lanes), key=lambda lane: lane.work)
        end, _, place = min((lane.end_with(index), len(lane.chosen), place) for place, lane in enumerate(able))
        if end < inf or task.must:
            able[place].add(index)
            continue
        members = [(_weight(tasks[other], task), other, lane) for lane in able for other in lane.chosen]
        weight, longest, lane = max(members, key=lambda member: member[:2], default=((False, False, 0.0), -1, able[0]))
        if (weight, longest) > (_weight(task, task), index):
            lane.replace(longest, index)
    return lanes


def _weight(task: SlotTask, newcomer: SlotTask) -> tuple[bool, bool, float]:
    """Sort key for giving way to a newcomer, greatest first: a task that may, has no due time, and has most work."""
    may_give_way = task.group == newcomer.group and not task.must
    return may_give_way, task.due_in == inf, task.steps * task.size


TO_COME = 2
"""Requests that come before all that are there are done, and are delayed by them, as a multiple of those that are there
and have no due time. Of those with one it counts how many are in time: they are safe if they are done early.
"""


def best_lanes(
    tasks: Sequence[SlotTask],
    most_slots: int,
    pace: Pace,
    starts: Sequence[float],
    *,
    blocks: bool = True,
    largest_seen: int = 0,
) -> list[FilledLane]:
    """The lanes, one per rank, that serve most requests in time. Among equally good ones, those with most slots
    count if so many requests never shared a step, because only batches show what they take; then those for which all
    requests, later ones included, are done earliest on average. tasks: the one that is due first comes first. starts:
    seconds until each rank is free. blocks: see `Forecast`. largest_seen: the largest number of requests that have
    often shared a step.

    Many slots make a rank efficient, which later requests gain by; few slots let the first requests finish early.
    """
    found = list[tuple[int, int, float, int, list[FilledLane]]]()
    for number in slots_to_try(max(1, min(most_slots, len(tasks)))):
        lanes = fill_lanes(tasks, [Forecast(number, pace, blocks, start) for start in starts])
        served, seconds = _judge(tasks, lanes)
        together = min(number, max((len(lane.chosen) for lane in lanes), default=0))
        found.append((served, together if together > largest_seen else 0, -seconds, number, lanes))
        if all(lane.most <= number for lane in lanes):
            break  # with more slots all would be the same
    return max(found)[-1]


def _judge(tasks: Sequence[SlotTask], lanes: Sequence[FilledLane]) -> tuple[int, float]:
    """How many tasks these lanes serve, and the sum of all latencies, those of later requests included."""
    num_served, last, without_due = 0, dict[str | int, float](), set[str | int]()
    for lane in lanes:
        num_served += len(lane.chosen)
        for index, end in zip(lane.chosen, lane.ends, strict=True):
            call = tasks[index].call or index
            last[call] = max(end, last.get(call, 0.0))
            if not tasks[index].has_due:
                without_due.add(call)
    return num_served, sum(last.values()) + TO_COME * len(without_due) * max(last.values(), default=0.0)


def _able(task: SlotTask, lanes: Sequence[FilledLane]) -> Sequence[FilledLane]:
    """The lanes of the ranks that can serve a task."""
    return [lanes[rank] for rank in task.ranks] if task.ranks else lanes


@cache
def slots_to_try(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and the most."""
    powers = [1 << power for power in range(most.bit_length())]
    between = [3 * power // 2 for power in powers[1:]]
    return tuple(sorted({number for number in [*powers, *between, most] if number <= most}))
