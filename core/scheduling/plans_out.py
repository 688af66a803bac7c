"""PlansOut: what the ranks have been sent and have not answered yet. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.cache.priming import Chunk, PrimingJob
from core.costs.cost_model import Work
from core.handles import TensorKey
from core.messages.worker import Batch, BatchResult, Transfer, TransferDone


@dataclass(slots=True)
class Flight:
    """A batch that is out. job: what it primes, with the chunk; a job without one encodes its template."""

    batch: Batch
    work: Work
    job: tuple[PrimingJob, Chunk | None] | None = None


class PlansOut:
    """Owned by one scheduler."""

    def __init__(self, num_workers: int) -> None:
        self._flights: dict[int, Flight] = {}  # batch id -> batch that is out
        self._awaited: list[dict[int, int]] = [{} for _ in range(num_workers)]  # per rank: plan seq -> results awaited
        self._plan_of: dict[int | TensorKey, int] = {}  # batch id or tensor under transfer -> plan seq

    def send(self, seq: int, flights: Iterable[Flight], transfers: Iterable[Transfer]) -> None:
        """A plan has gone out. What of it goes to a rank is one plan of that rank."""
        for flight in flights:
            self._flights[flight.batch.id] = flight
            self._await(seq, flight.batch.ranks[0], flight.batch.id)
        for transfer in transfers:
            self._await(seq, transfer.source, transfer.ref.key)

    def land(self, result: BatchResult) -> Flight:
        """The batch that has come back. An unknown one raises KeyError: results are never guessed at."""
        flight = self._flights.pop(result.batch_id)
        self._forget(result.batch_id, result.rank)
        return flight

    def land_transfer(self, done: TransferDone) -> None:
        self._forget(done.ref.key, done.rank)

    def clear(self) -> None:
        """Nothing will come back any more."""
        self._flights.clear()
        self._plan_of.clear()
        self._awaited = [{} for _ in self._awaited]

    @property
    def flights(self) -> Sequence[Flight]:
        return tuple(self._flights.values())

    def count(self, rank: int) -> int:
        """Plans that the rank has not answered in full."""
        return len(self._awaited[rank])

    def busy_ranks(self) -> list[int]:
        """Ranks that have any, ascending."""
        return [rank for rank, plans in enumerate(self._awaited) if plans]

    def check_integrity(self, num_transfers: int) -> None:
        """Every count agrees with every other; raises AssertionError otherwise."""
        awaited = sum(sum(plans.values()) for plans in self._awaited)
        assert awaited == len(self._plan_of)
        assert awaited == len(self._flights) + num_transfers

    def _await(self, seq: int, rank: int, what: int | TensorKey) -> None:
        plans = self._awaited[rank]
        plans[seq] = plans.get(seq, 0) + 1
        self._plan_of[what] = seq

    def _forget(self, what: int | TensorKey, rank: int) -> None:
        plans, seq = self._awaited[rank], self._plan_of.pop(what)
        plans[seq] -= 1
        if not plans[seq]:
            del plans[seq]
