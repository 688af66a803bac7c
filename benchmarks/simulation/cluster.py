"""Cluster: engines, a router and the time that passes between them, as one queue of events.

Every engine has a StepScheduler with its ActivationCacheManager and CostModel, the router a Fleet and a policy: the
code that serves. A virtual worker answers each batch after a Machine's time for it. Engines report as EngineCore does:
at once when an edit begins or ends, otherwise within a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import count

import msgspec

from benchmarks.simulation.machine import FrozenCosts, Machine
from benchmarks.simulation.scenario import MODEL, Scenario, make_trace, prime_template
from core.config import RouterPolicy, SchedulerConfig
from core.costs.cost_model import CostModel
from core.costs.load_report import LoadReport
from core.graph.op import OPS
from core.handles import TensorKey, TensorRef
from core.messages.engine import EngineRequest, Finished, TemplatePrimed
from core.messages.worker import Batch, BatchResult, Item, ItemResult, PageCopied, PageCopy, StepPlan
from core.routing.fleet import Fleet, RequestShape
from core.routing.policies import make_policy
from core.scheduling.ops.image_encode import ImageEncode
from core.scheduling.outputs import Output
from core.scheduling.scheduler import StepScheduler
from engine.engine_core.engine_core import REPORT_SECONDS

MESSAGE_SECONDS = 0.0003  # from the router to an engine, and back


class Clock:
    """Simulated seconds, and a queue of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()  # of events at one time: as they were made

    def at(self, when: float, event: Callable[[], None]) -> None:
        heappush(self._events, (when, next(self._order), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + seconds, event)

    def run(self) -> None:
        """Run until no event is left."""
        while self._events:
            self.now, _, event = heappop(self._events)
            event()


class VirtualEngine:
    """A scheduler, and a worker that only lets time pass. tell: takes reports and outputs."""

    def __init__(
        self, clock: Clock, scenario: Scenario, machine: Machine, tell: Callable[[LoadReport, tuple[Output, ...]], None]
    ) -> None:
        self.busy_seconds = 0.0
        config = SchedulerConfig(max_num_seqs=scenario.max_num_seqs)
        cost = CostModel() if scenario.learns else FrozenCosts()
        self.scheduler = StepScheduler(config, {MODEL.name: MODEL}, cache=scenario.cache, cost=cost)
        self.scheduler.learn(machine.samples(MODEL.name))
        if isinstance(cost, FrozenCosts):
            cost.freeze()
        self._clock = clock
        self._machine = machine
        self._tell = tell
        self._edits: dict[str, EngineRequest] = {}
        self._told_counts = (0, 0)
        self._link_free: dict[str, float] = {"device": 0.0, "host": 0.0}  # by target: each way has its own link
        self._reports = 0  # sent so far: a timer that finds another number is void
        self._has_timer = False

    def prime(self, template: int) -> None:
        self.scheduler.add_template(prime_template(template))
        self._step()

    def receive(self, edit: EngineRequest) -> None:
        self._edits[edit.request_id] = edit
        self.scheduler.add(edit)
        self._step()

    def report(self, outputs: tuple[Output, ...] = ()) -> None:
        self._reports += 1
        self._has_timer = False
        self._tell(self.scheduler.load_report(), outputs)

    def _step(self) -> None:
        """What EngineCore does after each message."""
        plan = self.scheduler.schedule(self._clock.now)
        outputs, counts = self.scheduler.take_outputs(), self.scheduler.counts
        if plan is not None:
            self._run(plan)
        for output in outputs:
            self._edits.pop(output.request_id, None)
        if outputs or counts != self._told_counts:
            self._told_counts = counts
            self.report(outputs)
        elif not self._has_timer:
            self._has_timer, number = True, self._reports
            self._clock.after(REPORT_SECONDS, lambda: self._report_late(number))

    def _report_late(self, number: int) -> None:
        if number == self._reports:
            self.report()

    def _run(self, plan: StepPlan) -> None:
        end = self._clock.now
        for copy in plan.copies:
            self._copy(copy)
        for batch in plan.batches:
            start, seconds = end, self._machine.batch_seconds(batch, self._edits)
            end += seconds
            self.busy_seconds += seconds
            result = BatchResult(batch.id, batch.ranks[0], start, seconds, item_results(batch))
            self._clock.at(end, lambda result=result: self._finish(result))  # type: ignore[misc]

    def _finish(self, result: BatchResult) -> None:
        self.scheduler.apply(result)
        self._step()

    def _copy(self, copy: PageCopy) -> None:
        """Copies queue up, and run beside whatever is computed."""
        seconds = self._machine.copy_seconds(copy)
        end = max(self._clock.now, self._link_free[copy.target]) + seconds
        self._link_free[copy.target] = end
        done = PageCopied(0, copy.key, copy.nbytes, copy.source, copy.target, True, seconds)
        self._clock.at(end, lambda: self._finish_copy(done))

    def _finish_copy(self, done: PageCopied) -> None:
        self.scheduler.apply_copy(done)
        self._step()


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
    """One run: make it, `run` it once."""

    scenario: Scenario
    policy: RouterPolicy
    seed: int
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.fleet = Fleet(scenario.num_engines, scenario.max_num_seqs)
        self.engines = [self._engine(index) for index in range(scenario.num_engines)]
        self._policy = make_policy(self.policy)
        self._latencies: dict[int, float] = {}
        self._predicted: dict[int, float | None] = {}
        self._chosen: dict[int, int] = {}
        self._started = 0.0

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
                engine.prime(template)
        self.clock.run()
        self._start_counting()
        for edit in trace:
            moved = msgspec.structs.replace(edit, arrival=edit.arrival + self._started)
            self.clock.at(moved.arrival, lambda edit=moved: self._route(edit))  # type: ignore[misc]
        self.clock.run()

    def note_report(self, engine: int, report: LoadReport) -> None:
        """A report has arrived; for subclasses that record them."""

    def note_sent(self, engine: int, edit: EngineRequest) -> None:
        """An edit was sent; for subclasses that record them."""

    def _engine(self, index: int) -> VirtualEngine:
        return VirtualEngine(
            self.clock, self.scenario, self.scenario.machine, lambda report, outputs: self._tell(index, report, outputs)
        )

    def _start_counting(self) -> None:
        """Priming beforehand does not count."""
        self._started = self.clock.now
        for engine in self.engines:
            engine.busy_seconds = 0.0

    def _route(self, edit: EngineRequest) -> None:
        index, now = int(edit.request_id), self.clock.now
        shape = RequestShape.of_request(edit, MODEL)
        choice = self._policy.choose(shape, self.fleet, now)
        self.fleet.sent(choice.engine, shape, now)
        self.note_sent(choice.engine, edit)
        self._chosen[index], self._predicted[index] = choice
        self.clock.after(MESSAGE_SECONDS, lambda: self.engines[choice.engine].receive(edit))

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
            busy_seconds=[engine.busy_seconds for engine in self.engines],
            primed=sum(stat.primed for stat in stats),
            loaded=sum(sum(stat.loads.values()) for stat in stats),
            seconds=self.clock.now - started,
        )


def item_results(batch: Batch) -> tuple[ItemResult, ...]:
    """A worker's results of a batch. No simulated request has previews, and no simulated sampler a state."""
    names = [port.name for port in OPS[batch.op].outputs if not port.is_optional]
    return tuple(_item_result(item, names) for item in batch.items)


def _item_result(item: Item, names: Sequence[str]) -> ItemResult:
    made = tuple(TensorRef(TensorKey(item.request_id, item.node, name, item.version), 0) for name in names)
    num_levels = item.work.num_inference_steps if isinstance(item.work, ImageEncode) else 0
    return ItemResult(item.request_id, item.node, made, sigmas=_sigmas(num_levels))


@cache
def _sigmas(num_steps: int) -> tuple[float, ...]:
    """Noise levels of a run: evenly from 1 to 0."""
    return tuple(1.0 - step / num_steps for step in range(num_steps + 1)) if num_steps else ()
