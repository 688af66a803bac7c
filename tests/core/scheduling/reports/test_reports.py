"""Load reports: the router's copy of a queue is the queue, and a report does not grow with the number that wait."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from random import Random
from types import FrameType

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, make_edit

from benchmarks.simulation.machine import FrozenCosts
from core.config import SchedulerConfig
from core.costs.load_report import LoadReport, RequestLoad
from core.failure import Failure
from core.graph.work import Work
from core.handles import ModelKey
from core.messages.codec import MessageDecoder, encode
from core.messages.engine import EngineOutputs, FromEngine
from core.messages.worker import BatchResult, CostSample
from core.routing.engine_queue import EngineQueue
from core.scheduling.scheduler import StepScheduler

MAX_NUM_SEQS = 3
DECODER: MessageDecoder[FromEngine] = MessageDecoder(FromEngine)

SAMPLES = [
    CostSample("m", op, Work.of([tokens] * number), 0.01 + 0.001 * number + tokens * number * 1e-5)
    for op in ("text_encode", "image_encode", "denoise", "decode")
    for tokens in (50, 300, 900)
    for number in (1, 2, 4)
]


def make_scheduler(num_workers: int = 1, *, is_taught: bool = True) -> StepScheduler:
    """A scheduler whose predictions do not change, or one that can predict nothing before it has seen results."""
    cost = FrozenCosts()
    config = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_plans_in_flight=2, max_ahead_ms=1e9)
    scheduler = StepScheduler(config, {"m": MODEL}, num_workers, cost=cost)
    if is_taught:
        scheduler.learn(SAMPLES)
        cost.is_frozen = True
    return scheduler


def sent(scheduler: StepScheduler) -> LoadReport:
    """Its next report, as the router receives it."""
    message = DECODER.decode(encode(EngineOutputs(outputs=(), load=scheduler.load_report())))
    assert isinstance(message, EngineOutputs)
    return message.load


def all_loads(scheduler: StepScheduler, known: Mapping[str, RequestLoad] | None = None) -> list[RequestLoad]:
    """What a report of the whole queue would contain: the live requests, most urgent first. known: the loads of some,
    predicted before.
    """
    known = known or {}
    return [
        known.get(request.id) or scheduler._predictor.remaining_load(request) for request in scheduler._requests.live()
    ]


def drain_seconds(loads: list[RequestLoad], base_seconds: float) -> float:
    """On two ranks."""
    base, num_busy = base_seconds / min(MAX_NUM_SEQS, max(1, len(loads))), max(1, min(2, len(loads)))
    extra = sum(load.steps_left * load.step_seconds + load.other_seconds for load in loads)
    return extra / num_busy + base * sum(load.steps_left for load in loads)


def op_seconds(scheduler: StepScheduler) -> dict[str, float]:
    live = list(scheduler._requests.live())
    left: defaultdict[str, float] = defaultdict(float)
    for request in live:
        base = scheduler._predictor.base_seconds([request]) / min(MAX_NUM_SEQS, len(live))
        left["denoise"] += scheduler._predictor.remaining_step_seconds(request) + request.progress.steps_left * base
        for op, seconds in scheduler._predictor.other_seconds_by_op(request):
            left[op] += seconds
    return {op: seconds for op, seconds in left.items() if seconds}


class Pair:
    """An engine to which things happen at random, and its router's copy of the queue."""

    def __init__(self, seed: int, *, is_taught: bool) -> None:
        self.random = Random(seed)
        self.is_taught = is_taught
        self.copy = EngineQueue()
        self.num_added = 0
        self.seen: Counter[str] = Counter()  # what the reports contained
        self._start()

    def run(self, num_events: int) -> None:
        weights = {self.add: 12, self.abort: 5, self.fail: 3, self.schedule: 25, self.work: 30, self.report: 20}
        events = self.random.choices(
            [*weights, self.tell_statistics, self.restart, self.lose_rank], [*weights.values(), 4, 1, 2], k=num_events
        )
        for event in events:
            event()
            self.scheduler.check_integrity()

    def add(self) -> None:
        draw, priority = self.random, self.random.choice((-1, 0, 0, 0, 1))
        deadline, owner = draw.choice((None, None, draw.uniform(1, 200))), draw.choice(("", "a", "a", "b"))
        arrival, steps = draw.uniform(0, 20), draw.randint(1, 6)
        for _ in range(draw.randint(1, 4)):
            name = f"r{self.num_added}"
            self.num_added += 1
            self.added.append(name)
            edit = make_edit(name, steps=steps, priority=priority, arrival=arrival, deadline=deadline, owner=owner)
            self.scheduler.add(edit)

    def abort(self) -> None:
        self.scheduler.abort([self._any_added()])

    def fail(self) -> None:
        self.workers.fail.add(self._any_added())

    def schedule(self) -> None:
        plan = self.scheduler.schedule(now=self.random.uniform(0, 60))
        if plan is not None:
            self.workers.submit(plan)

    def work(self) -> None:
        for result in self.workers.run_one(self.random.randrange(2)):
            if isinstance(result, BatchResult):
                self.scheduler.apply(result)
            else:
                self.scheduler.apply_transfer(result)

    def restart(self) -> None:
        """The new process reports before it gets a request; the router need not know that the old one has died."""
        self._start()
        self.copy.update(sent(self.scheduler))
        assert not self.copy.loads()

    def lose_rank(self) -> None:
        """A worker dies, and is restarted. What it ran may be sent back to the queue."""
        rank = self.random.randrange(2)
        self.workers.lose(rank)
        self.scheduler.lose_rank(rank, Failure("engine_dead", "it died"))
        self.scheduler.check_integrity()
        self.workers.join(rank)
        self.scheduler.join_rank(rank, ())

    def report(self) -> None:
        report = sent(self.scheduler)
        # While it learns, a running request's prediction is as old as what it last did.
        loads = all_loads(self.scheduler, None if self.is_taught else report.running)
        self.copy.update(report)
        assert list(self.copy.loads()) == loads
        assert len(self.copy) == len(loads)
        assert self.copy.step_seconds == pytest.approx(sum(load.step_seconds for load in loads))
        number = self.random.randint(0, len(loads))
        first, rest = self.copy.split(number)
        steps, seconds = rest or (0, 0.0)
        assert list(first) == loads[:number]
        assert steps == sum(load.steps_left for load in loads[number:])
        assert seconds == pytest.approx(sum(load.seconds for load in loads[number:]), abs=1e-9)
        if self.is_taught:
            assert report.drain_seconds == pytest.approx(drain_seconds(loads, report.base_seconds))
        self.seen.update(type(change).__name__ for change in report.queue)
        self.seen["both, of several owners"] += (
            0 < len(report.running) < len(loads) and len({load.owner for load in loads}) > 1
        )

    def tell_statistics(self) -> None:
        told = self.scheduler.stats().op_seconds
        if self.is_taught:
            assert told == pytest.approx(op_seconds(self.scheduler), abs=1e-9)

    def _start(self) -> None:
        self.scheduler = make_scheduler(2, is_taught=self.is_taught)
        self.workers, self.added = FakeWorkers(num_ranks=2), ["none"]

    def _any_added(self) -> str:
        return self.random.choice(self.added[-12:])


