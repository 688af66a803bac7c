"""Serves a ModelScenario in simulated time, with the engine's scheduler and policies, and the router before several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from random import Random

import msgspec

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.cluster import MESSAGE_SECONDS, ReportingEngine
from benchmarks.simulation.compared import make
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.load_watch import LoadWatch, WatchedScheduler
from benchmarks.simulation.machine import FrozenCosts
from benchmarks.simulation.model_ranks import ModelRanks, Poison
from benchmarks.simulation.model_scenario import ModelScenario
from core.config import RouterPolicy, SchedulerConfig
from core.costs.load_report import LoadReport
from core.handles import LoadedComponent
from core.messages.engine import EngineRequest, Failed, Finished, Output, PartialImage
from core.model_info import ModelInfo
from core.routing.fleet import Fleet
from core.routing.policies import make_policy
from core.routing.request_shape import RequestShape
from core.scheduling.requests.bindings import Bindings


@dataclass(frozen=True)
class Served:
    """What became of the requests of a scenario, after all that fits was loaded."""

    latencies: dict[str, float]  # by id of those with a picture: seconds from arrival
    failures: Counter[str]  # kind of failure -> requests
    in_time: int
    seconds: float  # from the first arrival to the last answer
    loaded: list[LoadedComponent]
    num_failed_loads: int
    watches: list[LoadWatch]  # by engine
    num_deaths: int
    has_given_up: bool  # whether an engine has, because a rank kept dying
    engines: dict[str, int]  # by id: the engine that had the request

    @property
    def waited_for_loads(self) -> set[str]:
        """Ids of the requests that did."""
        return set().union(*(watch.waited_for_loads for watch in self.watches))

    @property
    def avoidable(self) -> set[str]:
        """Ids of those that did although another rank of their engine had a copy."""
        return set().union(*(watch.avoidable for watch in self.watches))


@dataclass
class _Site:
    """The engines of one run, each with ranks and memory of its own. policy: name, see `compared.make`. router: chooses
    the engine, where there are several.
    """

    scenario: ModelScenario
    policy: str
    router: RouterPolicy
    seed: int
    poison: Poison
    clock: Clock = field(default_factory=Clock)
    ends: dict[str, float] = field(default_factory=dict)  # by id of those with a picture
    failures: Counter[str] = field(default_factory=Counter)
    engines: dict[str, int] = field(default_factory=dict)  # by id: the engine that got it

    def __post_init__(self) -> None:
        scenario, self.infos = self.scenario, self.scenario.models.infos
        every = range(scenario.num_engines)
        self.ranks = [self._make_ranks(number) for number in every]
        self.schedulers = [_scheduler(scenario, self.policy, self.infos, ranks) for ranks in self.ranks]
        self.simulated = [self._make_engine(number) for number in every]
        self.fleet = Fleet(scenario.num_engines, scenario.edits.max_num_seqs)
        self._router = make_policy(self.router)

    def _make_ranks(self, number: int) -> ModelRanks:
        scenario, random = self.scenario, Random(self.seed + number * 1_000_003)
        memory = scenario.num_ranks, self.infos, scenario.models.sizes, scenario.budget
        return ModelRanks(*memory, self.poison, scenario.failures, random)

    def _make_engine(self, number: int) -> SimulatedEngine:
        """One that has a router reports to it."""
        parts = self.clock, self.schedulers[number], self.scenario.machine
        if self.scenario.num_engines == 1:
            return SimulatedEngine(*parts, lambda outputs: self._note(0, outputs), self.ranks[number])
        return ReportingEngine(*parts, partial(self._tell, number), self.ranks[number])

    def start(self) -> None:
        """Load what fits, without a request."""
        for engine in self.simulated:
            if isinstance(engine, ReportingEngine):
                engine.report()
            engine.step()
        self.clock.run()
        for ranks in self.ranks:
            ranks.loaded.clear()

    def add(self, request: EngineRequest) -> None:
        """A request has come."""
        if self.scenario.num_engines == 1:
            self.engines[request.request_id] = 0
            self.simulated[0].add(request)
            return
        now, shape = self.clock.now, RequestShape.of_request(request, self.infos[request.model])
        chosen = self._router.choose(shape, self.fleet.serving(request.model, now), now).engine
        self.fleet.sent(chosen, shape, now)
        self.engines[request.request_id] = chosen
        self.clock.after(MESSAGE_SECONDS, lambda: self.simulated[chosen].add(request))

    def _tell(self, number: int, report: LoadReport, outputs: tuple[Output, ...]) -> None:
        self.clock.after(MESSAGE_SECONDS, lambda: self._hear(number, report, outputs))

    def _hear(self, number: int, report: LoadReport, outputs: tuple[Output, ...]) -> None:
        self.fleet.observe(number, report, self.clock.now)
        self._note(number, outputs)

    def _note(self, number: int, outputs: tuple[Output, ...]) -> None:
        for each in outputs:
            if isinstance(each, PartialImage):
                continue
            self.schedulers[number].watch.note_end(each.request_id)
            if isinstance(each, Finished):
                self.ends[each.request_id] = self.clock.now
            elif isinstance(each, Failed):
                self.failures[each.failure.kind] += 1


def serve(
    scenario: ModelScenario,
    policy: str,
    seed: int,
    requests: Sequence[EngineRequest] | None = None,
    router: RouterPolicy = "mask-aware",
) -> Served:
    """policy: its name, see `compared.make`. requests: by default `scenario.trace(seed)`; their arrivals count from
    when all that fits is loaded. router: of several engines.
    """
    requests = scenario.trace(seed) if requests is None else requests
    poison = Poison(scenario.poison_models, scenario.poisonous(seed, requests))
    site = _Site(scenario, policy, router, seed, poison)
    site.start()
    clock, start = site.clock, site.clock.now
    for request in requests:
        moved = msgspec.structs.replace(request, arrival=start + request.arrival)
        clock.at(moved.arrival, partial(site.add, moved))
    clock.run()
    for scheduler in site.schedulers:
        assert not scheduler.num_requests, f"{scheduler.num_requests} requests are left"
        scheduler.check_integrity()
    assert len(site.ends) + site.failures.total() == len(requests), "a request has no answer"
    ends = site.ends
    latencies = {
        each.request_id: ends[each.request_id] - start - each.arrival for each in requests if each.request_id in ends
    }
    alone = {each.request_id: scenario.alone_seconds(each) for each in requests}
    return Served(
        latencies=latencies,
        failures=site.failures,
        in_time=sum(seconds <= scenario.slo_scale * alone[name] for name, seconds in latencies.items()),
        seconds=clock.now - start,
        loaded=list(chain.from_iterable(ranks.loaded for ranks in site.ranks)),
        num_failed_loads=sum(ranks.num_failed_loads for ranks in site.ranks),
        watches=[scheduler.watch for scheduler in site.schedulers],
        num_deaths=sum(ranks.num_deaths for ranks in site.ranks),
        has_given_up=any(engine.has_given_up for engine in site.simulated),
        engines=site.engines,
    )


def _scheduler(
    scenario: ModelScenario, policy: str, infos: dict[str, ModelInfo], ranks: ModelRanks
) -> WatchedScheduler:
    """It knows what steps take, and how large components are."""
    config = SchedulerConfig(max_num_seqs=scenario.edits.max_num_seqs, model_bytes=scenario.budget)
    cost = FrozenCosts()
    scheduler = WatchedScheduler(
        config,
        infos,
        scenario.num_ranks,
        cost=cost,
        policy=make(policy),
        sizes=[LoadedComponent(key, nbytes) for key, nbytes in scenario.models.sizes.items()],
    )
    bindings = Bindings(infos)
    scheduler.watch = LoadWatch(ranks.memory, {name: bindings.needs(name) for name in infos})
    started = [(rank, ranks.start(rank)) for rank in range(scenario.num_ranks)]
    scheduler.learn([sample for name in infos for sample in scenario.machine.samples(name)], started)
    cost.is_frozen = True
    return scheduler
