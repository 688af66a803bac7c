"""Serves in simulated time the requests that a server has had, with latencies measured on this machine.

Scheduler, policies, cost model and activation cache are those of the engine; the ranks are simulated, and take as long
as the model's profile says.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf
from multiprocessing import get_context
from statistics import fmean

import msgspec

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.cores import Cores
from benchmarks.simulation.durations import Durations
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.outside import Outside, Surroundings
from benchmarks.simulation.recorder import BatchNote, Recorder
from core.cache_folder import user_cache_folder
from core.config import ImageConfig, ModelConfig, SchedulerConfig
from core.costs.cost_model import CostModel
from core.graph.catalog import WORKFLOWS
from core.graph.op import OPS
from core.graph.work import Work
from core.handles import LoadedComponent
from core.messages.engine import EngineRequest
from core.messages.worker import Batch, BatchResult, CostSample, StepPlan
from core.model_info import ModelInfo
from core.scheduling.reports.predictor import Predictor
from core.scheduling.requests.bindings import Bindings
from core.scheduling.requests.request import Request
from core.scheduling.scheduler import StepScheduler
from model_executor.worker.loading.resident import ResidentModels, set_threads
from model_executor.worker.probes.cost_probe import known_or_probed

OpAtDegree = tuple[str, int]
"""An op, and the number of ranks that compute it together."""

APART = 1000.0
"""Seconds between requests that have a simulated server alone: enough for any."""


@dataclass(frozen=True)
class Known:
    """What is known of a model before the first request."""

    info: ModelInfo
    components: tuple[LoadedComponent, ...]
    samples: tuple[CostSample, ...]  # with the profile, if there is one

    @classmethod
    def of(cls, config: ModelConfig) -> Known:
        """As a worker reports it that has config.threads threads. Raises ConfigError."""
        set_threads(config.threads)
        models = ResidentModels.open((config,))
        models.load_all()
        ready = models.ready(0)
        samples = known_or_probed(models.families, ready.models, user_cache_folder(os.environ))
        return cls(ready.models[0], ready.components, samples)

    @classmethod
    def of_new_process(cls, config: ModelConfig) -> Known:
        """The same, in a process of its own: torch's threads can be set once in a process."""
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(cls.of, config).result()

    @property
    def has_profile(self) -> bool:
        return any(sample.is_profile for sample in self.samples)


class Measured(Durations):
    """Batches take what the samples say, and longer where other ranks and processes leave no core free. What these
    compute for a request while it is prepared and delivered are tasks of `cores`; the rest, most of which the engine
    does with every batch, delays all of its batches alike, unless it was measured how much slower ranks are together.
    """

    def __init__(
        self,
        known: Known,
        surroundings: Surroundings,
        cores: Cores,
        beside: Mapping[str, float],
        stretch: Mapping[OpAtDegree, float],
        num_ranks: int,
    ) -> None:
        """beside: request id -> CPU seconds of other processes with each of its batches. stretch: see `serve`."""
        self._bindings = Bindings({known.info.name: known.info})
        self._predictor = Predictor(CostModel(), self._bindings)
        self._predictor.learn(known.samples)
        self._stretch = stretch
        self._surroundings, self._cores, self._beside, self._num_ranks = surroundings, cores, beside, num_ranks
        self.seconds: dict[OpAtDegree, list[float]] = {}
        """What batches have taken, without such delays."""
        self.num_steps: Counter[int] = Counter()
        """Degree -> denoising steps of requests."""

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        if not work.queries:  # of the activation cache: templates are warm
            return 0.0
        key = batch.op, len(batch.ranks)
        op = OPS[batch.op]
        components = self._bindings.keys(batch.items[0].model, *op.components)
        predicted = self._predictor.op_seconds(components, op, work, len(batch.ranks))
        seconds = predicted * self._stretch.get(key, 1.0)
        self.seconds.setdefault(key, []).append(seconds)
        if op.part == "denoise":
            self.num_steps[len(batch.ranks)] += len(batch.items)
        return seconds

    def crowded_seconds(self, batch: Batch, seconds: float, num_others: int) -> float:
        slowness = self._cores.slowness(num_others + len(batch.ranks))
        return seconds * (slowness - 1.0) + self._delay(batch, seconds, num_others)

    def _delay(self, batch: Batch, seconds: float, num_others: int) -> float:
        """By ranks that have work, and what other processes do for their batches."""
        crowding = self._surroundings.crowding
        if crowding is None:
            beside = sum(self._beside.get(item.request_id, 0.0) for item in batch.items)
            return beside if self._cores.are_all_taken(num_others + len(batch.ranks)) else 0.0
        share = num_others / max(1, self._num_ranks - len(batch.ranks))
        return (seconds + self._surroundings.pause) * (crowding.steps - 1.0) * share

    def trip_seconds(self) -> float:
        return self._surroundings.trip

    def pause_seconds(self) -> float:
        return self._surroundings.pause


