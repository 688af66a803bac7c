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


class Turn(NamedTuple):
    """The remaining work of one request."""

    steps: int  # above 0
    size: float  # that it adds to the steps of its batch, in the unit of a Pace
    before: float = 0.0  # seconds of other work before its first step
    after: float = 0.0  # seconds of other work after its last step
    left: float = inf  # seconds until it is due; inf: it has no due time, or is late already
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
class Slots:
    """Those of one rank."""

    number: int
    pace: Pace
    blocks: bool = True  # the rank also does the work before and after the steps, and makes none meanwhile
    start: float = 0.0  # seconds until it is free

    def ends(self, turns: Sequence[Turn]) -> list[float]:
        """Seconds until each is done, if they take the slots in this order."""
        found = [0.0] * len(turns)
        for index, end in self._ends(turns):
            found[index] = end
        return found

    def end_of_last(self, turns: Sequence[Turn]) -> float:
        """Seconds until the last of them is done, of one or more; inf if any would be late. See `ends`."""
        last, found = len(turns) - 1, 0.0
        for index, end in self._ends(turns):
            if end > turns[index].left:
                return inf
            if index == last:
                found = end
        return found

    def _ends(self, turns: Sequence[Turn]) -> Iterator[tuple[int, float]]:
        """(index, end), the earliest last step first. All ends are counted in steps from now on and kept in a heap."""
        heap: list[tuple[int, int]] = []  # (steps made when it is done, index)
        elapsed, made, size, following = self.start, 0, 0.0, 0
        while heap or following < len(turns):
            while following < len(turns) and len(heap) < self.number:
                turn = turns[following]
                heappush(heap, (made + turn.steps, following))
                size += turn.size
                elapsed += turn.before if self.blocks else 0.0
                following += 1
            end, index = heappop(heap)
            elapsed += (end - made) * self.pace.seconds(len(heap) + 1, size)
            made, turn = end, turns[index]
            size -= turn.size
            yield index, elapsed + turn.after + (0.0 if self.blocks else turn.before)
            elapsed += turn.after if self.blocks else 0.0


# ------------------------------------------------------------------------------------------------ the largest set


@dataclass(slots=True)
class Line:
    """What one rank is to serve."""

    slots: Slots
    turns: Sequence[Turn]  # of all ranks
    chosen: list[int] = field(default_factory=list)  # indexes of its own, ascending
    most: int = 0  # the largest number of requests that were looked at together

    def end_with(self, index: int) -> float:
        """Seconds until another one is done, which is due last; inf if it or one of them would be late."""
        self.most = max(self.most, len(self.chosen) + 1)
        return self.slots.end_of_last([self.turns[other] for other in (*self.chosen, index)])

    def replace(self, old: int, new: int) -> None:
        """Serve another one instead of this one, if all are in time with it."""
        without = [other for other in self.chosen if other != old]
        if self.slots.end_of_last([self.turns[other] for other in (*without, new)]) < inf:
            self.chosen = [*without, new]


def largest_sets(turns: Sequence[Turn], ranks: Sequence[Slots]) -> list[list[int]]:
    """Of each rank, indexes of the requests that it serves, as many of all as can be in time; ascending. turns: the one
    that is due first first.

    Moore and Hodgson's algorithm: requests are added by due time, each to the rank where it is done first while all
    stay in time; if there is none, the one with most work left goes. For one rank it is optimal where a step takes as
    much longer as it has more requests; where batches are worth it, the number of slots matters, see `best_schedules`.
    """
    return [line.chosen for line in _lines(turns, ranks)]


def _lines(turns: Sequence[Turn], ranks: Sequence[Slots]) -> list[Line]:
    """See `largest_sets`."""
    lines = [Line(slots, turns) for slots in ranks]
    for index, turn in enumerate(turns):
        able = [lines[rank] for rank in turn.ranks] if turn.ranks else lines
        end, _, place = min((line.end_with(index), len(line.chosen), place) for place, line in enumerate(able))
        if end < inf or turn.must:
            able[place].chosen.append(index)
            continue
        members = [(_weight(turns[other], turn), other, line) for line in able for other in line.chosen]
        weight, longest, line = max(members, key=lambda member: member[:2], default=((False, False, 0.0), -1, able[0]))
        if (weight, longest) > (_weight(turn, turn), index):
            line.replace(longest, index)
    return lines


def _weight(turn: Turn, newcomer: Turn) -> tuple[bool, bool, float]:
    """Of those that may give way to a newcomer, those without a due time go first, then those with most work."""
    may_give_way = turn.group == newcomer.group and not turn.must
    return may_give_way, turn.left == inf, turn.work


class Schedule(NamedTuple):
    """Which requests a rank serves, and how many at a time."""

    chosen: tuple[int, ...]  # indexes, in the order in which they get slots
    num_slots: int


def best_schedules(
    turns: Sequence[Turn], most_slots: int, pace: Pace, starts: Sequence[float], *, blocks: bool = True
) -> list[Schedule]:
    """The schedules of all ranks that serve most requests in time, and of those the ones whose requests are done first,
    the mean over them: where steps take unequal times, requests that are done early are safe. turns: the one that is
    due first first. starts: of each rank, seconds until it is free. blocks: see `Slots`.

    Many slots make a rank efficient, few of them let those that are due first finish early.
    """
    found = list[tuple[int, float, int, list[Schedule]]]()
    for number in slots_to_try(max(1, min(most_slots, len(turns)))):
        lines = _lines(turns, [Slots(number, pace, blocks, start) for start in starts])
        ends = [end for line in lines for end in line.slots.ends([turns[index] for index in line.chosen])]
        schedules = [Schedule(tuple(line.chosen), number) for line in lines]
        found.append((len(ends), -sum(ends) / max(1, len(ends)), number, schedules))
        if all(line.most <= number for line in lines):
            break  # with more slots all would be the same
    return max(found)[-1]


@cache
def slots_to_try(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and the most."""
    powers = [1 << power for power in range(most.bit_length())]
    between = [3 * power // 2 for power in powers[1:]]
    return tuple(sorted({number for number in [*powers, *between, most] if number <= most}))
