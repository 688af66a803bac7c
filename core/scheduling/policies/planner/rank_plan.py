"""Which requests get how many ranks, and which ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.handles import RankIds
from core.scheduling.policies.buddies import Buddies, power_of_two

MIN_REDUCTION = 0.1
"""A request gets ranks that no other one needs only if they save at least this share of its time."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A request that could use ranks now."""

    name: str
    steps: int  # remaining; 0: its next work is no step and needs one rank
    step_seconds: Mapping[int, float]  # degree 1, 2, 4, ... -> seconds of a step
    other_seconds: float  # of its remaining work besides steps
    first: int  # degree that it gets before any later request gets a rank
    held: RankIds  # ranks that hold its state; () if it has no state, or one of them is dead
    is_running: bool  # the held ranks compute it now, so it cannot have other ranks
    is_ending: bool = False  # what they compute now is its last work

    def seconds(self, degree: int) -> float | None:
        """Seconds of its remaining work; None for a degree that it cannot have."""
        of_step = self.step_seconds.get(degree) if self.steps or degree == 1 else None
        return None if of_step is None else self.other_seconds + self.steps * of_step

    def degree_within(self, limit: float) -> int:
        """The lowest degree at which it is done within `limit` seconds; 1 if there is none."""
        times = ((degree, self.seconds(degree)) for degree in sorted(self.step_seconds))
        return next((degree for degree, seconds in times if seconds is not None and seconds <= limit), 1)


def plan(contenders: Sequence[Contender], ranks: Sequence[int]) -> dict[str, RankIds]:
    """Name -> the ranks that it is to have; no two contenders share a rank. Planned as if nothing was running, except
    that contenders that are ending keep their ranks. contenders: the most urgent first. ranks: those that may be used,
    ascending.
    """
    buddies, places = Buddies(ranks), dict[str, RankIds]()
    for contender in contenders:
        if contender.is_ending and contender.held and buddies.are_free(contender.held):
            buddies.hold(contender.held)
            places[contender.name] = contender.held
    contenders = [contender for contender in contenders if not contender.is_ending]
    given = degrees(contenders, buddies.num_free)
    places |= _placed(list(zip(contenders, given, strict=False)), buddies)
    for contender in contenders[len(given) :]:
        if not buddies.num_free:  # ranks are free here where dead ranks have broken up the larger sets
            break
        places |= _placed([(contender, 1)], buddies)
    return places


def degrees(contenders: Sequence[Contender], num_ranks: int) -> list[int]:
    """The number of ranks of each of the first contenders, as far as the ranks reach. In order, each gets its first
    degree; then the degree of the one that saves most time per rank is doubled, again and again.
    """
    given = list[int]()
    for contender in contenders:
        if num_ranks == 0:
            break
        given.append(min(contender.first, power_of_two(num_ranks)))
        num_ranks -= given[-1]
    while num_ranks:
        gains = [_gain(contender, degree, num_ranks) for contender, degree in zip(contenders, given, strict=False)]
        best = max(gains, default=0.0)
        if best <= 0:
            break
        index = gains.index(best)
        num_ranks -= given[index]
        given[index] *= 2
    return given


def pays(contender: Contender, degree: int) -> bool:
    """Whether it would get this degree, if no other one needs the ranks."""
    return degree == 1 or _gain(contender, degree // 2, degree) > 0


def _gain(contender: Contender, degree: int, num_free: int) -> float:
    """Seconds saved per added rank by doubling a degree; 0 if that is not worth it or not possible."""
    before, after = contender.seconds(degree), contender.seconds(2 * degree)
    if before is None or after is None or degree > num_free or after > (1 - MIN_REDUCTION) * before:
        return 0.0
    return (before - after) / degree


def _placed(contenders: Sequence[tuple[Contender, int]], buddies: Buddies) -> dict[str, RankIds]:
    """Sets of ranks for these degrees. Large sets are placed first, so that all find room. A contender gets the ranks
    that hold its state if possible, and otherwise those that hold the fewest states of others.
    """
    places = dict[str, RankIds]()
    in_order = sorted(contenders, key=lambda pair: (-pair[1], not pair[0].held))
    holders = {rank: contender.name for contender, _ in contenders for rank in contender.held}
    for contender, degree in in_order:
        places[contender.name] = _place(contender, degree, buddies, holders)
    return places


def _place(contender: Contender, degree: int, buddies: Buddies, holders: Mapping[int, str]) -> RankIds:
    if contender.held:
        around = tuple(range(first := contender.held[0] & -degree, first + degree))
        if buddies.are_free(around):
            return buddies.take_this(first, degree)
    while True:
        if found := min(buddies.sets(degree), key=lambda ranks: _cost(contender, ranks, holders), default=None):
            return buddies.take_this(found[0], degree)
        degree //= 2


def _cost(contender: Contender, ranks: RankIds, holders: Mapping[int, str]) -> tuple[int, bool]:
    """(how many of these ranks hold states of others, whether the first does not hold the contender's own)"""
    return sum(holders.get(rank, contender.name) != contender.name for rank in ranks), ranks[0] not in contender.held


def moves(contenders: Sequence[Contender], places: Mapping[str, RankIds], ranks: Sequence[int]) -> dict[str, RankIds]:
    """Name -> the ranks on which it can run next, for contenders that are not running. If others still run on its
    planned ranks, a contender stays on the ranks that it held, or takes free ones, at most as many as planned.
    """
    buddies, now = Buddies(ranks), dict[str, RankIds]()
    # Several may run on one rank: after a second rank has joined, or when small requests have become large ones.
    buddies.hold({rank for contender in contenders if contender.is_running for rank in contender.held if rank in ranks})
    blocked = list[Contender]()
    for contender in contenders:
        place = places.get(contender.name)
        if contender.is_running or place is None:
            continue
        if buddies.are_free(place):
            buddies.hold(place)
            now[contender.name] = place
        else:
            blocked.append(contender)
    for contender in blocked:
        if contender.held and set(contender.held) <= set(ranks) and buddies.are_free(contender.held):
            buddies.hold(contender.held)
            now[contender.name] = contender.held
        elif taken := buddies.take_at_most(len(places[contender.name])):
            now[contender.name] = taken
    return now
