"""Which requests get how many ranks, and which ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.scheduling.policies.buddies import Buddies, Ranks, power_of_two

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
    held: Ranks  # where its state is; () if it has none, or a rank of these is dead
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


def plan(wants: Sequence[Want], ranks: Sequence[int]) -> dict[str, Ranks]:
    """Name -> the ranks that it is to have, all different, as if nothing was running; those that are ending need none.
    wants: the most urgent first. ranks: that may be used, ascending.
    """
    holders = {rank: want.name for want in wants for rank in want.held}
    wants = [want for want in wants if not want.is_ending]
    buddies, given = Buddies(ranks), degrees(wants, len(ranks))
    places = _placed(list(zip(wants, given, strict=False)), buddies, holders)
    for want in wants[len(given) :]:
        if not buddies.num_free:  # otherwise sets are missing, since ranks are dead or not to be used
            break
        places |= _placed([(want, 1)], buddies, holders)
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


def _placed(wants: Sequence[tuple[Want, int]], buddies: Buddies, holders: Mapping[int, str]) -> dict[str, Ranks]:
    """Sets of ranks for these degrees: large ones first, so that all find room; where a request's state is if that is
    possible, otherwise where the fewest others are. holders: rank -> who has state there.
    """
    places = dict[str, Ranks]()
    in_order = sorted(wants, key=lambda pair: (-pair[1], not pair[0].held))
    for want, degree in in_order:
        places[want.name] = _place(want, degree, buddies, holders)
    return places


def _place(want: Want, degree: int, buddies: Buddies, holders: Mapping[int, str]) -> Ranks:
    if want.held:
        around = tuple(range(first := want.held[0] & -degree, first + degree))
        if buddies.are_free(around):
            return buddies.take_this(first, degree)
    while True:
        if found := min(buddies.sets(degree), key=lambda of: _cost(want, of, holders), default=None):
            return buddies.take_this(found[0], degree)
        degree //= 2


def _cost(want: Want, ranks: Ranks, holders: Mapping[int, str]) -> tuple[int, bool]:
    """How many states of others are on these ranks, and whether its own is not."""
    return sum(holders.get(rank, want.name) != want.name for rank in ranks), ranks[0] not in want.held


def moves(
    wants: Sequence[Want], places: Mapping[str, Ranks], ranks: Sequence[int], wait: Callable[[int], float | None]
) -> dict[str, Ranks]:
    """Name -> the ranks on which it can run next, for those that are not running. Where others still run on its ranks
    it goes on where it is, or takes what is free, at most as many ranks; or it waits for all of them, if that saves
    time. wait: rank -> predicted seconds until it has done what it has; None: unknown.
    """
    buddies, now = Buddies(ranks), dict[str, Ranks]()
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
        place = places[want.name]
        if want.held and set(want.held) <= set(ranks) and buddies.are_free(want.held):
            buddies.hold(taken := want.held)
        else:
            taken = buddies.take_at_most(len(place)) or ()
        if taken and not _is_sooner(want, place, taken, wait):
            now[want.name] = taken
    return now


def _is_sooner(want: Want, place: Ranks, taken: Ranks, wait: Callable[[int], float | None]) -> bool:
    """Whether a step on the ranks of `place`, begun when all of them are free, is done before one that begins now on
    those of `taken`.
    """
    soon, now = want.step_seconds.get(len(place)), want.step_seconds.get(len(taken))
    if not (want.steps and soon and now):
        return False
    waits = [wait(rank) for rank in place]
    return all(each is not None and each + soon < now for each in waits)
