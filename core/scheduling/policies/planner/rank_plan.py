"""Which requests get how many ranks, and which ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.handles import RankIds
from core.scheduling.policies.buddies import Buddies, power_of_two
from core.scheduling.policies.planner.rank_sets import RankSets

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
    able: RankIds = ()  # ranks that have its model, ascending; (): all have it

    def seconds(self, degree: int) -> float | None:
        """Seconds of its remaining work; None for a degree that it cannot have."""
        of_step = self.step_seconds.get(degree) if self.steps or degree == 1 else None
        return None if of_step is None else self.other_seconds + self.steps * of_step

    def degree_within(self, limit: float) -> int:
        """The lowest degree at which it is done within `limit` seconds; 1 if there is none."""
        times = ((degree, self.seconds(degree)) for degree in sorted(self.step_seconds))
        return next((degree for degree, seconds in times if seconds is not None and seconds <= limit), 1)


def plan(contenders: Sequence[Contender], ranks: Sequence[int], sets: RankSets) -> dict[str, RankIds]:
    """Name -> the ranks that it is to have; no two contenders share a rank. Planned as if nothing was running, except
    that contenders that are ending keep their ranks. contenders: the most urgent first. ranks: those that may be used,
    ascending. sets: of several ranks that may be used.
    """
    buddies, places = Buddies(ranks, sets.allow), dict[str, RankIds]()
    for contender in contenders:
        if contender.is_ending and contender.held and buddies.are_free(contender.held):
            buddies.hold(contender.held)
            places[contender.name] = contender.held
    contenders = [contender for contender in contenders if not contender.is_ending]
    given = degrees(contenders, [rank for rank in ranks if buddies.are_free((rank,))])
    counted = [(each, given[each.name]) for each in contenders if given.get(each.name)]
    places |= _placed(counted, buddies)
    _make_way([contender for contender, _ in counted], places, buddies)
    for contender in contenders:
        if not buddies.num_free:  # ranks are free here where the larger sets are broken up
            break
        if contender.name not in places:
            places |= _placed([(contender, 1)], buddies)
    return places


def _make_way(contenders: Sequence[Contender], places: dict[str, RankIds], buddies: Buddies) -> None:
    """Give those for which no rank was left, since sets of ranks cannot be cut as they were counted, a rank of the last
    one behind them that may have the same ranks."""
    for index, contender in enumerate(contenders):
        if contender.name in places:
            continue
        behind = [each for each in contenders[index + 1 :] if each.able == contender.able and each.name in places]
        if behind:
            buddies.give(places.pop(behind[-1].name))
            places |= _placed([(contender, 1)], buddies)


def degrees(contenders: Sequence[Contender], ranks: Sequence[int]) -> dict[str, int]:
    """Name -> number of ranks of the first contenders, as far as the ranks reach; 0: those that have its model are
    taken. In order, each gets its first degree; then the degree of the one that saves most time per rank is doubled,
    again and again.
    """
    left, given = _RanksLeft(contenders, ranks), dict[str, int]()
    for contender in contenders:
        if left.num_ranks == 0:
            break
        number = left.number(contender)
        given[contender.name] = min(contender.first, power_of_two(number)) if number else 0
        left.take(contender, given[contender.name])

    def gain(contender: Contender) -> float:
        return _gain(contender, given[contender.name], left.number(contender))

    while given and left.num_ranks:
        best = max(contenders[: len(given)], key=gain)
        if gain(best) <= 0:
            break
        left.take(best, given[best.name])
        given[best.name] *= 2
    return given


class _RanksLeft:
    """How many ranks are left, by which contenders may have them."""

    def __init__(self, contenders: Sequence[Contender], ranks: Sequence[int]) -> None:
        ables = {contender.able for contender in contenders if contender.able}
        self.num_ranks = len(ranks)
        self._num_of = Counter(frozenset(able for able in ables if rank in able) for rank in ranks if ables)
        """Those of the contenders' `able` that ranks are among -> number of these ranks; empty if all are alike."""

    def number(self, contender: Contender) -> int:
        """The ranks that a contender may have."""
        if not contender.able:
            return self.num_ranks
        return sum(number for ables, number in self._num_of.items() if contender.able in ables)

    def take(self, contender: Contender, number: int) -> None:
        """Take so many of them, those first that the fewest other models are on."""
        self.num_ranks -= number
        for ables in sorted(self._num_of, key=len):
            if not contender.able or contender.able in ables:
                taken = min(number, self._num_of[ables])
                self._num_of[ables] -= taken
                number -= taken


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
    """Sets of ranks for these degrees. Large sets are placed first, so that all find room, and of equal ones those that
    may be on few ranks. A contender gets the ranks that hold its state if possible, and otherwise those that hold the
    fewest states of others. One for which there is no rank is left out.
    """
    places = dict[str, RankIds]()
    in_order = sorted(contenders, key=lambda pair: (-pair[1], not pair[0].able, len(pair[0].able), not pair[0].held))
    holders = {rank: contender.name for contender, _ in contenders for rank in contender.held}
    for contender, degree in in_order:
        if place := _place(contender, degree, buddies, holders):
            buddies.hold(place)
            places[contender.name] = place
    return places


def _place(contender: Contender, degree: int, buddies: Buddies, holders: Mapping[int, str]) -> RankIds:
    if contender.held and (around := buddies.around(contender.held[0], degree, contender.able)):
        return around
    while degree:
        sets = buddies.sets(degree, contender.able)
        if found := min(sets, key=lambda ranks: _cost(contender, ranks, holders), default=None):
            return found
        degree //= 2
    return ()


def _cost(contender: Contender, ranks: RankIds, holders: Mapping[int, str]) -> tuple[int, bool]:
    """(how many of these ranks hold states of others, whether the first does not hold the contender's own)"""
    return sum(holders.get(rank, contender.name) != contender.name for rank in ranks), ranks[0] not in contender.held


def moves(
    contenders: Sequence[Contender], places: Mapping[str, RankIds], ranks: Sequence[int], sets: RankSets
) -> dict[str, RankIds]:
    """Name -> the ranks on which it can run next, for contenders that are not running. If others still run on its
    planned ranks, a contender stays on the ranks that it held, or takes free ones, at most as many as planned.
    """
    buddies, now = Buddies(ranks, sets.allow), dict[str, RankIds]()
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
        elif taken := buddies.take_at_most(len(places[contender.name]), contender.able):
            now[contender.name] = taken
    return now
