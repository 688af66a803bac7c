"""Which requests get how many ranks, and which ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from core.handles import RankIds
from core.scheduling.policies.buddies import Buddies, power_of_two

MIN_REDUCTION = 0.1
"""Ranks that nobody else wants are used where they save at least this share of a request's time."""

KEEP = 1.25
"""A request keeps such ranks unless another one would save this many times as much."""


@dataclass(frozen=True, slots=True)
class Want:
    """A request that could use ranks now."""

    name: str
    steps: int  # left to do; 0: it does something else, on one rank
    step_seconds: Mapping[int, float]  # degree 1, 2, 4, ... -> of a step
    other_seconds: float  # of what it has left to do besides
    first: int  # degree that it gets before any later request gets a rank
    held: RankIds  # where its state is; () if it has none, or a rank of these is dead
    is_running: bool  # they compute it now, so that it cannot have others
    is_ending: bool = False  # and that is all it has left to do

    def seconds(self, degree: int) -> float | None:
        """Of all that it has left to do; None for a degree that it cannot have."""
        of_step = self.step_seconds.get(degree) if self.steps or degree == 1 else None
        return None if of_step is None else self.other_seconds + self.steps * of_step

    def degree_within(self, limit: float) -> int:
        """The least degree at which it is done within so many seconds; 1 if there is none."""
        times = ((degree, self.seconds(degree)) for degree in sorted(self.step_seconds))
        return next((degree for degree, seconds in times if seconds is not None and seconds <= limit), 1)


def plan(wants: Sequence[Want], ranks: Sequence[int]) -> dict[str, RankIds]:
    """Name -> the ranks that it is to have, all different, as if nothing was running but what is ending, which stays.
    wants: the most urgent first. ranks: that may be used, ascending.
    """
    buddies, places = Buddies(ranks), dict[str, RankIds]()
    for want in wants:
        if want.is_ending and want.held and buddies.are_free(want.held):
            buddies.hold(want.held)
            places[want.name] = want.held
    wants = [want for want in wants if not want.is_ending]
    given = degrees(wants, buddies.num_free)
    places |= _placed(list(zip(wants, given, strict=False)), buddies)
    for want in wants[len(given) :]:
        if not buddies.num_free:  # otherwise sets are missing, since ranks are dead or not to be used
            break
        places |= _placed([(want, 1)], buddies)
    return places


def degrees(wants: Sequence[Want], num_ranks: int) -> list[int]:
    """The number of ranks of each of the first wants; for later ones there is none. First what each wants at least, in
    order, then twice as many for that which saves most time by each rank.
    """
    given = list[int]()
    for want in wants:
        if num_ranks == 0:
            break
        given.append(min(want.first, power_of_two(num_ranks)))
        num_ranks -= given[-1]
    while num_ranks:
        gains = [_gain(want, degree, num_ranks) for want, degree in zip(wants, given, strict=False)]
        best = max(gains, default=0.0)
        if best <= 0:
            break
        index = gains.index(best)
        num_ranks -= given[index]
        given[index] *= 2
    return given


def _gain(want: Want, degree: int, num_free: int) -> float:
    """Seconds saved for each rank by doubling a degree; 0 if it is not worth it, or not possible."""
    before, after = want.seconds(degree), want.seconds(2 * degree)
    if before is None or after is None or degree > num_free or after > (1 - MIN_REDUCTION) * before:
        return 0.0
    return (before - after) / degree * (KEEP if len(want.held) >= 2 * degree else 1.0)


def _placed(wants: Sequence[tuple[Want, int]], buddies: Buddies) -> dict[str, RankIds]:
    """Sets of ranks for these degrees: large ones first, so that all find room; where a request's state is if that is
    possible, otherwise where the fewest others are.
    """
    places = dict[str, RankIds]()
    in_order = sorted(wants, key=lambda pair: (-pair[1], not pair[0].held))
    holders = {rank: want.name for want, _ in wants for rank in want.held}
    for want, degree in in_order:
        places[want.name] = _place(want, degree, buddies, holders)
    return places


