"""Cluster: engines, a router and the time that passes between them, as one queue of events.

Every engine has a StepScheduler with its ActivationCacheManager and CostModel, the router a Fleet and a policy: the
code that serves. A simulated rank answers each batch after a Machine's time for it. Engines report as EngineCore does:
at once when an edit begins or ends, otherwise within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.durations import Durations
from benchmarks.simulation.engine import Ranks, SimulatedEngine
from benchmarks.simulation.machine import FrozenCosts
from benchmarks.simulation.scenario import MODEL, Scenario, make_trace, prime_template
from core.config import RouterPolicy, SchedulerConfig
from core.costs.cost_model import CostModel
from core.costs.load_report import LoadReport
from core.messages.engine import EngineRequest, Finished, Output, TemplatePrimed
from core.routing.fleet import Fleet
from core.routing.policies import make_policy
from core.routing.request_shape import RequestShape
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.scheduler import StepScheduler
from engine.engine_core.engine_core import REPORT_SECONDS

MESSAGE_SECONDS = 0.0003  # from the router to an engine, and back

Tell = Callable[[LoadReport, tuple[Output, ...]], None]


class ReportingEngine(SimulatedEngine):
    """An engine that reports as EngineCore does. tell: takes reports and outputs. ranks: see SimulatedEngine."""

    def __init__(
        self, clock: Clock, scheduler: StepScheduler, durations: Durations, tell: Tell, ranks: Ranks | None = None
    ) -> None:
        super().__init__(clock, scheduler, durations, self._report_changes, ranks)
        self._tell = tell
        self._told_counts = (0, 0)
        self._reports = 0  # sent so far: a timer that finds another number is void
        self._has_timer = False

    def report(self, outputs: tuple[Output, ...] = ()) -> None:
        self._reports += 1
        self._has_timer = False
        self._tell(self.scheduler.load_report(), outputs)

    def _report_changes(self, outputs: tuple[Output, ...]) -> None:
        counts = self.scheduler.counts
        if outputs or counts != self._told_counts:
            self._told_counts = counts
            self.report(outputs)
        elif not self._has_timer:
            self._has_timer, number = True, self._reports
            self._clock.after(REPORT_SECONDS, lambda: self._report_late(number))

    def _report_late(self, number: int) -> None:
        if number == self._reports:
            self.report()


def _scheduler(scenario: Scenario, num_ranks: int, policy: SchedulingPolicy | None) -> StepScheduler:
    """Of an engine with so many ranks. policy: a new one; None: the default."""
    config = SchedulerConfig(max_num_seqs=scenario.max_num_seqs)
    cost = CostModel() if scenario.learns else FrozenCosts()
    models = {MODEL.name: MODEL}
    scheduler = StepScheduler(config, models, num_ranks, cache=scenario.cache, cost=cost, policy=policy)
    scheduler.learn(scenario.machine.samples(MODEL.name))
    if isinstance(cost, FrozenCosts):
        cost.is_frozen = True
    return scheduler


@dataclass
class Outcome:
    """Of a trace's counted edits, in order of arrival. latencies: seconds from arrival to the answer. predicted: the
    router's prediction of it, None without one. primed: keyframes computed, loaded: copied up.
    """

    latencies: list[float]
    predicted: list[float | None]
    engines: list[int]
    busy_seconds: list[float]
    primed: int
    loaded: int
    seconds: float


@dataclass
class Cluster:
    """One run: make it, `run` it once. policy: of the router. scheduling: makes the policy of an engine's scheduler;
    None: the default.
    """

    scenario: Scenario
    policy: RouterPolicy
    seed: int
    clock: Clock = field(default_factory=Clock)
    scheduling: Callable[[], SchedulingPolicy] | None = None

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.fleet = Fleet(scenario.num_engines, scenario.max_num_seqs)
        self.engines = [
            ReportingEngine(self.clock, self._make_scheduler(number), scenario.machine, partial(self._tell, index))
            for index, number in enumerate(scenario.engine_ranks)
        ]
        self._policy = make_policy(self.policy)
        self._latencies: dict[int, float] = {}
        self._predicted: dict[int, float | None] = {}
        self._chosen: dict[int, int] = {}
        self._started = 0.0

    def _make_scheduler(self, num_ranks: int) -> StepScheduler:
        return _scheduler(self.scenario, num_ranks, self.scheduling() if self.scheduling else None)

    def run(self) -> Outcome:
        """Run the trace; returns its outcome."""
        self.run_trace()
        return self._outcome()

    def run_trace(self) -> None:
        """Until the last of its edits is done."""
        trace = make_trace(self.scenario, self.seed)
        for engine in self.engines:
            engine.report()
            for template in range(self.scenario.num_templates if self.scenario.is_warm else 0):
                engine.scheduler.add_template(prime_template(template))
                engine.step()
        self.clock.run()
        self._start_counting()
        for edit in trace:
            moved = msgspec.structs.replace(edit, arrival=edit.arrival + self._started)
            self.clock.at(moved.arrival, partial(self._route, moved))
        self.clock.run()

    def note_report(self, engine: int, report: LoadReport) -> None:
        """A report has arrived; for subclasses that record them."""

    def note_sent(self, engine: int, edit: EngineRequest) -> None:
        """An edit was sent; for subclasses that record them."""

    def _start_counting(self) -> None:
        """Priming beforehand does not count."""
        self._started = self.clock.now
        for engine in self.engines:
            engine.clocks.busy_seconds = [0.0] * engine.scheduler.num_workers

    def _route(self, edit: EngineRequest) -> None:
        index, now = int(edit.request_id), self.clock.now
        shape = RequestShape.of_request(edit, MODEL)
        choice = self._policy.choose(shape, self.fleet, now)
        self.fleet.sent(choice.engine, shape, now)
        self.note_sent(choice.engine, edit)
        self._chosen[index], self._predicted[index] = choice
        self.clock.after(MESSAGE_SECONDS, lambda: self.engines[choice.engine].add(edit))

    def _tell(self, engine: int, report: LoadReport, outputs: tuple[Output, ...]) -> None:
        self.clock.after(MESSAGE_SECONDS, lambda: self._hear(engine, report, outputs))

    def _hear(self, engine: int, report: LoadReport, outputs: tuple[Output, ...]) -> None:
        self.note_report(engine, report)
        self.fleet.observe(engine, report, self.clock.now)
        for output in outputs:
            assert isinstance(output, Finished | TemplatePrimed), f"a simulated request ended badly: {output}"
            if isinstance(output, Finished):
                self._latencies[int(output.request_id)] = self.clock.now

    def _outcome(self) -> Outcome:
        scenario, started = self.scenario, self._started
        counted = range(scenario.num_warm_up, scenario.num_warm_up + scenario.num_edits)
        arrivals = make_trace(scenario, self.seed)
        stats = [engine.scheduler.cache.stats() for engine in self.engines]
        return Outcome(
            latencies=[self._latencies[index] - started - arrivals[index].arrival for index in counted],
            predicted=[self._predicted[index] for index in counted],
            engines=[self._chosen[index] for index in counted],
            busy_seconds=[sum(engine.clocks.busy_seconds) for engine in self.engines],
            primed=sum(stat.primed for stat in stats),
            loaded=sum(sum(stat.loads.values()) for stat in stats),
            seconds=self.clock.now - started,
        )
