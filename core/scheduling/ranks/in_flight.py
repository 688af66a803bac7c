"""InFlight: batches and transfers that were sent to ranks and are not answered yet. Bookkeeping only, no decisions.

A batch is sent to one or more ranks, and is complete when each of them has answered. Plans have sequence numbers, and
every rank gets its part of each plan in this order. So the batches of an engine have one total order, every rank's
queue is a part of it, and ranks that wait for each other within a batch cannot wait in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from core.failure import Failure
from core.graph.work import Work
from core.handles import TensorKey
from core.messages.worker import Batch, BatchResult, ItemResult, Transfer, TransferDone
from core.scheduling.requests.bindings import ModelKeys

UNKNOWN_SECONDS = 30.0
"""Default prediction for work unlike any observed so far: a large model's first step on a CPU."""


class Busy(NamedTuple):
    """Unanswered work of a rank, in seconds."""

    predicted: float
    allowed: float  # time limits of what users' classes run: it may take as long


@dataclass(slots=True)
class Flight:
    """A batch that at least one of its ranks has not answered."""

    batch: Batch
    keys: ModelKeys  # the components that it computes with
    work: Work  # its size, for the cost model
    predicted: float = 0.0  # seconds, when it was sent; 0 for work unlike any observed so far
    job_id: str = ""  # the cache's job of which this is a piece; "": the batch runs nodes of requests
    is_step: bool = False  # the batch is a denoising step
    is_mixed: bool = False  # it has requests of several served models
    is_whole: bool = True  # none of its ranks has died
    answers: dict[int, BatchResult] = field(default_factory=dict)  # rank -> its result

    @property
    def is_complete(self) -> bool:
        return len(self.answers) == len(self.batch.ranks)

    @property
    def allowed(self) -> float:
        """The time limits of its items together, seconds; 0 unless users' classes run them."""
        return self.keys.seconds * len(self.batch.items)

    def lose(self, rank: int) -> None:
        """Note that a rank has died with everything that it had made."""
        if rank in self.batch.ranks:
            ranks = tuple(other for other in self.batch.ranks if other != rank)
            self.batch, self.is_whole = msgspec.structs.replace(self.batch, ranks=ranks), False
            self.answers.pop(rank, None)

    @property
    def waits_for(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in self.batch.ranks if rank not in self.answers]

    @property
    def busy_seconds(self) -> float:
        """Worker time of all ranks that have answered."""
        return sum(answer.seconds for answer in self.answers.values())

    def result(self) -> BatchResult:
        """The common result of all ranks. An item failed if it failed on any of them; all other facts are the first
        rank's. The batch started with the first rank that started, and took as long as the slowest.
        """
        first, *others = (self.answers[rank] for rank in self.batch.ranks)
        if not others:
            return first
        failed = (item for other in others for item in other.items if item.failure)
        failures = {(item.request_id, item.node): item.failure for item in failed}
        return msgspec.structs.replace(
            first,
            started=min(first.started, *(other.started for other in others)),
            seconds=max(first.seconds, *(other.seconds for other in others)),
            items=tuple(_failed(item, failures.get((item.request_id, item.node))) for item in first.items),
            num_parts=max(first.num_parts, *(other.num_parts for other in others)),
        )


def _failed(item: ItemResult, failure: Failure | None) -> ItemResult:
    return item if failure is None or item.failure is not None else msgspec.structs.replace(item, failure=failure)


@dataclass(frozen=True, slots=True)
class LostWork:
    """The work that a rank had when it died."""

    flights: tuple[Flight, ...]  # batches that no other rank has
    transfers: tuple[TensorKey, ...]  # values that it was to write to shared memory
    running: Flight | None  # the batch that it ran


