"""Requests that cannot finish in time are dropped, and none joins a batch if that makes others late."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, apply, make_edit

from benchmarks.simulation.machine import FrozenCosts
from core.config import SchedulerConfig
from core.graph.work import Work
from core.messages.engine import EngineRequest, Failed, Finished, Output
from core.scheduling.scheduler import StepScheduler

STEP, TOKENS = 0.1, 280
"""Seconds that a request adds to a step of nothing else, and its tokens."""


@dataclass
class Engine:
    """A scheduler that knows its costs, and a clock that advances by the time of each batch."""

    scheduler: StepScheduler
    workers: FakeWorkers
    now: float = 0.0

    def run(self, until: float = 1e9) -> dict[str, Output]:
        """Request id -> terminal output of the requests that have ended by then."""
        outputs: dict[str, Output] = {}
        while self.scheduler.num_requests and self.now < until:
            plan = self.scheduler.schedule(self.now)
            outputs |= {output.request_id: output for output in self.scheduler.take_outputs()}
            if plan is None:
                continue
            self.workers.submit(plan)
            sizes = [len(batch.items) for batch in plan.batches if batch.op == "denoise"]
            self.now += STEP * sum(sizes)
            for result in self.workers.run_one(0):
                apply(self.scheduler, result)
            self.scheduler.check_integrity()
            outputs |= {output.request_id: output for output in self.scheduler.take_outputs()}
        return outputs


@pytest.fixture
def engine() -> Engine:
    cost = FrozenCosts()
    scheduler = StepScheduler(SchedulerConfig(max_num_seqs=2), {"m": MODEL}, cost=cost)
    key = scheduler.cost_key("m", "denoise")
    for number in (1, 2, 3, 4, 1, 2, 3, 4):
        scheduler.cost.observe(key, Work.of([TOKENS] * number), number * STEP)
    cost.is_frozen = True  # these workers take no time of their own
    return Engine(scheduler, FakeWorkers())


def edit(name: str, *, objective: float | None = None, deadline: float | None = None, steps: int = 10) -> EngineRequest:
    made = make_edit(name, steps=steps, deadline=deadline, arrival=0.0)
    return msgspec.structs.replace(made, objective=objective)


def kind(output: Output) -> str:
    return output.failure.kind if isinstance(output, Failed) else type(output).__name__


def test_a_waiting_request_that_cannot_make_it_gives_way_to_one_that_can(engine: Engine) -> None:
    """Two at a time take 2 s; the waiting ones have until 2.5 s, or 3.5 s."""
    for name, objective in (("a", 2.1), ("b", 2.2), ("hopeless", 2.5), ("can", 3.5)):
        engine.scheduler.add(edit(name, objective=objective))
    outputs = engine.run()
    assert {name: kind(output) for name, output in outputs.items()} == {
        "a": "Finished",
        "b": "Finished",
        "hopeless": "overloaded",
        "can": "Finished",
    }
    assert engine.now == pytest.approx(3.0), "no step was made for it"


def test_a_running_request_is_finished_though_it_misses_the_objective(engine: Engine) -> None:
    engine.scheduler.add(edit("a", objective=1.1))
    engine.run(until=0.5)
    engine.now += 5.0
    assert isinstance(engine.run()["a"], Finished)


def test_a_running_request_is_dropped_when_its_timeout_is_sure_to_pass(engine: Engine) -> None:
    engine.scheduler.add(edit("a", deadline=2.0))
    engine.run(until=0.15)
    engine.now += 1.0
    engine.run(until=1.3)
    assert engine.scheduler.num_requests == 1, "0.8 s are left for 0.8 s of work: not sure"
    engine.now += 0.5
    output = engine.run()["a"]
    assert kind(output) == "deadline_exceeded"
    assert engine.now <= 2.0, "not after it has passed"


def test_a_request_that_can_make_its_timeout_goes_before_one_that_has_none(engine: Engine) -> None:
    engine.scheduler.add(edit("running", steps=40))
    engine.run(until=0.2)
    engine.scheduler.add(edit("urgent", deadline=1.5))
    outputs = engine.run(until=1.5)
    assert kind(outputs["urgent"]) == "Finished", "beside the other it would take 2 s"
    engine.scheduler.add(edit("hopeless", deadline=engine.now + 0.6))
    outputs = engine.run(until=engine.now + 0.2)
    assert kind(outputs["hopeless"]) == "deadline_exceeded", "alone it takes 1 s"


def test_a_waiting_request_is_not_dropped_on_a_doubtful_prediction_while_none_runs(engine: Engine) -> None:
    """Each takes 1 s alone."""
    engine.scheduler.add(edit("objective", objective=0.95))
    assert isinstance(engine.run()["objective"], Finished), "it is late, but dropping it would help no other"
    start = engine.now
    engine.scheduler.add(edit("doubtful", deadline=start + 0.95))
    assert engine.run(until=start + 0.5) == {}, "it might make it"
    engine.run()
    start = engine.now
    engine.scheduler.add(edit("hopeless", deadline=start + 0.6))
    assert kind(engine.run()["hopeless"]) == "deadline_exceeded"
    assert engine.now == start, "no step was made for it"


def test_a_dropped_request_delays_no_other(engine: Engine) -> None:
    for name in "ab":
        engine.scheduler.add(edit(name, deadline=9.0, steps=40))
    engine.run(until=0.5)
    engine.now = 7.0
    engine.scheduler.add(edit("timeout", deadline=9.5))
    engine.scheduler.add(edit("objective", objective=9.5))
    outputs = {name: kind(output) for name, output in engine.run().items()}
    assert outputs == {
        "a": "deadline_exceeded",
        "b": "deadline_exceeded",
        "timeout": "Finished",
        "objective": "Finished",
    }


def test_a_newcomer_waits_while_it_would_make_others_late(engine: Engine) -> None:
    engine.scheduler.add(edit("a", objective=1.2))
    engine.run(until=0.15)
    engine.scheduler.add(edit("b"))
    outputs = engine.run()
    assert isinstance(outputs["b"], Finished)
    finished = outputs["a"]
    assert isinstance(finished, Finished)
    assert engine.now == pytest.approx(2.0)


def test_a_higher_class_overtakes_for_a_minute_and_a_lower_one_does_not_starve() -> None:
    scheduler, workers = StepScheduler(SchedulerConfig(max_num_seqs=1), {"m": MODEL}), FakeWorkers()
    scheduler.add(make_edit("low", steps=1, priority=1, arrival=0.0))
    for second in range(0, 400, 10):
        scheduler.add(make_edit(f"high-{second}", steps=1, priority=0, arrival=float(second)))
    ended = list(Engine(scheduler, workers).run())
    assert ended.index("high-110") < ended.index("low") < ended.index("high-130"), "a class is worth two minutes"
    others = [int(name.removeprefix("high-")) for name in ended if name != "low"]
    assert others == sorted(others), "within a class, as they came"
