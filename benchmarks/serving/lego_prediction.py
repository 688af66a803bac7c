"""Predicts what becomes of requests to the workflows of a Layout: the scheduler of the engine, in simulated time.

Batches take what the profile says, times what they took alone on a server; loads what they took there by bytes. A
component that another rank has is loaded at once: both map the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import msgspec

from benchmarks.load.workload import available_cores
from benchmarks.serving.lego_profile import Known
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.cores import Cores
from benchmarks.simulation.durations import Durations
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.model_machine import BESIDE_A_LOAD
from benchmarks.simulation.model_ranks import ModelRanks, Poison
from benchmarks.simulation.outside import Crowding, Outside, Surroundings
from benchmarks.simulation.server_engine import TimedScheduler
from core.config import ImageConfig, SchedulerConfig
from core.costs.cost_model import CostModel
from core.graph.op import OPS
from core.graph.work import Work
from core.handles import ModelKey
from core.messages.engine import EngineRequest
from core.messages.worker import Batch
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.reports.predictor import Predictor
from core.scheduling.requests.bindings import Bindings


class LoadLine(msgspec.Struct, frozen=True):
    """Seconds of loading a component by its bytes."""

    seconds: float  # of none
    per_byte: float


class Measured(msgspec.Struct, frozen=True):
    """What a server of one rank has shown that had one request at a time. crowding: of a server of several ranks."""

    op_seconds: dict[tuple[str, str], float]  # (workflow, op) -> of a batch
    around: dict[str, Surroundings]  # by workflow
    load: LoadLine
    crowding: Crowding


class WorkflowDurations(Durations):
    """ranks: of the simulation; where one has a component, others load it at once. pace: batches and loads take so many
    times what was measured.
    """

    def __init__(self, known: Known, measured: Measured, ranks: ModelRanks, num_ranks: int, pace: float = 1.0) -> None:
        self._bindings = Bindings(known.infos)
        self._predictor = Predictor(CostModel(), self._bindings)
        self._predictor.learn(known.samples)
        self._sizes = {each.key: each.nbytes for each in known.sizes}
        self._measured, self._ranks, self._num_ranks, self._pace = measured, ranks, num_ranks, pace
        around = next(iter(measured.around.values()))
        self._trip, self._pause = around.trip, around.pause

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        if not work.queries:  # of the activation cache
            return 0.0
        alone = [self._measured.op_seconds.get((item.model, batch.op), 0.0) for item in batch.items]
        op, number = OPS[batch.op], len(batch.items)
        keys, size = self._bindings.keys(batch.items[0].model, *op.components), len(work.queries) // number
        one = self._predictor.op_seconds(keys, op, Work(work.queries[:size], work.keys[:size]), 1)
        every = self._predictor.op_seconds(keys, op, work, len(batch.ranks))
        return self._pace * sum(alone) * (every / (number * one) if one and every else 1.0)

    def crowded_seconds(self, batch: Batch, seconds: float, num_others: int) -> float:
        share = num_others / max(1, self._num_ranks - len(batch.ranks))
        return (seconds + self._pause) * (self._measured.crowding.steps - 1.0) * share

    def trip_seconds(self) -> float:
        return self._trip

    def pause_seconds(self) -> float:
        return self._pause

    def load_seconds(self, key: ModelKey) -> float:
        is_shared = any(self._ranks.has(key, rank) for rank in range(self._num_ranks))
        line = self._measured.load
        return self._pace * (line.seconds + (0.0 if is_shared else line.per_byte * self._sizes[key]))

    def load_slowness(self) -> float:
        return BESIDE_A_LOAD


@dataclass(frozen=True)
class Asked:
    """A request. due: seconds after the start. slo_seconds: in which its sender must have the picture."""

    request: EngineRequest  # as the engine gets it
    workflow: str
    due: float
    slo_seconds: float


@dataclass(frozen=True)
class Predicted:
    """in_time: of each request, whether it is. num_loads: components, without those of warm-ups."""

    in_time: list[bool]
    num_loads: int

    @property
    def share(self) -> float:
        """Of the requests, those in time."""
        return sum(self.in_time) / len(self.in_time)


def predict(
    known: Known,
    measured: Measured,
    policy: SchedulingPolicy,
    asked: Sequence[Asked],
    warm_ups: Sequence[EngineRequest],
    *,
    num_ranks: int,
    model_bytes: int,
    pace: float = 1.0,
) -> Predicted:
    """policy: a new one. warm_ups: served before, one by one. model_bytes: as for a server. pace: see
    WorkflowDurations. Raises AssertionError where requests never end.
    """
    clock, sizes = Clock(), {each.key: each.nbytes for each in known.sizes}
    ranks = ModelRanks(num_ranks, known.infos, sizes, model_bytes, Poison(), 0.0, Random(0))
    config = SchedulerConfig(model_bytes=model_bytes)
    scheduler = TimedScheduler(config, known.infos, num_ranks, policy=policy, sizes=known.sizes)
    scheduler.learn(known.samples, [(rank, ranks.start(rank)) for rank in range(num_ranks)])
    around = {
        str(number): replace(measured.around[each.workflow], crowding=measured.crowding)
        for number, each in enumerate(asked)
    }
    cores = Cores(clock, available_cores(), lambda: engine.clocks.num_busy(clock.now), ImageConfig().image_workers)
    outside = Outside(clock, cores, around, next(iter(around.values())).deliver, num_ranks)
    engine = SimulatedEngine(
        clock, scheduler, WorkflowDurations(known, measured, ranks, num_ranks, pace), outside.note, ranks
    )
    engine.step()
    clock.run()
    for number, request in enumerate(warm_ups):
        engine.add(msgspec.structs.replace(request, request_id=f"warm-up {number}", arrival=clock.now, deadline=None))
        clock.run()
    start, loads_before = clock.now, len(ranks.loaded)
    for number, each in enumerate(asked):
        due = start + each.due
        until = each.due + each.slo_seconds
        request = msgspec.structs.replace(each.request, request_id=str(number), arrival=each.due, deadline=until)
        clock.at(due, partial(outside.prepare, request, due, engine))
    clock.run()
    assert not scheduler.num_requests, f"{scheduler.num_requests} requests never end"
    in_time = [
        outside.ends.get(str(number), float("inf")) - start - each.due <= each.slo_seconds
        for number, each in enumerate(asked)
    ]
    return Predicted(in_time, len(ranks.loaded) - loads_before)