@pytest.mark.parametrize("is_taught", [True, False])
def test_the_routers_copy_equals_the_queue_whatever_happens(is_taught: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(25):
        pair = Pair(seed, is_taught=is_taught)
        pair.run(200)
        seen += pair.seen
    assert min(seen[kind] for kind in ("Queued", "Begun", "Dequeued", "both, of several owners")) > 50


def busy(num_waiting: int) -> StepScheduler:
    """A scheduler with full slots and this many waiting requests, which has reported them."""
    scheduler, workers = make_scheduler(), FakeWorkers()
    for index in range(MAX_NUM_SEQS + num_waiting):
        scheduler.add(make_edit(f"r{index:05}", steps=50, arrival=float(index), owner=f"o{index % 3}"))
    scheduler.load_report(), scheduler.stats()
    for _ in range(3):
        plan = scheduler.schedule(1e4)
        assert plan is not None
        workers.submit(plan)
        for result in workers.run_one(0):
            assert isinstance(result, BatchResult)
            scheduler.apply(result)
    assert scheduler.counts == (MAX_NUM_SEQS, num_waiting)
    return scheduler


def num_calls(function: Callable[[], object]) -> int:
    """Calls of functions during a call, with those of built-in ones."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_a_report_does_not_grow_with_the_queue() -> None:
    few, many = (busy(number).load_report() for number in (20, 2000))
    sizes = [len(encode(EngineOutputs(outputs=(), load=report))) for report in (few, many)]
    assert sizes[1] <= sizes[0] + 50, "numbers may be longer"
    assert len(many.running) == MAX_NUM_SEQS
    assert many.num_waiting == 2000


@pytest.mark.parametrize("what", ["load_report", "stats"])
def test_neither_a_report_nor_statistics_cost_by_the_length_of_the_queue(what: str) -> None:
    few, many = (num_calls(getattr(busy(number), what)) for number in (20, 2000))
    assert many <= 1.2 * few


def test_the_first_report_contains_all_that_came_before_it() -> None:
    scheduler, copy = make_scheduler(), EngineQueue()
    for name in "abc":
        scheduler.add(make_edit(name))
    scheduler.abort(["b"])
    report = sent(scheduler)
    copy.update(report)
    assert report.is_first
    assert len(copy) == 2
    assert not sent(scheduler).is_first


def test_a_copy_that_has_missed_a_report_is_right_again_when_the_engine_is_idle() -> None:
    scheduler, copy = make_scheduler(), EngineQueue()
    copy.update(sent(scheduler))
    scheduler.add(make_edit("a"))
    copy.update(sent(scheduler))
    scheduler.abort(["a"])
    scheduler.add(make_edit("b"))
    sent(scheduler)  # does not arrive
    scheduler.abort(["b"])
    copy.update(sent(scheduler))
    assert not copy
    scheduler.add(make_edit("c"))
    copy.update(sent(scheduler))
    assert list(copy.loads()) == all_loads(scheduler)


def test_the_costs_of_shared_components_are_reported_for_every_model() -> None:
    vae, own, other = (
        ModelKey(content, kind) for content, kind in (("0", "vae"), ("1", "transformer"), ("2", "transformer"))
    )
    infos = {
        "m": msgspec.structs.replace(MODEL, components=(vae, own)),
        "twin": msgspec.structs.replace(MODEL, name="twin", components=(vae, other)),
        "other family": msgspec.structs.replace(MODEL, name="other family", family="sd3", components=(vae,)),
    }
    scheduler = StepScheduler(SchedulerConfig(), infos)
    scheduler.learn([CostSample("twin", "decode", Work.of([300]), 0.5)])
    scheduler.learn([CostSample("twin", "denoise", Work.of([300]), 0.25)])
    costs = scheduler.load_report().costs
    assert costs is not None
    assert [(line.model, line.op) for line in costs.lines] == [("m", "decode"), ("twin", "decode"), ("twin", "denoise")]
    assert scheduler.cost.predict(scheduler.cost_key("m", "decode"), Work.of([300])) == pytest.approx(0.5)
    assert scheduler.cost.predict(scheduler.cost_key("other family", "decode"), Work.of([300])) == 0


def test_the_rank_of_an_edits_steps_is_reported_until_it_ends_or_the_rank_dies() -> None:
    scheduler = make_scheduler(2)
    workers = FakeWorkers(2)
    assert sent(scheduler).lanes == (0, 1)
    for name in ("a", "b"):
        scheduler.add(make_edit(name, steps=3))
    seen = dict[str, list[tuple[int, ...]]]()
    while scheduler.counts != (0, 0):
        plan = scheduler.schedule(0.0)
        if plan is not None:
            workers.submit(plan)
        for rank in (0, 1):
            for result in workers.run_one(rank):
                (scheduler.apply if isinstance(result, BatchResult) else scheduler.apply_transfer)(result)  # type: ignore[arg-type]
                for name, load in sent(scheduler).running.items():
                    seen.setdefault(name, []).append(load.ranks)
    assert [set(seen[name]) for name in ("a", "b")] in ([{(), (0,)}, {(), (1,)}], [{(), (1,)}, {(), (0,)}])
    assert all(ranks == sorted(ranks) for ranks in seen.values()), "they are known from the first step on"
    assert not sent(scheduler).running
    scheduler.lose_rank(0, Failure("engine_dead", "it died"), 0.0)
    assert sent(scheduler).lanes == (1,)
