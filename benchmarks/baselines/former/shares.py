"""Shares of ranks by normalised goodput, and their placement (NeuStream, section 4.2: equations 1-2, Algorithm 2).

A rank is cut into equal units of its time (the paper's SPUs). Every kind of work gets some of them, so that the slowest
one becomes as fast as it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from core.costs.latency_table import largest_batch

UNITS = 16
"""Units of a rank."""

GAIN = 1.01
"""Two kinds of work share ranks if the slower one gains at least this much."""


@dataclass(frozen=True)
class Demand:
    """One kind of work."""

    seconds: Callable[[int], float]  # latency by batch size, of a whole rank
    most: int  # largest batch
    objective: float  # seconds that a batch may take: its partial SLO
    times: float  # mean number of runs for a request, above 0

    def latency(self, number: int, units: int) -> float:
        """Seconds of a batch on this many units: a unit is a share of the rank's time."""
        return self.seconds(number) * UNITS / units

    @property
    def cost(self) -> float:
        """Seconds of a whole rank for each request, in the largest batches that are within the objective."""
        number = max(1, largest_batch(self.seconds, self.objective, self.most))
        return self.times * self.seconds(number) / number

    def goodput(self, units: int) -> float:
        """Normalised goodput (equation 1): requests per second that stay within the objective; 0 if none does."""
        if not units:
            return 0.0
        limit = largest_batch(lambda number: self.latency(number, min(units, UNITS)), self.objective, self.most)
        return limit * max(1.0, units / UNITS) / (self.objective * self.times)


def allot(demands: Mapping[str, Demand], num_ranks: int) -> dict[str, int]:
    """Units of each kind of work (Algorithm 2): each gets one, and the others go one by one to the slowest. Raises
    ValueError if the ranks have fewer units than there are kinds of work.

    Among kinds that serve nothing yet, a unit goes to the one that needs the fewest more to serve something: with the
    paper's rule alone, each of them might get some and none enough.
    """
    units = dict.fromkeys(demands, 1)
    free = num_ranks * UNITS - sum(units.values())
    if free < 0:
        raise ValueError(f"{num_ranks} ranks have too few units for {units}")
    for _ in range(free):
        units[min(demands, key=lambda name: _need(demands[name], units[name]))] += 1
    return units


def _need(demand: Demand, units: int) -> tuple[float, float]:
    """Least first: normalised goodput, then units that it lacks to serve anything."""
    goodput = demand.goodput(units)
    lacks = demand.seconds(1) * UNITS / demand.objective - units if goodput == 0 else 0.0
    return goodput, lacks


Placement = dict[str, dict[int, int]]
"""Kind of work -> rank -> units there."""


def place(units: Mapping[str, int], num_ranks: int) -> Placement:
    """Ranks for these units. The largest allotment first, each on the fullest rank that has room for it, or evenly on
    as few ranks as possible. What does not fit evenly takes what is left.
    """
    free = dict.fromkeys(range(num_ranks), UNITS)
    placement: Placement = {}
    for name in sorted(units, key=lambda name: (-units[name], name)):
        placement[name] = _fit(units[name], free)
        for rank, number in placement[name].items():
            free[rank] -= number
    return placement


def _fit(units: int, free: Mapping[int, int]) -> dict[int, int]:
    whole = [rank for rank in free if free[rank] >= units]
    if whole:
        return {min(whole, key=lambda rank: (free[rank], rank)): units}
    most_free = sorted(free, key=lambda rank: (-free[rank], rank))
    for number in range(2, len(free) + 1):
        parts = _evenly(units, most_free[:number])
        if all(part <= free[rank] for rank, part in parts.items()):
            return parts
    return _greedily(units, most_free, free)


def _evenly(units: int, ranks: Sequence[int]) -> dict[int, int]:
    part, more = divmod(units, len(ranks))
    return {rank: part + (index < more) for index, rank in enumerate(ranks)}


def _greedily(units: int, ranks: Sequence[int], free: Mapping[int, int]) -> dict[int, int]:
    parts: dict[int, int] = {}
    for rank in ranks:
        if taken := min(units, free[rank]):
            parts[rank] = taken
            units -= taken
    return parts


def colocated(demands: Mapping[str, Demand], units: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Kinds of work that are to share their ranks: two groups are joined where that raises the lower one of their
    goodputs (section 4.2, co-locating modules). On a rank they take turns, each batch on the whole rank, so that a
    group's units serve whichever of its kinds is behind.
    """
    groups: list[tuple[str, ...]] = [(name,) for name in demands]

    def rate(group: Sequence[str]) -> float:
        cost = sum(demands[name].cost for name in group)
        return sum(units[name] for name in group) / UNITS / cost if cost else inf

    while len(groups) > 1:
        slowest = min(groups, key=rate)
        others = [group for group in groups if group != slowest]
        best = max(others, key=lambda group: rate((*slowest, *group)))
        if rate((*slowest, *best)) <= GAIN * rate(slowest):
            break
        groups = [group for group in others if group != best] + [(*slowest, *best)]
    return groups


def ranks_of(demands: Mapping[str, Demand], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Kind of work -> the ranks that do it, ascending: allotted, co-located and placed."""
    units = allot(demands, num_ranks)
    groups = colocated(demands, units)
    names = [" ".join(group) for group in groups]
    sums = {name: sum(units[kind] for kind in group) for name, group in zip(names, groups, strict=True)}
    placed = place(sums, num_ranks)
    return {kind: tuple(sorted(placed[name])) for name, group in zip(names, groups, strict=True) for kind in group}
