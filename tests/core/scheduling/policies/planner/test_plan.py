"""The policies default and neustream: what they serve, what they give up, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import pytest
from fakes import MODEL, make_edit
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.durations import Latencies, TableDurations
from benchmarks.simulation.engine import Ranks, SimulatedEngine
from benchmarks.simulation.machine import FrozenCosts
from core.config import OnLate, SchedulerConfig, SchedulingPolicyName
from core.costs.latency_table import LatencyTable
from core.costs.profile import Profile
from core.graph.work import Work
from core.messages.engine import EngineRequest, Failed, Finished, Output
from core.messages.worker import Batch, ItemResult
from core.scheduling.policies.planner.plan import Plan, Planner
from core.scheduling.reports.slowness import MOST
from core.scheduling.requests.request import SUSPECT_DEATHS, Request
from core.scheduling.scheduler import StepScheduler

TOKENS = 280
LATENCIES = {1: 1.0, 2: 1.2, 3: 1.4, 4: 1.6}
"""Requests in a step -> seconds; encoding takes none, and decoding by default."""


@dataclass
class Engine(Ranks):
    """A simulated engine of one rank that knows these latencies."""

    policy: SchedulingPolicyName
    on_late: OnLate = "drop"
    latencies: dict[int, float] = field(default_factory=lambda: LATENCIES)
    trip: float = 0.0
    decode: float = 0.0  # seconds of each
    max_plans: int = 1  # that a rank has at a time

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            policy=self.policy, on_late=self.on_late, max_num_seqs=8, max_plans_in_flight=self.max_plans
        )
        cost = FrozenCosts()
        self.scheduler = StepScheduler(config, {"m": MODEL}, cost=cost)
        cost.is_frozen = True
        table = LatencyTable([(number, TOKENS, seconds) for number, seconds in self.latencies.items()])
        cost.add_profile(self.scheduler.cost_key("m", "denoise"), Profile(table))
        if self.decode:
            decodes = LatencyTable([(number, size, number * self.decode) for number in (1, 8) for size in (1, TOKENS)])
            cost.add_profile(self.scheduler.cost_key("m", "decode"), Profile(decodes))
        of_steps = {("denoise", 1): {float(number): seconds for number, seconds in self.latencies.items()}}
        others = {(op, 1): {1.0: 0.0} for op in ("text_encode", "image_encode")} | {("decode", 1): {1.0: self.decode}}
        self.clock, self.sizes, self.ends = Clock(), list[int](), dict[str, float]()
        self.ops = list[str]()  # of batches
        self.outputs: dict[str, Output] = {}
        durations = TableDurations(Latencies(of_steps | others), trip=self.trip)
        self.engine = SimulatedEngine(self.clock, self.scheduler, durations, self._note, self)

    def run(self, batch: Batch, rank: int) -> tuple[ItemResult, ...]:
        self.ops.append(batch.op)
        if batch.op == "denoise":
            self.sizes.append(len(batch.items))
        return super().run(batch, rank)

    def _note(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            assert output.request_id not in self.outputs, "a second terminal output"
            self.outputs[output.request_id] = output
            self.ends[output.request_id] = self.clock.now

    def serve(self, arrivals: Sequence[EngineRequest]) -> dict[str, Output]:
        """Request id -> terminal output in the order of the ends, after all have come and ended."""
        for request in arrivals:
            self.clock.at(request.arrival, lambda request=request: self.engine.add(request))  # type: ignore[misc]
        self.clock.run()
        self.scheduler.check_integrity()
        assert not self.scheduler.num_requests
        return self.outputs


def edit(name: str, steps: int, objective: float | None, arrival: float = 0.0, **fields: Any) -> EngineRequest:
    """objective: seconds after the arrival."""
    made = make_edit(name, steps=steps, arrival=arrival, **fields)
    return msgspec.structs.replace(made, objective=None if objective is None else arrival + objective)


def kinds(outputs: dict[str, Output]) -> dict[str, str]:
    return {
        name: each.failure.kind if isinstance(each, Failed) else type(each).__name__ for name, each in outputs.items()
    }


def test_a_batch_grows_as_long_as_all_of_it_stay_in_time() -> None:
    """Three together take 14 s, after a step of the first one alone; four would take 16 s."""
    engine = Engine("default")
    outputs = engine.serve([edit(str(index), 10, 15.5) for index in range(4)])
    assert sorted(kinds(outputs).values()) == ["Finished"] * 3 + ["overloaded"]
    assert max(engine.sizes) == 3


def test_requests_run_one_by_one_where_batches_gain_nothing() -> None:
    engine = Engine("default", latencies={1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    outputs = engine.serve([edit(str(index), 5, 5.5 * (index + 1)) for index in range(3)])
    assert set(kinds(outputs).values()) == {"Finished"}
    assert max(engine.sizes) < 3, "three at a time would all be done after 15 s"
    assert max(engine.ends.values()) == pytest.approx(15.0)


def test_a_slot_that_is_left_goes_to_the_next_in_line_without_a_new_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests of five steps and a decoding, one after the other: the last step is sent half a second before it
    begins, and the next request has its first one right after.
    """
    plans, make = list[float](), Planner.plan

    def plan(self: Planner, requests: Sequence[Request]) -> Plan:
        plans.append(self.now)
        return make(self, requests)

    monkeypatch.setattr(Planner, "plan", plan)
    engine = Engine("default", latencies={1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, decode=0.5)
    engine.serve([edit(str(index), 5, 100.0) for index in range(3)])
    assert sorted(engine.ends.values()) == pytest.approx([5.5, 11.0, 16.5])
    assert set(plans) == {0.0, 5.5}, "when they come, and when one ends while another waits"


def test_a_hopeless_request_leaves_early_unless_it_is_alone() -> None:
    engine = Engine("default")
    assert kinds(engine.serve([edit("hopeless", 10, 5.0)])) == {"hopeless": "Finished"}
    engine = Engine("default")
    requests = [edit("hopeless", 10, 5.0), edit("in time", 2, 5.0)]
    assert kinds(engine.serve(requests)) == {"hopeless": "overloaded", "in time": "Finished"}
    assert len(engine.sizes) == 2, "no step was made for it"


def test_a_request_that_is_doubtful_alone_is_served_while_no_other_needs_the_rank() -> None:
    engine = Engine("default")
    assert kinds(engine.serve([edit("doubtful", 10, 9.5)])) == {"doubtful": "Finished"}


def test_a_request_that_has_begun_leaves_when_it_is_late_and_another_is_in_time() -> None:
    engine = Engine("default")
    outputs = engine.serve([edit("doubtful", 10, None, deadline=9.5), edit("in time", 4, 6.0, arrival=2.0)])
    assert kinds(outputs) == {"doubtful": "deadline_exceeded", "in time": "Finished"}
    assert engine.ends["doubtful"] == 2.0


def test_a_decode_waits_for_nothing_that_was_sent_ahead() -> None:
    """The second request has made three steps when the first one begins, which is due sooner."""
    engine = Engine("default", latencies={1: 0.008, 2: 0.016}, decode=0.02, max_plans=2)
    engine.serve([edit("second", 9, 1.0), edit("first", 3, 0.07, arrival=0.012)])
    assert engine.ends["first"] == pytest.approx(3 * 0.008 + 3 * 0.008 + 0.02)


def test_of_requests_that_are_all_late_one_is_tried() -> None:
    engine = Engine("default")
    outputs = engine.serve([edit("first", 10, 9.5), edit("second", 10, 9.6)])
    assert kinds(outputs) == {"first": "Finished", "second": "overloaded"}
    assert engine.ends["second"] == 0.0


def test_one_without_a_due_time_is_no_reason_to_give_up_others() -> None:
    """Admission gives none to an edit that could not meet the objective. A newcomer that an idle server would try is
    tried beside it, also if that makes it wait.
    """
    engine = Engine("default")
    outputs = engine.serve([edit("large", 30, None), edit("doubtful", 10, 9.5, arrival=2.5)])
    assert kinds(outputs) == {"large": "Finished", "doubtful": "Finished"}
    assert engine.ends == pytest.approx({"doubtful": 13.0, "large": 40.0})


def test_one_without_a_due_time_does_not_end_one_that_has_begun() -> None:
    engine = Engine("default")
    outputs = engine.serve([edit("doubtful", 10, 9.5), edit("large", 30, None, arrival=2.5)])
    assert kinds(outputs) == {"doubtful": "Finished", "large": "Finished"}
    assert engine.ends["doubtful"] == pytest.approx(10.0)


def test_a_newcomer_that_can_be_in_time_goes_before_one_without_a_due_time() -> None:
    engine = Engine("default")
    outputs = engine.serve([edit("large", 30, None), edit("in time", 10, 11.0, arrival=2.5)])
    assert kinds(outputs) == {"large": "Finished", "in time": "Finished"}
    assert engine.ends["in time"] <= 13.5


def test_one_that_is_tried_goes_after_a_patient_one() -> None:
    engine = Engine("default", latencies={number: float(number) for number in range(1, 9)})
    outputs = engine.serve([edit("large", 80, None), edit("doubtful", 10, 9.5, arrival=70.5)])
    assert kinds(outputs)["large"] == "Finished"
    assert engine.ends["large"] == pytest.approx(80.0)


def test_one_that_has_begun_is_tried_before_others() -> None:
    engine = Engine("default")
    newcomer = edit("newcomer", 10, None, arrival=2.0, deadline=11.5, priority=-1)
    outputs = engine.serve([edit("begun", 10, None, deadline=9.5), newcomer])
    assert kinds(outputs)["newcomer"] == "deadline_exceeded"
    assert engine.ends["newcomer"] == 2.0
    assert engine.ends["begun"] > 9.0


def test_one_that_is_certain_to_be_late_is_not_the_one_that_is_tried() -> None:
    """The first may go on, as no other is in time; after nine steps there is no doubt any more that it is late."""
    engine = Engine("default")
    outputs = engine.serve([edit("late", 10, 9.5), edit("doubtful", 10, 9.5, arrival=9.0)])
    assert kinds(outputs) == {"late": "Finished", "doubtful": "Finished"}


def test_late_requests_are_served_last_if_the_server_says_so() -> None:
    engine = Engine("default", on_late="last")
    outputs = engine.serve([edit("late", 10, 2.0), edit("in time", 4, 6.0)])
    assert set(kinds(outputs).values()) == {"Finished"}
    assert list(outputs) == ["in time", "late"]
    assert engine.sizes[:4] == [1] * 4, "it does not slow the other down"


def test_late_requests_that_run_last_share_steps_for_those_to_come() -> None:
    """One by one they would be done after 4 and 8 s; those that are dropped when they are late need no throughput."""
    engine = Engine("default", on_late="last", latencies={1: 1.0, 2: 1.6})
    engine.serve([edit("first", 4, 1.0), edit("second", 4, 1.0)])
    assert engine.sizes == [1, 2, 2, 2, 1], "the first begins before the second is there"


def test_a_late_request_ends_when_its_timeout_has_passed() -> None:
    engine = Engine("default", on_late="last")
    assert kinds(engine.serve([edit("late", 10, None, deadline=5.0)])) == {"late": "deadline_exceeded"}


def test_of_requests_that_cannot_all_be_in_time_those_with_least_work_are() -> None:
    long, short = edit("long", 12, 13.0), [edit(str(index), 4, 13.0) for index in range(3)]
    engine = Engine("default", latencies={number: float(number) for number in range(1, 9)})
    outputs = kinds(engine.serve([long, *short]))
    assert outputs == {"long": "overloaded", "0": "Finished", "1": "Finished", "2": "Finished"}


@pytest.mark.parametrize("policy", ["default", "neustream"])
def test_requests_without_an_objective_are_served_under_a_stream_of_others(policy: SchedulingPolicyName) -> None:
    """Others come all the time for five minutes, as many as the rank can do."""
    engine = Engine(policy, latencies={number: float(number) for number in range(1, 9)})
    others = [edit(f"other {index}", 5, 8.0, arrival=5.0 * index) for index in range(60)]
    outputs = engine.serve([*others, edit("patient", 5, None)])
    assert isinstance(outputs["patient"], Finished)
    assert list(outputs).index("patient") < 50


def test_late_requests_that_run_last_do_not_starve() -> None:
    engine = Engine("default", on_late="last", latencies={number: float(number) for number in range(1, 9)})
    others = [edit(f"other {index}", 5, 8.0, arrival=5.0 * index) for index in range(60)]
    outputs = engine.serve([*others, edit("late", 5, 1.0)])
    assert isinstance(outputs["late"], Finished)
    assert list(outputs).index("late") < 50


@pytest.mark.parametrize("policy", ["default", "neustream"])
@given(
    drawn=st.lists(st.tuples(st.integers(1, 12), st.floats(0.5, 40.0) | st.none(), st.floats(0, 60)), max_size=25),
    on_late=st.sampled_from(["drop", "last"]),
)
def test_every_request_ends_once(policy: SchedulingPolicyName, drawn: list[Any], on_late: OnLate) -> None:
    engine = Engine(policy, on_late, latencies={number: 0.5 + 0.5 * number for number in range(1, 9)})
    requests = [edit(str(index), *values) for index, values in enumerate(drawn)]
    outputs = engine.serve(requests)
    assert sorted(outputs, key=int) == [request.request_id for request in requests]
    if on_late == "last":
        assert all(isinstance(output, Finished) for output in outputs.values())


def test_neustream_limits_a_batch_by_its_share_of_the_objective_and_serves_in_order_of_arrival() -> None:
    """An objective of 1.5 times the time alone: a step may take 0.95 * 1.5 s, which three do."""
    engine = Engine("neustream")
    outputs = engine.serve([edit(str(index), 10, 15.0) for index in range(4)])
    assert max(engine.sizes) == 3
    assert kinds(outputs) == {"0": "Finished", "1": "Finished", "2": "Finished", "3": "overloaded"}


def test_neustream_decodes_after_steps_that_would_end_before_if_each_op_had_its_share() -> None:
    engine = Engine("neustream", decode=20.0)
    engine.serve([edit("short", 1, None), edit("long", 8, None)])
    assert engine.ops[-8:] == [*["denoise"] * 7, "decode"], "both are decoded together"


def test_neustream_decodes_within_its_share_while_others_make_steps_without_end() -> None:
    """With half of the rank it would take 40 s; it waits for one step more at most."""
    engine = Engine("neustream", decode=20.0)
    engine.serve([edit("short", 1, None), edit("long", 200, None)])
    assert engine.ends["short"] <= 1.2 + 40.0 + 1.0


def test_a_profile_is_used_for_work_that_it_has_and_the_line_for_other_work() -> None:
    engine = Engine("default", latencies={1: 1.0, 2: 1.2})
    key = engine.scheduler.cost_key("m", "denoise")
    assert engine.scheduler.cost.predict(key, Work.of([TOKENS] * 2)) == 1.2
    assert engine.scheduler.cost.predict(key, Work.of([TOKENS] * 3)) == 0.0, "no line was fitted"


@pytest.mark.parametrize("seed", [384, 413, 698, 732, 824])
def test_requests_that_have_begun_and_were_overtaken_go_on_where_newcomers_find_no_place(seed: int) -> None:
    """All places are taken by requests without a slot: nobody could go on."""
    random = Random(seed)
    requests = [
        edit(
            str(index),
            random.randint(1, 12),
            random.choice([None, None, 0.5, 1.1, random.uniform(0, 60)]),
            arrival=random.choice([0.0, random.uniform(0, 60)]),
        )
        for index in range(random.randint(10, 20))
    ]
    engine = Engine("default", "last", latencies={number: 0.5 + 0.5 * number for number in range(1, 9)})
    assert len(engine.serve(requests)) == len(requests)


def test_requests_go_on_after_one_that_had_to_run_alone() -> None:
    """Its end, and that of the one that it waits for, are the last events: nothing else would wake the engine."""
    engine = Engine("default", decode=0.5)
    suspect = msgspec.structs.replace(edit("suspect", 3, None, arrival=1.0), num_deaths=SUSPECT_DEATHS)
    engine.serve([edit("first", 3, None), suspect, edit("last", 3, None, arrival=1.5)])
    assert list(engine.ends) == ["first", "suspect", "last"]
    assert list(engine.ends.values()) == pytest.approx([3.5, 7.0, 10.5])


def test_pauses_between_batches_are_learnt_and_reckoned_with() -> None:
    """A plan takes half as long to reach a rank as a step to compute: two together take 21 s in place of 16 s."""
    for trip, most in ((0.0, 2), (0.5, 1)):
        engine = Engine("default", latencies={1: 1.0, 2: 1.6}, trip=trip)
        outputs = engine.serve([edit("before", 60, None), *(edit(name, 10, 20.0, arrival=200.0) for name in "ab")])
        assert max(engine.sizes) == most, "two together would both be late"
        assert sum(isinstance(outputs[name], Finished) for name in "ab") == most


def test_an_idle_server_refuses_nothing_after_slow_times_and_forgets_them() -> None:
    """Each request takes 10 s alone, and would seem to take twice as long."""
    engine = Engine("default")
    slowness = engine.scheduler._predictor.slowness
    slowness.value = MOST
    outputs = engine.serve([edit(str(index), 10, 11.0, arrival=20.0 * index) for index in range(20)])
    assert set(kinds(outputs).values()) == {"Finished"}
    assert slowness.value == pytest.approx(1.0, abs=0.05)