class TimedScheduler(StepScheduler):
    """Counts the time that it takes."""

    own_seconds = 0.0

    def schedule(self, now: float, *, again: bool = False) -> StepPlan | None:
        before = time.perf_counter()
        plan = super().schedule(now, again=again)
        self.own_seconds += time.perf_counter() - before
        return plan

    def apply(self, result: BatchResult) -> None:
        before = time.perf_counter()
        super().apply(result)
        self.own_seconds += time.perf_counter() - before


@dataclass(frozen=True)
class Simulated:
    """What became of the requests."""

    in_time: int  # that ended by their deadlines; one without a deadline is in time
    latencies: dict[str, float]  # by id of those with a picture: seconds from when it is due until its sender has it
    batches: list[BatchNote]
    busy_seconds: float  # of all ranks
    op_seconds: dict[OpAtDegree, float]  # mean of its batches
    num_steps: Counter[int]  # degree -> denoising steps of requests
    scheduler_seconds: float  # of the real machine


def serve(
    known: Known,
    surroundings: Surroundings,
    policy: str,
    requests: Sequence[EngineRequest],
    warm_ups: Sequence[EngineRequest],
    *,
    num_ranks: int,
    num_cores: float,
    degree: int = 1,
    own: Mapping[str, Surroundings] | None = None,
    stretch: Mapping[OpAtDegree, float] | None = None,
) -> Simulated:
    """requests: their arrivals are when they are due, in seconds after the start, and so are their deadlines, by which
    their senders must have the picture; from one to the other is their timeout. warm_ups: served before. num_cores:
    that ranks and all other processes share. degree: see SchedulerConfig. own: request id -> what it costs beside its
    batches, if that is not as with others; its trip, pause and crowding do not count. stretch: what batches take, as a
    multiple of what the samples say.
    """
    clock = Clock()
    around = {request.request_id: surroundings for request in requests} | dict(own or {})
    scheduler = TimedScheduler(SchedulerConfig(policy=policy, degree=degree), {known.info.name: known.info}, num_ranks)
    scheduler.learn(known.samples, [(rank, known.components) for rank in range(num_ranks)])
    recorder = Recorder(clock)
    cores = Cores(clock, num_cores, lambda: engine.clocks.num_busy(clock.now), ImageConfig().image_workers)
    bindings = Bindings({known.info.name: known.info})
    beside = {each.request_id: _cpu_beside_batches(each, bindings, around[each.request_id]) for each in requests}
    durations = Measured(known, surroundings, cores, beside, stretch or {}, num_ranks)
    outside = Outside(clock, cores, around, surroundings.deliver, num_ranks)
    engine = SimulatedEngine(clock, scheduler, durations, outside.note, recorder)
    for request in warm_ups:
        engine.add(msgspec.structs.replace(request, arrival=clock.now, deadline=None))
        clock.run()
    start, busy, own_seconds = clock.now, sum(engine.clocks.busy_seconds), scheduler.own_seconds
    for noted in (recorder.batches, durations.seconds, durations.num_steps, outside.ends):
        noted.clear()
    for request in requests:
        due = start + request.arrival
        clock.at(due + around[request.request_id].send, partial(outside.prepare, request, due, engine))
    clock.run()
    assert not scheduler.num_requests, "requests are left"
    ends = outside.ends
    done = [request for request in requests if request.request_id in ends]
    until = {name: end - start for name, end in ends.items()}
    late = [each for each in done if each.deadline is not None and until[each.request_id] > each.deadline]
    return Simulated(
        in_time=len(done) - len(late),
        latencies={each.request_id: until[each.request_id] - each.arrival for each in done},
        batches=[(when - start, op, number) for when, op, number in recorder.batches],
        busy_seconds=sum(engine.clocks.busy_seconds) - busy,
        op_seconds={key: fmean(seconds) for key, seconds in durations.seconds.items()},
        num_steps=durations.num_steps,
        scheduler_seconds=scheduler.own_seconds - own_seconds,
    )


def _cpu_beside_batches(request: EngineRequest, bindings: Bindings, around: Surroundings) -> float:
    """CPU seconds of other processes with each of a request's batches, one for each run of a node."""
    run = Request.of(request, WORKFLOWS, bindings)
    num_batches = sum(map(run.progress.times, run.workflow.nodes))
    return max(0.0, around.outside_cpu - around.prepare - around.deliver) / num_batches


def stretch_of(
    known: Known,
    op_seconds: Mapping[OpAtDegree, float],
    requests: Sequence[EngineRequest],
    warm_ups: Sequence[EngineRequest],
    *,
    num_ranks: int,
    degree: int = 1,
) -> dict[OpAtDegree, float]:
    """What batches took of requests that had the server alone, as a multiple of the samples: on a server they do not
    find their weights and pages in the processor's cache. op_seconds: what they took, the mean. degree: of the server.
    """
    alone = [
        msgspec.structs.replace(request, request_id=str(index), arrival=APART * index, deadline=None)
        for index, request in enumerate(requests)
    ]
    nothing = Surroundings(prepare=0.0, deliver=0.0, trip=0.0, pause=0.0, outside_cpu=0.0)
    served = serve(known, nothing, OURS, alone, warm_ups, num_ranks=num_ranks, num_cores=inf, degree=degree)
    return {key: op_seconds[key] / seconds for key, seconds in served.op_seconds.items() if seconds}
