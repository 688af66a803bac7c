"""When requests that take turns in the slots of a batch are done, and the largest set of them that can be in time.

One rank makes the steps. All requests that have a slot share each of them; a request that has made its last step gives
its slot to the next in line. Pure arithmetic, in seconds from now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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


def ends(turns: Sequence[Turn], num_slots: int, pace: Pace, *, blocks: bool) -> list[float]:
    """Seconds until each is done, if they take the slots in this order. blocks: whether the rank that makes the steps
    also does the work before and after them, and makes no steps meanwhile.
    """
    found = [0.0] * len(turns)
    for index, end in _ends(turns, num_slots, pace, blocks=blocks):
        found[index] = end
    return found


def are_in_time(turns: Sequence[Turn], num_slots: int, pace: Pace, *, blocks: bool) -> bool:
    """Whether every one of them that has a due time is done by then; see `ends`."""
    return all(end <= turns[index].left for index, end in _ends(turns, num_slots, pace, blocks=blocks))


def _ends(turns: Sequence[Turn], num_slots: int, pace: Pace, *, blocks: bool) -> Iterator[tuple[int, float]]:
    """(index, end), the earliest last step first. All ends are counted in steps from now on and kept in a heap."""
    heap: list[tuple[int, int]] = []  # (steps made when it is done, index)
    elapsed, made, size, following = 0.0, 0, 0.0, 0
    while heap or following < len(turns):
        while following < len(turns) and len(heap) < num_slots:
            turn = turns[following]
            heappush(heap, (made + turn.steps, following))
            size += turn.size
            elapsed += turn.before if blocks else 0.0
            following += 1
        end, index = heappop(heap)
        elapsed += (end - made) * pace.seconds(len(heap) + 1, size)
        made, turn = end, turns[index]
        size -= turn.size
        yield index, elapsed + turn.after + (0.0 if blocks else turn.before)
        elapsed += turn.after if blocks else 0.0


def largest_set(turns: Sequence[Turn], num_slots: int, pace: Pace, *, blocks: bool) -> list[int]:
    """Indexes of as many requests as can be served in time; ascending. turns: the one that is due first first.

    Moore and Hodgson's algorithm for one machine: requests are added by due time, and when one becomes late, the one
    with most work left goes. It is optimal where a step takes as much longer as it has more requests; where batches are
    worth it, the number of slots matters, see `best_schedule`.
    """

    def in_time(indexes: Sequence[int]) -> bool:
        return are_in_time([turns[index] for index in indexes], num_slots, pace, blocks=blocks)

    chosen: list[int] = []
    for index, turn in enumerate(turns):
        chosen.append(index)
        if turn.must or in_time(chosen):
            continue
        longest = max(chosen, key=lambda other: (_weight(turns[other], turn), other))
        without = [other for other in chosen if other != longest]
        chosen = without if longest == index or in_time(without) else chosen[:-1]
    return chosen


def _weight(turn: Turn, newcomer: Turn) -> tuple[bool, bool, float]:
    """Of those that may give way to a newcomer, those without a due time go first, then those with most work."""
    may_give_way = turn.group == newcomer.group and not turn.must
    return may_give_way, turn.left == inf, turn.work


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which requests are served, and how many at a time."""

    chosen: tuple[int, ...]  # indexes, in the order in which they get slots
    num_slots: int


def best_schedule(
    turns: Sequence[Turn],
    most_slots: int,
    pace: Pace,
    *,
    blocks: bool,
    slots: Callable[[int], Iterable[int]] | None = None,
) -> Schedule:
    """The schedule that serves most requests in time, and of those the one whose requests are done first, the mean over
    them: where steps take unequal times, requests that are done early are safe. turns: the one that is due first first.
    slots: numbers of slots to try, given the largest useful one; by default `slots_to_try`.

    Many slots make the rank efficient, few of them let those that are due first finish early.
    """
    most = max(1, min(most_slots, len(turns)))
    found = [_schedule(turns, number, pace, blocks=blocks) for number in (slots or slots_to_try)(most)]
    return max(found)[-1]


def _schedule(turns: Sequence[Turn], num_slots: int, pace: Pace, *, blocks: bool) -> tuple[int, float, int, Schedule]:
    chosen, when = list(range(len(turns))), ends(turns, num_slots, pace, blocks=blocks)
    if any(end > turn.left for turn, end in zip(turns, when, strict=True)):
        chosen = largest_set(turns, num_slots, pace, blocks=blocks)
        when = ends([turns[index] for index in chosen], num_slots, pace, blocks=blocks)
    return len(chosen), -sum(when) / max(1, len(when)), num_slots, Schedule(tuple(chosen), num_slots)


def slots_to_try(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and the most."""
    powers = [1 << power for power in range(most.bit_length())]
    between = [3 * power // 2 for power in powers[1:]]
    return sorted({number for number in [*powers, *between, most] if number <= most})
