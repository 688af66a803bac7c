"""When requests that take turns in the slots of a batch are done, and the largest set of them that can be in time.

A rank makes the steps of its requests. All of them that have a slot share each step; a request that has made its last
step gives its slot to the next in line. Pure arithmetic, in seconds from now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
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

    @property
    def work(self) -> float:
        """A measure of how much is left."""
        return self.steps * self.size


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


def linear_pace(base_seconds: float) -> Pace:
    """For sizes in seconds, and a constant part that does not depend on the requests."""
    return _Linear((base_seconds,), (1.0,))


class _Linear(Pace):
    __slots__ = ()

    def seconds(self, number: int, size: float) -> float:
        return self.fixed[0] + size


@dataclass(frozen=True, slots=True)
class RankSlots:
    """The slots of one rank."""

    number: int
    pace: Pace
    blocks: bool = True  # the rank also does the work before and after the steps, and makes none meanwhile
    start: float = 0.0  # seconds until it is free

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


# ------------------------------------------------------------------------------------------------ the largest set


@dataclass(slots=True)
class LaneBuilder:
    """The requests that one rank is to serve, while they are chosen."""

    slots: RankSlots
    tasks: Sequence[SlotTask]  # of all ranks
    chosen: list[int] = field(default_factory=list)  # indexes of this lane's tasks, ascending
    most: int = 0  # the largest number of requests that were looked at together

    def end_with(self, index: int) -> float:
        """Seconds until a newcomer that is due last would be done; inf if it or a chosen one would be late."""
        self.most = max(self.most, len(self.chosen) + 1)
        return self.slots.end_of_last([self.tasks[other] for other in (*self.chosen, index)])

    def replace(self, old: int, new: int) -> None:
        """Serve task `new` instead of task `old`, if all are in time then."""
        without = [other for other in self.chosen if other != old]
        if self.slots.end_of_last([self.tasks[other] for other in (*without, new)]) < inf:
            self.chosen = [*without, new]


def fill_lanes(tasks: Sequence[SlotTask], ranks: Sequence[RankSlots]) -> list[LaneBuilder]:
    """The lanes of these ranks, which together serve as many requests as can be in time. tasks: the one that is due
    first comes first.

    Moore and Hodgson's algorithm: requests are added by due time, each to the lane where it is done first while all
    stay in time; if there is none, the one with most work left goes. For one rank it is optimal where a step takes as
    much longer as it has more requests; where batches are worth it, the number of slots matters, see `best_schedules`.
    """
    lanes = [LaneBuilder(slots, tasks) for slots in ranks]
    for index, task in enumerate(tasks):
        able = [lanes[rank] for rank in task.ranks] if task.ranks else lanes
        end, _, place = min((lane.end_with(index), len(lane.chosen), place) for place, lane in enumerate(able))
        if end < inf or task.must:
            able[place].chosen.append(index)
            continue
        members = [(_weight(tasks[other], task), other, lane) for lane in able for other in lane.chosen]
        weight, longest, lane = max(members, key=lambda member: member[:2], default=((False, False, 0.0), -1, able[0]))
        if (weight, longest) > (_weight(task, task), index):
            lane.replace(longest, index)
    return lanes


def _weight(task: SlotTask, newcomer: SlotTask) -> tuple[bool, bool, float]:
    """Sort key for giving way to a newcomer, greatest first: a task that may, has no due time, and has most work."""
    may_give_way = task.group == newcomer.group and not task.must
    return may_give_way, task.due_in == inf, task.work


class Schedule(NamedTuple):
    """The requests that a rank serves, and how many of them at a time."""

    chosen: tuple[int, ...]  # indexes, in the order in which they get slots
    num_slots: int


TO_COME = 2
"""Requests that come before all that are there are done, and are delayed by them, as a multiple of those that are."""


def best_schedules(
    tasks: Sequence[SlotTask],
    most_slots: int,
    pace: Pace,
    starts: Sequence[float],
    *,
    blocks: bool = True,
    num_later: int = 0,
) -> list[Schedule]:
    """The schedules, one per rank, that serve most requests in time. Among equally good ones, those count for which all
    requests, later ones included, are done earliest on average. tasks: the one that is
    due first comes first. starts: seconds until each rank is free. blocks: see `RankSlots`. num_later: further requests
    that wait for all of these.

    Many slots make a rank efficient, which later requests gain by; few slots let the first requests finish early.
    """
    fill = fill_lanes if any(task.due_in < inf for task in tasks) else spread
    found = list[tuple[int, float, int, list[Schedule]]]()
    for number in slots_to_try(max(1, min(most_slots, len(tasks)))):
        lanes = fill(tasks, [RankSlots(number, pace, blocks, start) for start in starts])
        ends = [end for lane in lanes for end in lane.slots.ends([tasks[index] for index in lane.chosen])]
        schedules = [Schedule(tuple(lane.chosen), number) for lane in lanes]
        seconds = sum(ends) + (num_later + TO_COME * len(ends)) * max(ends, default=0.0)
        found.append((len(ends), -seconds, number, schedules))
        if all(lane.most <= number for lane in lanes):
            break  # with more slots all would be the same
    return max(found)[-1]


def spread(tasks: Sequence[SlotTask], ranks: Sequence[RankSlots]) -> list[LaneBuilder]:
    """The lanes of these ranks, where none of the tasks has a due time: each goes where least work is left."""
    lanes = [LaneBuilder(slots, tasks) for slots in ranks]
    left = [slots.start for slots in ranks]
    for index, task in enumerate(tasks):
        seconds = task.before + task.after + task.steps * ranks[0].pace.seconds(1, task.size)
        place = min(task.ranks or range(len(lanes)), key=lambda place: (left[place], len(lanes[place].chosen), place))
        left[place] += seconds
        lanes[place].chosen.append(index)
    for lane in lanes:
        lane.most = len(lane.chosen)
    return lanes


@cache
def slots_to_try(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and the most."""
    powers = [1 << power for power in range(most.bit_length())]
    between = [3 * power // 2 for power in powers[1:]]
    return tuple(sorted({number for number in [*powers, *between, most] if number <= most}))
