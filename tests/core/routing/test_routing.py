"""Policies: the chosen engine and the predicted times, compared with engines simulated step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from fakes import make_edit, with_spec
from hypothesis import given
from hypothesis import strategies as st
from load_reports import BASE, COSTS, PER_KILOTOKEN, SLOW_COSTS, load, make_report, make_shape

from core.config import RouterPolicy
from core.costs.load_report import CopyLine, EngineCosts, ResidentPages
from core.errors import EngineDeadError
from core.handles import ArrayRef
from core.routing.engine_lanes import EngineLanes
from core.routing.fleet import Fleet
from core.routing.policies import make_policy, outlook, predict_times

POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)

EDIT = with_spec(make_edit("e"), template=ArrayRef(0, 4096, (64, 64, 3), "uint8"))

STEP = PER_KILOTOKEN * (600 + 512) / 1e3
"""Seconds that a step of make_shape() takes."""

Loads = list[tuple[int, float]]


def finish_by_hand(requests: list[list[float | None]], num_slots: int) -> list[float]:
    """When each request of a FIFO queue is done, computed step by step. A request is what each of its
    steps adds; None: it has a slot and does not compute.
    """
    done, now = [0.0] * len(requests), 0.0
    waiting, running, passed = list(range(len(requests))), list[int](), [0] * len(requests)
    while waiting or running:
        while waiting and len(running) < num_slots:
            running.append(waiting.pop(0))
        computing = [seconds for i in running if (seconds := requests[i][passed[i]]) is not None]
        now += BASE + sum(computing) if computing else 0.0
        for i in running:
            passed[i] += 1
            done[i] = now
        running = [i for i in running if passed[i] < len(requests[i])]
    return done


def held_steps(loads: Loads, num_slots: int) -> list[list[float | None]]:
    """Requests in slots have one more step, which has just begun when the report is made."""
    return [[seconds] * (steps + (place < num_slots)) for place, (steps, seconds) in enumerate(loads)]


def fleet_of(*engines: Loads, num_slots: int = 8, **report: object) -> Fleet:
    """Engines that report these loads at time 0."""
    fleet = Fleet(len(engines), num_slots)
    for engine, loads in enumerate(engines):
        requests = [load(steps, seconds) for steps, seconds in loads]
        fleet.observe(engine, make_report(0, requests, BASE if loads else 0.0, costs=COSTS, **report), 0.0)  # type: ignore[arg-type]
    return fleet


@given(
    loads=st.lists(st.tuples(st.integers(1, 12), st.floats(0.0, 1.0)), max_size=20),
    num_slots=st.integers(1, 5),
    num_steps=st.integers(1, 12),
)
def test_the_forecast_is_what_a_step_by_step_run_gives(loads: Loads, num_slots: int, num_steps: int) -> None:
    """The new request waits for the running step or for a slot, and is encoded beside another step."""
    held = held_steps(loads, num_slots)
    is_queued = len(loads) >= num_slots
    newcomer: list[float | None] = [None] * (1 if is_queued else 2) + [STEP] * num_steps
    alone, together = finish_by_hand(held, num_slots), finish_by_hand([*held, newcomer], num_slots)
    ahead = predict_times(make_shape(num_steps), fleet_of(loads, num_slots=num_slots), 0.0)
    assert ahead.finish[0] == pytest.approx(together[-1])
    assert ahead.imposed[0] == pytest.approx(sum(together[:-1]) - sum(alone))


@given(
    loads=st.lists(st.tuples(st.integers(8, 20), st.floats(0.0, 1.0)), min_size=1, max_size=4),
    num_passed=st.integers(1, 6),
    num_steps=st.integers(1, 12),
)
def test_the_forecast_between_two_reports(loads: Loads, num_passed: int, num_steps: int) -> None:
    """In the middle of a step."""
    now = (num_passed + 0.5) * (BASE + sum(seconds for _, seconds in loads))
    newcomer: list[float | None] = [None] * (num_passed + 2) + [STEP] * num_steps
    together = finish_by_hand([*held_steps(loads, 8), newcomer], 8)
    ahead = predict_times(make_shape(num_steps), fleet_of(loads), now)
    assert ahead.finish[0] == pytest.approx(together[-1] - now)


def test_sent_requests_are_forecast_like_reported_ones() -> None:
    sent, reported = fleet_of([], num_slots=2), fleet_of([(28, STEP)] * 5, num_slots=2)
    for _ in range(5):
        sent.sent(0, make_shape(), 0.0)
    step_under_way = BASE + 2 * STEP
    expected = predict_times(make_shape(), reported, step_under_way).finish
    assert predict_times(make_shape(), sent, 0.0).finish == pytest.approx(expected)


def test_a_mask_makes_the_difference() -> None:
    """One large edit counts more than two small ones, unlike for a policy that counts requests."""
    fleet = fleet_of([(28, 0.1)], [(28, 0.01), (28, 0.01)])
    assert make_policy("mask-aware").choose(make_shape(), fleet, 0.0).engine == 1
    assert make_policy("least-requests").choose(make_shape(), fleet, 0.0).engine == 0


def test_steps_left_make_the_difference() -> None:
    fleet = fleet_of([(28, 0.03)], [(2, 0.1)])
    assert make_policy("mask-aware").choose(make_shape(), fleet, 0.0).engine == 1
    assert make_policy("least-tokens").choose(make_shape(), fleet, 0.0).engine == 0


def test_an_edit_goes_where_its_template_is() -> None:
    shape, policy = make_shape(template="t"), make_policy("mask-aware")
    fleet = fleet_of([], [(5, 0.02)], [])
    assert policy.choose(shape, fleet, 0.0).engine != 1
    fleet.templates.observe(1, ResidentPages("t", 3, 0))
    assert policy.choose(shape, fleet, 0.0).engine == 1
    assert policy.choose(make_shape(template="other"), fleet, 0.0).engine != 1


def test_a_busy_engine_loses_its_templates_edits() -> None:
    shape, fleet = make_shape(template="t"), fleet_of([], [(50, 0.05)] * 8, [])
    fleet.templates.observe(1, ResidentPages("t", 3, 0))
    assert make_policy("mask-aware").choose(shape, fleet, 0.0).engine != 1


def test_pages_on_a_slower_tier_are_worth_what_loading_them_saves() -> None:
    shape, policy = make_shape(template="t"), make_policy("mask-aware")
    fleet = fleet_of([], [], [])
    fleet.templates.observe(1, ResidentPages("t", 0, 3))
    assert policy.choose(shape, fleet, 0.0).engine == 1, "loading is quicker than priming"
    fleet.templates.observe(2, ResidentPages("t", 3, 0))
    assert policy.choose(shape, fleet, 0.0).engine == 2


def test_pages_that_would_take_longer_to_load_are_primed() -> None:
    shape, fleet = make_shape(template="t"), fleet_of([], [])
    slow = EngineCosts(COSTS.lines, (CopyLine("host", (0.0, 1.0)),))
    fleet.observe(1, make_report(costs=slow, resident_pages=[ResidentPages("t", 0, 3)]), 0.0)
    cold, below = predict_times(shape, fleet, 0.0).finish
    assert below <= cold


def test_edits_of_one_new_template_go_one_way() -> None:
    """The second edit of a template follows the first, before any report includes its pages."""
    shape, policy, fleet = make_shape(template="t"), make_policy("mask-aware"), fleet_of([], [], [])
    first = policy.choose(shape, fleet, 0.0).engine
    fleet.sent(first, make_shape(2, template="t"), 0.0)
    assert policy.choose(shape, fleet, 0.0).engine == first


def test_priming_under_way_is_in_the_way() -> None:
    fleet = fleet_of([], [])
    fleet.observe(0, make_report(priming_seconds=3.0), 0.0)
    assert make_policy("mask-aware").choose(make_shape(template="t"), fleet, 0.0).engine == 1
    assert make_policy("mask-aware").choose(make_shape(), fleet, 0.0).engine == 1


def test_an_engine_that_learnt_in_a_slow_moment_still_gets_work() -> None:
    """Costs per engine would keep edits away from it, so that it could not correct itself."""
    policy, fleet, shape = make_policy("mask-aware"), fleet_of([], []), make_shape()
    fleet.observe(0, make_report(costs=SLOW_COSTS), 0.0)
    fleet.observe(1, make_report(costs=COSTS), 0.0)
    fleet.sent(1, shape, 0.0)
    fleet.observe(1, make_report(num_received=1), 1.0)
    assert policy.choose(shape, fleet, 2.0).engine == 0, "both are idle: it is its turn"


def test_batch_cost_takes_the_cheapest_batch_among_engines_with_slack() -> None:
    full, long, short = [(1, 0.001)] * 2, [(100, 0.02)], [(1, 0.03)]
    policy, shape = make_policy("batch-cost"), make_shape()
    fleet = fleet_of(full, long, short, num_slots=2)
    assert policy.choose(shape, fleet, 0.0).engine == 1, "steps left do not count, and the first is full"
    fleet = fleet_of(full, long * 2, short * 2, num_slots=2)
    assert policy.choose(shape, fleet, 0.0).engine == 0, "all are full: the cheapest"


def test_round_robin_takes_turns() -> None:
    policy, fleet, shape = make_policy("round-robin"), fleet_of([(9, 0.1)], [], []), make_shape()
    order = []
    for _ in range(6):
        order.append(policy.choose(shape, fleet, 0.0).engine)
        fleet.sent(order[-1], shape, 0.0)
    assert order == [0, 1, 2] * 2


@pytest.mark.parametrize("name", POLICIES)
def test_engines_that_are_equal_take_turns(name: RouterPolicy) -> None:
    policy, fleet, order = make_policy(name), fleet_of([], [], [], []), []
    for i in range(8):
        order.append(policy.choose(make_shape(), fleet, float(i)).engine)
        fleet.sent(order[-1], make_shape(), float(i))
        fleet.observe(order[-1], make_report(num_received=i // 4 + 1), float(i))
    assert sorted(order[:4]) == sorted(order[4:]) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", POLICIES)
def test_dead_engines_are_not_chosen(name: RouterPolicy) -> None:
    policy, fleet = make_policy(name), fleet_of([], [(28, 0.1)] * 9, [(28, 0.1)] * 9)
    fleet.lose(0)
    chosen = set()
    for _ in range(6):
        engine = policy.choose(make_shape(template="t"), fleet, 0.0).engine
        fleet.sent(engine, make_shape(template="t"), 0.0)
        chosen.add(engine)
    assert chosen == {1, 2}
    fleet.restore(0)
    assert policy.choose(make_shape(), fleet, 0.0).engine == 0
    for engine in range(3):
        fleet.lose(engine)
    with pytest.raises(EngineDeadError):
        policy.choose(make_shape(), fleet, 0.0)


@pytest.mark.parametrize("name", POLICIES)
def test_before_any_report_load_is_spread_by_requests_sent(name: RouterPolicy) -> None:
    policy, fleet = make_policy(name), Fleet(4, 8)
    for _ in range(8):
        choice = policy.choose(make_shape(), fleet, 0.0)
        assert choice.predicted_seconds is None, "nothing is known that could be predicted from"
        fleet.sent(choice.engine, make_shape(), 0.0)
    assert fleet.num_requests.tolist() == [2] * 4


def test_a_prediction_is_the_chosen_engines() -> None:
    fleet, shape = fleet_of([], [(5, 0.1)]), make_shape()
    choice = make_policy("mask-aware").choose(shape, fleet, 0.0)
    assert choice.predicted_seconds == predict_times(shape, fleet, 0.0).finish[choice.engine]


def test_an_edit_goes_to_another_machine_if_the_way_there_and_back_takes_less_than_the_queue_here() -> None:
    shape, policy = replace(make_shape(), request=EDIT), make_policy("mask-aware")
    read, written = shape.copied
    assert read > 0 < written
    idle, busy = fleet_of([], []), fleet_of([(28, STEP)], [])
    near = predict_times(shape, idle, 0.0).finish[1]
    for fleet in (idle, busy):
        fleet.note_link(1, 1e-6)
    assert predict_times(shape, idle, 0.0).finish[1] == pytest.approx(near + 1e-6 * (read + written))
    assert policy.choose(shape, idle, 0.0).engine == 0
    assert policy.choose(shape, busy, 0.0).engine == 1
    busy.note_link(1, 1.0)
    assert policy.choose(shape, busy, 0.0).engine == 0


def test_the_way_there_passes_while_an_edit_would_wait_for_a_slot() -> None:
    shape = replace(make_shape(), request=EDIT)
    here, there = (fleet_of([(28, STEP)], num_slots=1) for _ in range(2))
    there.note_link(0, 1e-6)
    later = predict_times(shape, there, 0.0).finish[0] - predict_times(shape, here, 0.0).finish[0]
    assert later == pytest.approx(1e-6 * shape.copied.written)


def test_numbers_that_no_engine_has_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the number of engines follows a cluster, most of those that there may be are not there."""
    fleet, looks = fleet_of([(28, STEP)], *[[]] * 99), {"_may_be_overtaken": 0, "next_lane": 0}
    for engine in range(2, 100):
        fleet.lose(engine)
    fleet.settle()
    for cls, name in ((Fleet, "_may_be_overtaken"), (EngineLanes, "next_lane")):

        def counted(*args: object, name: str = name, method: object = getattr(cls, name)) -> object:
            looks[name] += 1
            return method(*args)  # type: ignore[operator]

        monkeypatch.setattr(cls, name, counted)
    assert outlook(make_shape(), fleet, make_policy("mask-aware"), 0.0) is not None
    fleet._slots_of_kind(((), 2))
    assert looks == {"_may_be_overtaken": 1, "next_lane": 2}