class InFlight:
    """Unanswered batches and transfers, and the plans that they belong to. Owned by one scheduler."""

    def __init__(self, num_ranks: int, max_plans: int = 1, max_seconds: float = 0.0) -> None:
        """max_plans, max_seconds: a busy rank is nearly idle while it has fewer unanswered plans than this, and they
        are predicted to take less time than this.
        """
        self.max_plans = max_plans
        self._max_seconds = max_seconds
        self._flights: dict[int, Flight] = {}  # batch id -> flight
        self.landed: list[Flight] = []  # answered by all their ranks, but not applied yet
        self._awaited: list[dict[int, int]] = [{} for _ in range(num_ranks)]  # per rank: plan seq -> answers awaited
        self._seconds = [0.0] * num_ranks  # per rank: predicted seconds of its batches
        self._allowed = [0.0] * num_ranks  # per rank: time limits of what users' classes run there, in seconds
        self._known = [0.0] * num_ranks  # per rank: predicted seconds of its batches, without those of unknown time
        self._since = [0.0] * num_ranks  # per rank: when it began the first of its batches, in monotonic seconds
        self._plan_of: dict[tuple[int, int | TensorKey], int] = {}  # (rank, batch id or tensor under transfer) -> seq
        # Updated at every change instead of computed, because there may be many ranks.
        self._idle = set(range(num_ranks))
        self._nearly_idle: set[int] = set()

    def send(self, seq: int, flight: Flight, now: float) -> None:
        """Note a batch that is sent with plan `seq`. Everything that one rank gets of a plan counts as one plan."""
        self._flights[flight.batch.id] = flight
        for rank in flight.batch.ranks:
            if rank in self._idle:
                self._since[rank] = now
            self._seconds[rank] += flight.predicted or UNKNOWN_SECONDS
            self._known[rank] += flight.predicted
            self._allowed[rank] += flight.allowed
            self._await(seq, rank, flight.batch.id)

    def send_transfers(self, seq: int, transfers: Iterable[Transfer]) -> None:
        """Note transfers that are sent with plan `seq`."""
        for transfer in transfers:
            self._await(seq, transfer.source, transfer.ref.key)

    def land(self, result: BatchResult) -> Flight:
        """Note a rank's result; returns the flight, which has landed unless it still waits for other ranks. An unknown
        batch, and a second result of the same rank, raise KeyError.
        """
        flight = self._flights[result.batch_id]
        seq = self._plan_of.pop((result.rank, result.batch_id))
        self._seconds[result.rank] -= flight.predicted or UNKNOWN_SECONDS
        self._known[result.rank] -= flight.predicted
        self._allowed[result.rank] -= flight.allowed
        self._since[result.rank] = result.started + result.seconds
        self._forget(seq, result.rank)
        flight.answers[result.rank] = result
        if flight.is_complete:
            self.landed.append(self._flights.pop(result.batch_id))
        return flight

    def land_transfer(self, done: TransferDone) -> None:
        """Note that a transfer is done."""
        self._forget(self._plan_of.pop((done.rank, done.ref.key)), done.rank)

    def lose(self, rank: int) -> LostWork:
        """Forget all work of a rank that has died; returns that work. A batch of several ranks goes on with the others,
        and has landed if all of them have answered.
        """
        running = next((flight for flight in self._flights.values() if rank in flight.waits_for), None)
        transfers = tuple(what for other, what in self._plan_of if other == rank and isinstance(what, TensorKey))
        self._plan_of = {place: seq for place, seq in self._plan_of.items() if place[0] != rank}
        self._awaited[rank], self._seconds[rank], self._known[rank], self._allowed[rank] = {}, 0.0, 0.0, 0.0
        self._note_load(rank)
        for flight in [*self._flights.values(), *self.landed]:
            flight.lose(rank)
        over = [flight for flight in self._flights.values() if flight.is_complete]
        for flight in over:
            del self._flights[flight.batch.id]
        every = [*self.landed, *over]
        self.landed = [flight for flight in every if flight.batch.ranks]
        return LostWork(tuple(flight for flight in every if not flight.batch.ranks), transfers, running)

    def clear(self) -> None:
        """Forget everything: the workers are gone and no answer will come."""
        self._flights.clear()
        self.landed.clear()
        self._plan_of.clear()
        self._awaited = [{} for _ in self._awaited]
        self._seconds, self._known, self._allowed = ([0.0] * len(self._seconds) for _ in range(3))
        self._idle, self._nearly_idle = set(range(len(self._seconds))), set()

    @property
    def flights(self) -> Sequence[Flight]:
        return tuple(self._flights.values())

    def busy_ranks(self, ranks: Iterable[int]) -> dict[int, Busy]:
        """What those of these ranks that are busy have to do."""
        return {rank: Busy(self._seconds[rank], self._allowed[rank]) for rank in ranks if rank not in self._idle}

    def wait_seconds(self, rank: int, now: float) -> float:
        """Predicted seconds until a rank has done its work; 0 if it has none or is overdue. Work of unknown time counts
        as none.
        """
        return max(0.0, self._seconds_until_done(rank, now)) if rank not in self._idle else 0.0

    def seconds_left(self, rank: int, now: float) -> float | None:
        """Predicted seconds until a busy rank has done its work: below 0 if it is overdue, None if the time of some of
        its work is unknown.
        """
        is_known = self._seconds[rank] - self._known[rank] < UNKNOWN_SECONDS / 2
        return self._seconds_until_done(rank, now) if is_known else None

    def _seconds_until_done(self, rank: int, now: float) -> float:
        return self._since[rank] + self._known[rank] - now

    @property
    def has_any(self) -> bool:
        """Whether anything is in flight, or answered but not applied yet."""
        return bool(self._plan_of or self._flights or self.landed)

    @property
    def has_busy(self) -> bool:
        """Whether any rank has work."""
        return len(self._idle) < len(self._awaited)

    @property
    def idle_ranks(self) -> frozenset[int]:
        """Ranks that have no work."""
        return frozenset(self._idle)

    @property
    def nearly_idle_ranks(self) -> frozenset[int]:
        """Busy ranks with little work, see `__init__`."""
        return frozenset(self._nearly_idle)

    def check_integrity(self, num_transfers: int) -> None:
        """Raise AssertionError unless all counts agree."""
        assert self._idle == {rank for rank, plans in enumerate(self._awaited) if not plans}
        assert self._nearly_idle == {rank for rank in range(len(self._awaited)) if self._is_nearly_idle(rank)}
        awaited = sum(sum(plans.values()) for plans in self._awaited)
        assert awaited == len(self._plan_of)
        assert awaited == sum(len(flight.waits_for) for flight in self._flights.values()) + num_transfers

    def _await(self, seq: int, rank: int, what: int | TensorKey) -> None:
        plans = self._awaited[rank]
        plans[seq] = plans.get(seq, 0) + 1
        self._plan_of[rank, what] = seq
        self._note_load(rank)

    def _forget(self, seq: int, rank: int) -> None:
        """Note one more answer to a plan."""
        plans = self._awaited[rank]
        plans[seq] -= 1
        if not plans[seq]:
            del plans[seq]
        self._note_load(rank)

    def _note_load(self, rank: int) -> None:
        (self._idle.discard if self._awaited[rank] else self._idle.add)(rank)
        (self._nearly_idle.add if self._is_nearly_idle(rank) else self._nearly_idle.discard)(rank)

    def _is_nearly_idle(self, rank: int) -> bool:
        return 0 < len(self._awaited[rank]) < self.max_plans and self._seconds[rank] < self._max_seconds
