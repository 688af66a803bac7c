"""PlansOut: the plans that have been sent to ranks and are not fully answered yet. Bookkeeping only, no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.cache.priming import Chunk, PrimingJob
from core.graph.op import OPS
from core.graph.work import Work
from core.handles import TensorKey
from core.messages.worker import Batch, BatchResult, Transfer, TransferDone


@dataclass(slots=True)
class Flight:
    """A batch that a worker has and has not answered."""

    batch: Batch
    work: Work  # its size, for the cost model
    job: tuple[PrimingJob, Chunk | None] | None = None  # what it primes; chunk None: it encodes the job's template

    @property
    def is_step(self) -> bool:
        """Whether it is a round of its requests' loops, which share a pass."""
        return self.job is None and OPS[self.batch.op].sharing == "together"


class PlansOut:
    """Batches and transfers in flight, and the plans that they belong to. Owned by one scheduler."""

    def __init__(self, num_workers: int) -> None:
        self._flights: dict[int, Flight] = {}  # batch id -> batch that is out
        self._awaited: list[dict[int, int]] = [{} for _ in range(num_workers)]  # per rank: plan seq -> results awaited
        self._plan_of: dict[int | TensorKey, int] = {}  # batch id or tensor under transfer -> plan seq

    def send(self, seq: int, flights: Iterable[Flight], transfers: Iterable[Transfer]) -> None:
        """Note a plan that was sent. The part of it for one rank counts as one plan of that rank."""
        for flight in flights:
            self._flights[flight.batch.id] = flight
            self._await(seq, flight.batch.ranks[0], flight.batch.id)
        for transfer in transfers:
            self._await(seq, transfer.source, transfer.ref.key)

    def land(self, result: BatchResult) -> Flight:
        """The batch that this result answers. An unknown batch raises KeyError."""
        flight = self._flights.pop(result.batch_id)
        self._forget(result.batch_id, result.rank)
        return flight

    def land_transfer(self, done: TransferDone) -> None:
        self._forget(done.ref.key, done.rank)

    def clear(self) -> None:
        """Forget everything: the workers are gone and no answer will come."""
        self._flights.clear()
        self._plan_of.clear()
        self._awaited = [{} for _ in self._awaited]

    @property
    def flights(self) -> Sequence[Flight]:
        return tuple(self._flights.values())

    def count(self, rank: int) -> int:
        """Number of plans that the rank has not fully answered."""
        return len(self._awaited[rank])

    def busy_ranks(self) -> list[int]:
        """Ranks with unanswered plans, ascending."""
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
