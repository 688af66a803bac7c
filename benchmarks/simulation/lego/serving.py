"""Serves requests of a site in simulated time, with the scheduler of the engine and a system's policy.

Values are on all devices as soon as they are made: LegoDiffusion's devices read each other's memory, in less than a
millisecond (section 7.5), whatever these do. Everything else is as in the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Literal

import msgspec

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.durations import Durations
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.lego.numbers import Numbers, Workflow
from benchmarks.simulation.lego.site import Site, op_seconds, register
from benchmarks.simulation.lego.systems import Offered, system_of
from benchmarks.simulation.machine import FrozenCosts
from benchmarks.simulation.model_machine import BESIDE_A_LOAD
from benchmarks.simulation.model_ranks import ModelRanks, Poison
from core.config import SchedulerConfig
from core.costs.cost_model import CostModel
from core.graph.work import Work
from core.handles import LoadedComponent, ModelKey
from core.messages.engine import Failed, Finished, Output
from core.messages.worker import Batch, BatchResult, ItemResult
from core.model_info import ModelInfo
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.scheduler import StepScheduler

EDGE = 0.1
"""Share of the requests that come first, and of those that come last, that is not counted: devices are empty before and
after.
"""

Forecast = Literal["learnt", "true"]
"""See `serve`."""


class OneSided(StepScheduler):
    """Every rank can read every value."""

    def apply(self, result: BatchResult) -> None:
        super().apply(result)
        for made in (made for item in result.items for made in item.tensors):
            self.values.note_copy(made.key, self.ranks.up)


def make_scheduler(
    limits: SchedulerConfig,
    infos: Mapping[str, ModelInfo],
    num_ranks: int,
    sizes: Mapping[ModelKey, int],
    policy: SchedulingPolicy,
    cost: CostModel,
) -> OneSided:
    """One that also knows requests that run as a whole, and has no limits but these. sizes: bytes of components."""
    config = msgspec.structs.replace(limits, max_num_seqs=4096, max_plans_in_flight=1, max_num_batched_tokens=2**31 - 1)
    components = [LoadedComponent(key, nbytes) for key, nbytes in sizes.items()]
    scheduler = OneSided(config, infos, num_ranks, cost=cost, policy=policy, sizes=components)
    whole = register()
    scheduler.workflows[whole.name] = whole
    return scheduler


class NotingRanks(ModelRanks):
    """Note which requests have begun."""

    begun: set[str]  # their ids

    def run(self, batch: Batch, rank: int) -> tuple[ItemResult, ...]:
        self.begun.update(item.request_id for item in batch.items)
        return super().run(batch, rank)


class WorkflowDurations(Durations):
    """jitter: of batches, drawn from `random`."""

    def __init__(
        self,
        numbers: Numbers,
        workflows: Mapping[str, Workflow],
        sizes: Mapping[ModelKey, int],
        jitter: float,
        seed: int,
    ) -> None:
        """workflows: by request id. sizes: bytes of components."""
        self._numbers, self._workflows, self._sizes = numbers, workflows, sizes
        self._jitter, self._random = jitter, Random(seed)

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        workflow, degree = self._workflows[batch.items[0].request_id], len(batch.ranks)
        seconds = op_seconds(self._numbers, batch.op, workflow, len(batch.items), degree)
        return seconds * (1 + self._jitter * self._random.uniform(-1, 1))

    def load_seconds(self, key: ModelKey) -> float:
        return self._sizes[key] / 1e9 / self._numbers.load_gigabytes_per_second

    def load_slowness(self) -> float:
        return BESIDE_A_LOAD


@dataclass(frozen=True)
class Served:
    """What became of the counted requests."""

    in_time: float  # share
    in_time_of: dict[str, float]  # share of each workflow's
    begun: float  # share
    broken: float  # of these, the share that missed its objective or was given up
    latencies: list[float]  # seconds, of those with a picture
    num_loads: int  # components, of all requests
    held_bytes: int  # of components, on all devices at the end
    busy: float  # share of the devices' time until the last answer
    seconds: float  # from the first arrival to the last answer
    is_whole: bool  # whether it was run to the end, see `least` of `serve`


def serve(site: Site, name: str, offered: Offered, *, forecast: Forecast = "learnt", least: float = 0.0) -> Served:
    """name: of a system, see `system_of`. forecast: learnt: of durations that vary, from batches; true: they do not
    vary, and are known. least: the run stops when it is certain that fewer are in time.
    """
    system, clock, is_true = system_of(name), Clock(), forecast == "true"
    infos, sizes, arrivals = site.infos(system.unit), site.sizes(system.unit), offered.draw(site)
    workflows = {str(index): site.workflows[place] for index, (_, place) in enumerate(arrivals)}
    ranks = NotingRanks(site.num_ranks, infos, sizes, site.budget, Poison(), 0.0, Random(0))
    ranks.begun = set()
    cost = FrozenCosts() if is_true else CostModel()
    policy, started = system.make(site, offered)
    limits = SchedulerConfig(max_degree=system.max_degree, on_late=system.on_late, model_bytes=site.budget)
    scheduler = make_scheduler(limits, infos, site.num_ranks, sizes, policy, cost)
    site.teach(cost, system.unit)
    if isinstance(cost, FrozenCosts):
        cost.is_frozen = True
    scheduler.learn((), [(rank, ranks.memory.start(rank, keys)) for rank, keys in started.items()])
    watch = _Watch(clock, site, workflows, [seconds for seconds, _ in arrivals], least)
    durations = WorkflowDurations(site.numbers, workflows, sizes, 0.0 if is_true else site.numbers.jitter, offered.seed)
    engine = SimulatedEngine(clock, scheduler, durations, watch.note, ranks)
    for index, (seconds, place) in enumerate(arrivals):
        request = site.request(index, seconds, site.workflows[place], system.unit)
        clock.at(seconds, partial(engine.add, request))
    clock.run()
    if not watch.is_stopped:
        assert not scheduler.num_requests, f"{scheduler.num_requests} requests are left"
    busy = sum(engine.clocks.busy_seconds) / (site.num_ranks * max(clock.now, 1e-9))
    held = sum(loaded.nbytes for rank in range(site.num_ranks) for loaded in scheduler.ranks.residency.components(rank))
    return watch.served(ranks.begun, len(ranks.loaded), held, busy)


class _Watch:
    """Notes what becomes of each request."""

    def __init__(
        self,
        clock: Clock,
        site: Site,
        workflows: Mapping[str, Workflow],
        arrivals: list[float],
        least: float,
    ) -> None:
        self._clock, self._arrivals, edge = clock, arrivals, int(EDGE * len(arrivals))
        self._counted = range(edge, len(arrivals) - edge)
        self._names = [workflows[str(index)].name for index in range(len(arrivals))]
        alone = {each.name: site.numbers.alone_seconds(each) for each in site.workflows}
        self._allowed = [site.slo_scale * alone[name] for name in self._names]
        self._most_missed = (1 - least) * len(self._counted) if least else inf
        self._latencies: dict[int, float] = {}
        self._num_missed = 0
        self.is_stopped = False

    def note(self, outputs: tuple[Output, ...]) -> None:
        for each in outputs:
            index = int(each.request_id) if isinstance(each, Finished | Failed) else -1
            if index not in self._counted:
                continue
            if isinstance(each, Finished):
                self._latencies[index] = self._clock.now - self._arrivals[index]
            if not self._is_in_time(index):
                self._num_missed += 1
                if self._num_missed > self._most_missed:
                    self.is_stopped = True
                    self._clock.stop()

    def _is_in_time(self, index: int) -> bool:
        return self._latencies.get(index, inf) <= self._allowed[index] + 1e-9

    def served(self, begun: Collection[str], num_loads: int, held_bytes: int, busy: float) -> Served:
        timely = set(filter(self._is_in_time, self._latencies))
        of_workflow = Counter(self._names[index] for index in self._counted)
        timely_of = Counter(self._names[index] for index in timely)
        counted = {index for index in map(int, begun) if index in self._counted}
        return Served(
            in_time=len(timely) / len(self._counted),
            in_time_of={name: timely_of[name] / of_workflow[name] for name in sorted(of_workflow)},
            begun=len(counted) / len(self._counted),
            broken=len(counted - timely) / len(counted) if counted else 0.0,
            latencies=list(self._latencies.values()),
            num_loads=num_loads,
            held_bytes=held_bytes,
            busy=busy,
            seconds=self._clock.now,
            is_whole=not self.is_stopped,
        )
