"""RankClocks: when each rank of an engine does what it is sent.

A rank executes its plans in order, and what a plan contains in the order of StepPlan. A batch on several ranks starts
when all of them have come to it, and ends on all at once. A value that is delivered to a batch arrives some time after
its source has it, and the batch does not end before. A rank loads components one after the other beside its batches,
which take longer meanwhile. As every rank's queue is a part of one total order, all times are known when a plan is
sent: nothing that is sent later can delay it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.simulation.durations import Durations
from core.handles import ModelKey, RankIds, TensorKey
from core.messages.plan_parts import parts_of
from core.messages.worker import Batch, Delivery, Load, StepPlan, Transfer


@dataclass(frozen=True, slots=True)
class PlanBegun:
    """A rank begins its part of a plan."""

    when: float
    plan: StepPlan
    rank: int

    @property
    def ranks(self) -> RankIds:
        return (self.rank,)


@dataclass(frozen=True, slots=True)
class BatchEnded:
    """All ranks of a batch have done it. seconds: since it started."""

    when: float
    batch: Batch
    started: float
    seconds: float

    @property
    def ranks(self) -> RankIds:
        return self.batch.ranks


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A value is in shared memory."""

    when: float
    transfer: Transfer

    @property
    def ranks(self) -> RankIds:
        return (self.transfer.source,)


@dataclass(frozen=True, slots=True)
class LoadsBegun:
    """A rank drops components and begins to load others."""

    when: float
    load: Load
    rank: int

    @property
    def ranks(self) -> RankIds:
        return (self.rank,)


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A rank has loaded a component, or has failed to. seconds: since it began with this one."""

    when: float
    key: ModelKey
    rank: int
    seconds: float

    @property
    def ranks(self) -> RankIds:
        return (self.rank,)


RankEvent = PlanBegun | BatchEnded | TransferEnded | LoadsBegun | LoadEnded
"""Each has the ranks that do it."""


class RankClocks:
    """The clocks of one engine's ranks. All times are seconds of simulated time."""

    def __init__(self, num_ranks: int, durations: Durations) -> None:
        self.busy_seconds = [0.0] * num_ranks  # per rank, with batches that it has done or will do
        self._durations = durations
        self._free_at = [0.0] * num_ranks  # per rank: when it has done all that it was sent
        self._loads: list[list[tuple[float, float]]] = [[] for _ in range(num_ranks)]  # per rank: (begin, end) of each
        self._arrivals: dict[tuple[int, TensorKey], list[float]] = {}  # (rank, value) -> when each delivery arrives

    def lose(self, rank: int, now: float) -> None:
        """Forget what a rank was sent, because it has died; when it is back, it begins what it is sent at once."""
        self._free_at[rank] = now
        self._loads[rank].clear()
        for key in [key for key in self._arrivals if key[0] == rank]:
            del self._arrivals[key]

    def submit(
        self,
        plan: StepPlan,
        seconds_of: Callable[[Batch], float],
        load_seconds: Callable[[ModelKey, int], float],
        now: float,
    ) -> list[RankEvent]:
        """Send each rank its part of a plan; what happens because of it, and when. seconds_of: see
        `Durations.batch_seconds`. load_seconds: what a rank takes to load a component.
        """
        events: list[RankEvent] = []
        for rank, part in parts_of(plan).items():
            self._free_at[rank] = max(now + self._durations.trip_seconds(), self._free_at[rank])
            events.append(PlanBegun(self._free_at[rank], part, rank))
            for load in part.loads:
                events += self._load(load, rank, load_seconds)
        to_send = self._send_what_is_there(plan)
        for transfer in plan.transfers:
            self._free_at[transfer.source] += self._durations.transfer_seconds(transfer)
            events.append(TransferEnded(self._free_at[transfer.source], transfer))
        for batch in plan.batches:
            events.append(self._run(batch, seconds_of(batch)))
            made = {(item.request_id, item.node, item.version) for item in batch.items}
            self._send(each for each in to_send if each.source in batch.ranks and _producer(each) in made)
        return events

    def num_busy(self, when: float) -> int:
        """Ranks that have work at a time, of what they were sent so far."""
        return sum(free_at > when for free_at in self._free_at)

    def _run(self, batch: Batch, seconds: float) -> BatchEnded:
        started = max(self._free_at[rank] for rank in batch.ranks)
        seconds += self._durations.crowded_seconds(batch, seconds, self.num_busy(started))
        seconds = max(self._beside_loads(rank, started, seconds) for rank in batch.ranks)
        end, arrived = started + seconds, max(self._take_arrivals(batch), default=0.0)
        if arrived > end:
            end, seconds = arrived, arrived - started
        for rank in batch.ranks:
            self._free_at[rank] = end + self._durations.pause_seconds()
            self.busy_seconds[rank] += seconds
        return BatchEnded(end, batch, started, seconds)

    def _load(
        self, load: Load, rank: int, load_seconds: Callable[[ModelKey, int], float]
    ) -> Iterator[LoadsBegun | LoadEnded]:
        mine = self._loads[rank]
        now = max(self._free_at[rank], mine[-1][1] if mine else 0.0)
        mine[:] = [each for each in mine if each[1] > self._free_at[rank]]
        yield LoadsBegun(now, load, rank)
        for key in load.load:
            seconds = load_seconds(key, rank)
            mine.append((now, now + seconds))
            now += seconds
            yield LoadEnded(now, key, rank, seconds)

    def _beside_loads(self, rank: int, started: float, seconds: float) -> float:
        """What a batch takes that would take so many seconds if its rank loaded nothing."""
        now, left, slowness = started, seconds, self._durations.load_slowness()
        for begin, end in self._loads[rank]:
            if end <= now:
                continue
            before = max(0.0, begin - now)
            if left <= before:
                break
            now, left = now + before, left - before
            done = min(left, (end - now) / slowness)
            now, left = now + done * slowness, left - done
        return now + left - started

    def _take_arrivals(self, batch: Batch) -> Iterator[float]:
        """When what is delivered to a batch arrives."""
        for ref in (ref for item in batch.items for ref in item.inputs if ref.is_deferred):
            for rank in set(batch.ranks) - {ref.rank}:
                arrivals = self._arrivals[rank, ref.key]
                yield arrivals.pop(0)
                if not arrivals:
                    del self._arrivals[rank, ref.key]

    def _send_what_is_there(self, plan: StepPlan) -> list[Delivery]:
        """Make the deliveries of what ranks have when they begin a plan; returns those of what its batches make."""
        to_come = {
            (rank, item.request_id, item.node, item.version)
            for batch in plan.batches
            for rank in batch.ranks
            for item in batch.items
        }
        later = [each for each in plan.deliveries if (each.source, *_producer(each)) in to_come]
        self._send(each for each in plan.deliveries if each not in later)
        return later

    def _send(self, deliveries: Iterable[Delivery]) -> None:
        for each in deliveries:
            arrives = self._free_at[each.source] + self._durations.delivery_seconds(each)
            self._arrivals.setdefault((each.target, each.key), []).append(arrives)


def _producer(delivery: Delivery) -> tuple[str, str, int]:
    """The run of a node whose value is delivered."""
    return delivery.key.request_id, delivery.key.node, delivery.key.version
