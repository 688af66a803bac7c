"""FairQueue: whose work goes next, where several owners share one resource and one of them may ask for much.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each owner has a virtual time, the seconds of work begun
for it so far, and the owner with the least goes next. One that comes back after a pause starts at the virtual time of
those who wait (it cannot save up what it left unused), so whoever asks for little goes before whoever asks for much.
The share of an owner does not depend on how many requests it sends.

Classes come before fairness: one is worth CLASS_SECONDS of work, so that the lower one is late, and never starves. Of
one owner the most urgent work goes first, and with one owner that is all there is to it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Generic, TypeVar

from core.config import CLASS_SECONDS, PATIENCE_SECONDS

MIN_SECONDS = 1e-3
"""What work counts as at least: where its time is not known yet, owners take turns."""

Urgency = tuple[float, float, str]
"""Sort key among the work of one owner, lowest first; total."""

T = TypeVar("T")


def counts_as_due(arrival: float, due: float | None, priority: int) -> float:
    """When work counts as due, its class included. All times are seconds of one clock.

    What is never due, or late, counts as due PATIENCE_SECONDS after its arrival: nearer deadlines overtake it, but only
    so long. A class is worth CLASS_SECONDS: it overtakes the next lower one, whatever the deadlines, where that came
    less than PATIENCE_SECONDS before, and never where it came CLASS_SECONDS + PATIENCE_SECONDS before.
    """
    patience_ends = arrival + PATIENCE_SECONDS
    return (patience_ends if due is None else min(due, patience_ends)) + CLASS_SECONDS * priority


@dataclass(eq=False, slots=True)
class Claim(Generic[T]):
    """A piece of work that an owner wants done. seconds: what it is predicted to take. priority: lower goes first."""

    item: T
    owner: str
    priority: int
    urgency: Urgency
    seconds: float
    has_begun: bool = False  # written by the FairQueue

    @property
    def cost(self) -> float:
        """Seconds that its owner is charged."""
        return max(self.seconds, MIN_SECONDS)


def _by_urgency(claim: Claim[T]) -> Urgency:
    return claim.urgency


class FairQueue(Generic[T]):
    """Work from `add` until `remove`. Its owner is charged when it begins, at most once in between."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Claim[T]]] = {}  # owner -> its work, most urgent first; owners that have some
        self._spent: dict[str, float] = {}  # owner -> its virtual time; of all owners since nobody had work here
        self._virtual_time = 0.0  # where an owner starts that had no work here

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __contains__(self, claim: Claim[T]) -> bool:
        return self._index(claim) is not None

    @property
    def num_owners(self) -> int:
        """Those that have work here."""
        return len(self._lines)

    def add(self, claim: Claim[T]) -> None:
        """Line up."""
        insort(self._lines.setdefault(claim.owner, []), claim, key=_by_urgency)

    def begin(self, claim: Claim[T]) -> None:
        """Work on it starts: what its owner wants besides is put off by as much as it costs."""
        waiting = (owner for owner, line in self._lines.items() if not all(other.has_begun for other in line))
        self._virtual_time = max(self._virtual_time, min(map(self._start, waiting)))
        self._spent[claim.owner] = self._start(claim.owner) + claim.cost
        claim.has_begun = True

    def give_back(self, claim: Claim[T]) -> None:
        """What has begun waits again, through no fault of its owner: it is as if it had not begun."""
        self._spent[claim.owner] -= claim.cost
        claim.has_begun = False

    def remove(self, claim: Claim[T], took: float | None = None) -> None:
        """It is done, or given up. took: the seconds that it really took, which its owner is charged instead. Raises
        ValueError if it is not here.
        """
        index = self._index(claim)
        if index is None:
            raise ValueError(f"{claim} is not in the queue")
        line = self._lines[claim.owner]
        del line[index]
        if took is not None and claim.has_begun:
            self._spent[claim.owner] += took - claim.cost
        if not line:
            del self._lines[claim.owner]
        if not self._lines:  # nobody waited for anybody
            self._spent.clear()
            self._virtual_time = 0.0

    def in_order(self) -> Iterator[T]:
        """All work, first what goes first, as if nothing came meanwhile. Begun work is where it was when it began."""
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            return iter([claim.item for claim in line])
        return (claim.item for claim in self._merged())

    def _merged(self) -> Iterator[Claim[T]]:
        """The lines merged by virtual time."""
        heads = []
        for owner, line in self._lines.items():
            spent = self._start(owner) - sum(claim.cost for claim in line if claim.has_begun)
            claims = iter(line)
            first = next(claims)
            heads.append((_rank(spent, first), first.urgency, spent, first, claims))
        heapify(heads)
        while heads:
            _, _, spent, claim, claims = heads[0]
            yield claim
            spent += claim.cost
            following = next(claims, None)
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, (_rank(spent, following), following.urgency, spent, following, claims))

    def _start(self, owner: str) -> float:
        """The virtual time at which the owner's next piece of work starts."""
        return max(self._virtual_time, self._spent.get(owner, 0.0))

    def _index(self, claim: Claim[T]) -> int | None:
        """Where it is in its owner's line, if it is there."""
        line = self._lines.get(claim.owner, [])
        index = bisect_left(line, claim.urgency, key=_by_urgency)
        return index if index < len(line) and line[index] is claim else None


def _rank(spent: float, claim: Claim[T]) -> float:
    return spent + CLASS_SECONDS * claim.priority
