"""Serves in simulated time the requests that a server has had, with latencies measured on this machine.

Scheduler, policies, cost model and activation cache are those of the engine; the ranks are simulated, and take as long
as the model's profile says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from benchmarks.simulation.durations import Durations
from benchmarks.simulation.engine import Clock, SimulatedEngine
from benchmarks.simulation.recorder import BatchNote, Recorder
from core.cache_folder import user_cache_folder
from core.config import ModelConfig, SchedulerConfig
from core.costs.cost_model import CostModel
from core.graph.op import OPS
from core.graph.work import Work
from core.handles import LoadedComponent
from core.messages.engine import EngineRequest, Finished
from core.messages.worker import Batch, BatchResult, CostSample, StepPlan
from core.model_info import ModelInfo
from core.scheduling.outputs import Output
from core.scheduling.predictor import Predictor
from core.scheduling.scheduler import StepScheduler
from model_executor.worker.cost_probe import known_or_probed
from model_executor.worker.resident import ResidentModels, set_threads


@dataclass(frozen=True)
class Surroundings:
    """What a request costs beside its batches, in seconds; measured with requests that have the server alone."""

    prepare: float  # from when it is sent until the engine has it
    deliver: float  # from the end of its last batch until its sender has the picture
    trip: float  # from the end of a batch until its rank begins the next one, if that was not sent before
    outside_cpu: float  # CPU time of all processes but the workers


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

    @property
    def has_profile(self) -> bool:
        return any(sample.is_profile for sample in self.samples)


class Measured(Durations):
    """Batches take what the samples say. Where ranks have all cores, what the other processes compute for a request
    delays a rank as well: it counts with the batch that decodes the picture.
    """

    def __init__(
        self, known: Known, surroundings: Surroundings, stretch: Mapping[str, float], *, has_spare_cores: bool
    ) -> None:
        self._predictor = Predictor(CostModel(), {known.info.name: known.info})
        self._predictor.learn(known.samples)
        self._stretch = stretch
        self._trip = surroundings.trip
        self._outside = 0.0 if has_spare_cores else surroundings.outside_cpu
        self.seconds: dict[str, list[float]] = {}
        """Op -> what its batches have taken, without such delays."""

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        if not work.queries:  # of the activation cache: templates are warm
            return 0.0
        delay = self._outside * len(batch.items) if OPS[batch.op].part == "decode" else 0.0
        seconds = self._predictor.of_batch(batch, work) * self._stretch.get(batch.op, 1.0)
        self.seconds.setdefault(batch.op, []).append(seconds)
        return seconds + delay

    def trip_seconds(self) -> float:
        return self._trip


class TimedScheduler(StepScheduler):
    """Counts the time that it takes."""

    own_seconds = 0.0

    def schedule(self, now: float) -> StepPlan | None:
        before = time.perf_counter()
        plan = super().schedule(now)
        self.own_seconds += time.perf_counter() - before
        return plan

    def apply(self, result: BatchResult) -> None:
        before = time.perf_counter()
        super().apply(result)
        self.own_seconds += time.perf_counter() - before


@dataclass(frozen=True)
class Simulated:
    """What became of the requests."""

    in_time: int
    batches: list[BatchNote]
    busy_seconds: float  # of all ranks
    op_seconds: dict[str, float]  # op -> mean of its batches
    scheduler_seconds: float  # of the real machine


def serve(
    known: Known,
    surroundings: Surroundings,
    policy: str,
    requests: Sequence[EngineRequest],
    warm_ups: Sequence[EngineRequest],
    *,
    num_ranks: int,
    has_spare_cores: bool,
    stretch: Mapping[str, float] | None = None,
) -> Simulated:
    """requests: their arrivals are when they are sent, in seconds after the start, and so are their deadlines, by which
    their senders must have the picture. warm_ups: served before. stretch: op -> what its batches take, as a multiple of
    what the samples say. Requests that come at once are received one after the other.
    """
    clock = Clock()
    scheduler = TimedScheduler(SchedulerConfig(policy=policy), {known.info.name: known.info}, num_ranks)
    scheduler.learn(known.samples, [(rank, known.components) for rank in range(num_ranks)])
    in_time = list[str]()
    recorder = Recorder(clock)
    durations = Measured(known, surroundings, stretch or {}, has_spare_cores=has_spare_cores)
    deadlines: dict[str, float] = {}

    def note(outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            if isinstance(output, Finished) and clock.now <= deadlines.get(output.request_id, 0.0):
                in_time.append(output.request_id)

    engine = SimulatedEngine(clock, scheduler, durations, note, recorder)
    for request in warm_ups:
        engine.add(msgspec.structs.replace(request, arrival=clock.now, deadline=None))
        clock.run()
    start, busy, own = clock.now, sum(engine.clocks.busy_seconds), scheduler.own_seconds
    recorder.batches.clear()
    durations.seconds.clear()
    arrival = start
    for request in requests:
        assert request.deadline is not None
        arrival = max(arrival, start + request.arrival) + surroundings.prepare
        deadline = deadlines[request.request_id] = start + request.deadline - surroundings.deliver
        moved = msgspec.structs.replace(request, arrival=arrival, deadline=deadline)
        clock.at(arrival, lambda moved=moved: engine.add(moved))  # type: ignore[misc]
    clock.run()
    assert not scheduler.num_requests, "requests are left"
    return Simulated(
        in_time=len(in_time),
        batches=[(when - start, op, number) for when, op, number in recorder.batches],
        busy_seconds=sum(engine.clocks.busy_seconds) - busy,
        op_seconds={op: fmean(seconds) for op, seconds in durations.seconds.items()},
        scheduler_seconds=scheduler.own_seconds - own,
    )