def _place(want: Want, degree: int, buddies: Buddies, holders: Mapping[int, str]) -> RankIds:
    if want.held:
        around = tuple(range(first := want.held[0] & -degree, first + degree))
        if buddies.are_free(around):
            return buddies.take_this(first, degree)
    while True:
        if found := min(buddies.sets(degree), key=lambda of: _cost(want, of, holders), default=None):
            return buddies.take_this(found[0], degree)
        degree //= 2


def _cost(want: Want, ranks: RankIds, holders: Mapping[int, str]) -> tuple[int, bool]:
    """How many states of others are on these ranks, and whether its own is not."""
    return sum(holders.get(rank, want.name) != want.name for rank in ranks), ranks[0] not in want.held


def moves(wants: Sequence[Want], places: Mapping[str, RankIds], ranks: Sequence[int]) -> dict[str, RankIds]:
    """Name -> the ranks on which it can run next, for those that are not running. Where others still run on its ranks
    it goes on where it is, or takes what is free, at most as many ranks.
    """
    buddies, now = Buddies(ranks), dict[str, RankIds]()
    # Several may run on one rank: where a second rank comes back, or small requests have become large ones.
    buddies.hold({rank for want in wants if want.is_running for rank in want.held if rank in ranks})
    blocked = list[Want]()
    for want in wants:
        place = places.get(want.name)
        if want.is_running or place is None:
            continue
        if buddies.are_free(place):
            buddies.hold(place)
            now[want.name] = place
        else:
            blocked.append(want)
    for want in blocked:
        if want.held and set(want.held) <= set(ranks) and buddies.are_free(want.held):
            buddies.hold(want.held)
            now[want.name] = want.held
        elif taken := buddies.take_at_most(len(places[want.name])):
            now[want.name] = taken
    return now


def waiting(
    wants: Sequence[Want],
    places: Mapping[str, RankIds],
    now: Mapping[str, RankIds],
    left: Callable[[int], float | None],
) -> set[str]:
    """Names of requests that had better wait than use the ranks that they can have now: as many beside these will soon
    be free for them, and a step on all of these is done sooner. Their ranks wait with them.

    places, now: from `plan` and `moves`. left: busy rank -> predicted seconds until it has done what it has; below 0:
    that is overdue; None: unknown.
    """
    soon_free, found = _soon_free(wants, places), set[str]()
    owners = {rank: want.name for want in wants if not want.is_ending for rank in places.get(want.name, ())}
    for want in wants:
        if want.is_running:
            continue
        if (taken := now.get(want.name)) is None:
            break  # this one gets what will be free
        degree = 2 * len(taken)
        others = set(range(first := taken[0] & -degree, first + degree)) - set(taken)
        are_for_it = others <= soon_free and all(owners.get(rank, want.name) == want.name for rank in others)
        if degree <= want.first and are_for_it and _is_sooner(want, degree, others, left):
            found.add(want.name)
    return found


def _soon_free(wants: Sequence[Want], places: Mapping[str, RankIds]) -> set[int]:
    """Ranks that will be free when their batch ends: those of requests that are ending, and those that a request leaves
    for others. A request whose new ranks are still busy may have to stay, so its ranks do not count.
    """
    running = [want for want in wants if want.is_running]
    busy, found = {rank for want in running for rank in want.held}, set[int]()
    for want in running:
        place = set(places.get(want.name, ()))
        if want.is_ending:
            found.update(want.held)
        elif not busy & (place - set(want.held)):  # otherwise it may have to stay
            found.update(set(want.held) - place)
    return found


def _is_sooner(want: Want, degree: int, others: Collection[int], left: Callable[[int], float | None]) -> bool:
    """Whether a step on so many ranks, begun when these others are free, is done before one that begins now on half as
    many. What is overdue is expected to take as much longer as it is overdue now.
    """
    soon, now = want.step_seconds.get(degree), want.step_seconds.get(degree // 2)
    if not (want.steps and soon and now):
        return False
    return all((seconds := left(rank)) is not None and abs(seconds) + soon < now for rank in others)
