"""FairQueue: orders the work of several owners that share one resource, so that none can crowd out the others.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each owner has a virtual time, the seconds of work begun
for it so far, and the owner with the least goes next. An owner that returns after a pause starts at the virtual time
of the waiting owners (unused time cannot be saved up), so light users go before heavy ones. An owner's share does not
depend on the number of its requests.

Priority classes come before fairness: a class is worth CLASS_SECONDS of work, so a lower class is delayed but never
starves. An owner's own work is ordered by urgency; with a single owner the order is by urgency alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Generic, TypeVar

from core.config import CLASS_SECONDS, PATIENCE_SECONDS

MIN_SECONDS = 1e-3
"""Least cost of a piece of work, so that owners take turns while times are unknown."""

Urgency = tuple[float, float, str]
"""Sort key among one owner's work, lowest first; a total order."""

T = TypeVar("T")


def counts_as_due(arrival: float, due: float | None, priority: int) -> float:
    """The time at which work counts as due, including its class. All times are seconds of one clock.

    Work with no due time, or a distant one, counts as due PATIENCE_SECONDS after its arrival: nearer deadlines overtake
    it only for so long. A class is worth CLASS_SECONDS: it overtakes the next lower class, whatever the deadlines, if
    that arrived less than PATIENCE_SECONDS earlier, and never if it arrived CLASS_SECONDS + PATIENCE_SECONDS earlier.
    """
    patience_ends = arrival + PATIENCE_SECONDS
    return (patience_ends if due is None else min(due, patience_ends)) + CLASS_SECONDS * priority


@dataclass(eq=False, slots=True)
class Claim(Generic[T]):
    """A piece of work in the queue."""

    item: T
    owner: str
    priority: int  # class; lower goes first
    urgency: Urgency
    seconds: float  # predicted time, 0 = unknown
    has_begun: bool = False  # set by the FairQueue

    @property
    def cost(self) -> float:
        """Seconds charged to its owner."""
        return max(self.seconds, MIN_SECONDS)


def _by_urgency(claim: Claim[T]) -> Urgency:
    return claim.urgency


class FairQueue(Generic[T]):
    """Holds work from `add` until `remove`. The owner is charged when the work begins."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Claim[T]]] = {}  # owner -> its work, most urgent first; never empty
        self._begun: dict[str, list[Claim[T]]] = {}  # owner -> its work that has begun, most urgent first
        self._spent: dict[str, float] = {}  # owner -> its virtual time; cleared when the queue is empty
        self._virtual_time = 0.0  # where an owner without work here starts

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __contains__(self, claim: Claim[T]) -> bool:
        return self._index(claim) is not None

    @property
    def num_owners(self) -> int:
        """Number of owners with work in the queue."""
        return len(self._lines)

    def add(self, claim: Claim[T]) -> None:
        """Enqueue a piece of work."""
        insort(self._lines.setdefault(claim.owner, []), claim, key=_by_urgency)

    def begin(self, claim: Claim[T]) -> None:
        """Note that work has begun: its cost is charged to the owner, which delays the owner's other work."""
        waiting = (owner for owner, line in self._lines.items() if not all(other.has_begun for other in line))
        self._virtual_time = max(self._virtual_time, min(map(self._start, waiting)))
        self._spent[claim.owner] = self._start(claim.owner) + claim.cost
        claim.has_begun = True
        insort(self._begun.setdefault(claim.owner, []), claim, key=_by_urgency)

    def give_back(self, claim: Claim[T]) -> None:
        """Undo `begin`: the work waits again, and its owner is not charged."""
        self._spent[claim.owner] -= claim.cost
        claim.has_begun = False
        self._begun[claim.owner].remove(claim)

    def remove(self, claim: Claim[T], took: float | None = None) -> None:
        """Remove finished or cancelled work. took: the actual seconds, charged instead of the prediction. Raises
        ValueError if the work is not in the queue.
        """
        index = self._index(claim)
        if index is None:
            raise ValueError(f"{claim} is not in the queue")
        line = self._lines[claim.owner]
        del line[index]
        if claim.has_begun:
            self._begun[claim.owner].remove(claim)
        if took is not None and claim.has_begun:
            self._spent[claim.owner] += took - claim.cost
        if not line:
            del self._lines[claim.owner]
            self._begun.pop(claim.owner, None)
        if not self._lines:  # an empty queue: no owner has delayed another one
            self._spent.clear()
            self._virtual_time = 0.0

    def in_order(self) -> Iterator[T]:
        """All work in order, as if nothing else arrived. Begun work keeps the position at which it began. Lazy: its
        cost grows with the number of items that are taken. Valid until the queue changes.
        """
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            return (claim.item for claim in line)
        return (claim.item for claim in self._merged())

    def _merged(self) -> Iterator[Claim[T]]:
        """The lines merged by virtual time."""
        heads = []
        for owner, line in self._lines.items():
            spent = self._start(owner) - sum(claim.cost for claim in self._begun.get(owner, ()))
            claims = iter(line)
            first = next(claims)
            heads.append((_sort_key(spent, first), first.urgency, spent, first, claims))
        heapify(heads)
        while heads:
            _, _, spent, claim, claims = heads[0]
            yield claim
            spent += claim.cost
            following = next(claims, None)
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, (_sort_key(spent, following), following.urgency, spent, following, claims))

    def _start(self, owner: str) -> float:
        """Virtual time at which the owner's next piece of work starts."""
        return max(self._virtual_time, self._spent.get(owner, 0.0))

    def _index(self, claim: Claim[T]) -> int | None:
        """Index of a claim in its owner's line; None if it is not in the queue."""
        line = self._lines.get(claim.owner, [])
        index = bisect_left(line, claim.urgency, key=_by_urgency)
        return index if index < len(line) and line[index] is claim else None


def _sort_key(spent: float, claim: Claim[T]) -> float:
    return spent + CLASS_SECONDS * claim.priority
