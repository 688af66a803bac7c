"""EngineLanes: the slot of a newcomer is that of a simulation that looks at every request at every event."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_reports import COSTS, load, make_costs, make_report, make_shape
from msgspec.structs import replace

from core.costs.load_report import CostLine, EngineCosts, ModelLoad, RequestLoad
from core.routing.engine_lanes import DONE, EngineLanes
from core.routing.fleet import MAX_KINDS, MAX_SIMULATED, Fleet
from core.routing.policies import make_policy, outlook, predict_times, work_seconds
from core.routing.weights import Weights

BASE = 0.1


@dataclass
class Running:
    """A request that has a slot."""

    lanes: list[int]
    left: float
    seconds: float


class ByHand:
    """Each request makes steps in the first of its lanes; a lane begins when its step under way has ended."""

    def __init__(self, num_lanes: int, num_slots: int) -> None:
        self.now, self.begins, self.num_slots = 0.0, [0.0] * num_lanes, num_slots
        self.running: list[Running] = []

    def pace(self, lane: int) -> float:
        return BASE + sum(each.seconds for each in self.running if lane in each.lanes)

    def work(self, lane: int) -> tuple[float, int, int]:
        mine = [each for each in self.running if lane in each.lanes]
        begins = max(self.now, self.begins[lane])
        return begins + sum(each.left * (BASE + each.seconds) for each in mine), len(mine), lane

    def place(self, one: RequestLoad) -> None:
        lanes = sorted(range(len(self.begins)), key=self.work)[: one.degree]
        self.running.append(Running(list(one.ranks) or lanes, one.steps_left, one.step_seconds))

    def free_slot(self) -> None:
        while len(self.running) >= self.num_slots:
            ends = [
                max(self.now, self.begins[each.lanes[0]]) + each.left * self.pace(each.lanes[0])
                for each in self.running
            ]
            end = min(ends)
            paces = [self.pace(each.lanes[0]) for each in self.running]
            for each, pace in zip(self.running, paces, strict=True):
                each.left -= max(0.0, end - max(self.now, self.begins[each.lanes[0]])) / pace
            del self.running[ends.index(end)]
            self.now = end


def draw_loads(random: Random, number: int, num_lanes: int) -> list[RequestLoad]:
    """Some of those that run have a rank already."""
    loads = list[RequestLoad]()
    for index in range(number):
        rank = (random.randrange(num_lanes),) if index < 4 and random.random() < 0.5 else ()
        loads.append(replace(load(random.randint(1, 12), random.uniform(0.01, 1.0)), ranks=rank))
    return loads


@given(seed=st.integers(0, 10**6), num_lanes=st.integers(1, 4), num_slots=st.integers(1, 6), number=st.integers(0, 24))
def test_the_slot_of_a_newcomer_is_that_of_a_simulation(seed: int, num_lanes: int, num_slots: int, number: int) -> None:
    loads = draw_loads(Random(seed), number, num_lanes)
    by_hand = ByHand(num_lanes, num_slots)
    for one in loads[:num_slots]:
        by_hand.place(one)
    by_hand.begins = [by_hand.pace(lane) if by_hand.work(lane)[1] else 0.0 for lane in range(num_lanes)]
    by_hand.free_slot()
    for one in loads[num_slots:]:
        by_hand.place(one)
        by_hand.free_slot()
    lane = EngineLanes(tuple(range(num_lanes)), num_slots, BASE, loads).next_lane()
    expected = min(range(num_lanes), key=by_hand.work)
    assert lane.rank == expected
    assert lane.time == pytest.approx(max(by_hand.now, by_hand.begins[expected]))
    mine = [each.left for each in by_hand.running if expected in each.lanes]
    left = sorted((steps for steps in mine if steps > DONE), reverse=True)
    assert [steps for steps, _ in lane.left()] == pytest.approx(left)


@given(seed=st.integers(0, 10**6), number=st.integers(0, 12))
def test_what_is_lined_up_later_is_as_if_it_had_been_reported(seed: int, number: int) -> None:
    loads = [replace(each, ranks=()) for each in draw_loads(Random(seed), number + 2, 3)]
    reported, later = EngineLanes((0, 1, 2), 2, BASE, loads), EngineLanes((0, 1, 2), 2, BASE, loads[:2])
    for one in loads[2:]:
        later.line_up(one, 0.0)
    assert later.next_lane() == reported.next_lane()


def test_a_request_that_has_several_lanes_leaves_all_of_them_at_once() -> None:
    large = replace(load(10, 1.0), degree=2)
    lanes = EngineLanes((0, 1, 2, 3), 3, 0.0, [large, replace(large, steps_left=20)])
    assert lanes.next_lane().time == 1.0, "each has two, and no slot is missing"
    assert [lanes.next_lane(degree=degree).left()[0][0] for degree in (1, 2, 4)] == [10.0, 10.0, 20.0]
    lanes.line_up(load(1, 5.0), 0.0)
    lanes.line_up(load(1, 5.0), 0.0)
    assert lanes.next_lane(degree=2).rank in (0, 1)


def test_steps_go_by_until_a_later_request_comes() -> None:
    lanes = EngineLanes((0, 1), 8, 0.0, [load(4, 1.0), load(9, 1.0)])
    lanes.line_up(load(5, 1.0), 6.0)
    assert (lanes.next_lane().rank, lanes.next_lane().left()) == (1, [(4.0, 1.0)]), "the other has five left"
    lanes.delay(2.0)
    assert lanes.next_lane().time == 8.0


# ---------------------------------------------------------------------------------------------------- the fleet


def fleet_of(*lanes: tuple[int, ...], loads: int = 0, **changes: object) -> Fleet:
    """Engines with these ranks and as many running requests on the first of them."""
    fleet = Fleet(len(lanes), 8)
    requests = [replace(load(20, 0.02), is_running=True, ranks=(0,)) for _ in range(loads)]
    for engine, ranks in enumerate(lanes):
        report = make_report(0, requests, 0.006 if loads else 0.0, costs=COSTS)
        fleet.observe(engine, replace(report, lanes=ranks, num_ranks=len(ranks), **changes), 0.0)
    return fleet


def test_an_engine_with_a_free_rank_is_chosen() -> None:
    fleet = fleet_of((0,), (0, 1), loads=3)
    ahead = predict_times(make_shape(), fleet, 0.0)
    idle = predict_times(make_shape(), fleet_of((0,)), 0.0)
    assert ahead.finish[1] == pytest.approx(idle.finish[0]), "nothing runs on its other rank"
    assert (ahead.imposed[1], ahead.imposed[0] > 0) == (0.0, True)
    assert make_policy("mask-aware").choose(make_shape(), fleet, 0.0).engine == 1


def test_what_an_edit_delays_is_spread_over_all_ranks() -> None:
    fleet = fleet_of((0,), (0, 1, 2))
    assert (fleet.num_serving("m"), fleet.num_lanes_serving("m")) == (2, 4)
    assert work_seconds(make_shape(), fleet) == work_seconds(make_shape(), fleet_of((0,)))
    assert fleet_of((0, 1, 2, 3), loads=6).mean_held == 1.5
    fleet.observe(1, replace(make_report(), lanes=(0, 2), num_ranks=2), 1.0)
    assert fleet.num_lanes_serving("m") == 3, "a rank has died"
    fleet.observe(1, replace(make_report(), lanes=(), num_ranks=0), 2.0)
    assert fleet.num_lanes_serving("m") == 1


def test_a_model_that_some_ranks_have_waits_for_these() -> None:
    some = (ModelLoad("m", "model", "loaded", 0.0, ranks=(0,)),)
    fleet, shape = fleet_of((0, 1), loads=3, models=some), make_shape()
    other = RequestLoad(4, 0.01, 0.0, ranks=(1,), is_running=True)
    assert fleet.slots_for(shape).num_placed[0] == 3
    assert fleet.slots.num_placed[0] == 0
    before = predict_times(shape, fleet, 0.0).finish[0]
    every = (ModelLoad("m", "model", "loaded", 0.0),)
    fleet.observe(0, replace(make_report(0, [other], 0.006), lanes=(0, 1), models=every), 0.0)
    assert fleet.slots_for(shape).num_placed[0] == 0
    assert predict_times(shape, fleet, 0.0).finish[0] < before
    fleet.observe(0, replace(make_report(0, [other], 0.006), lanes=(0, 1), models=some), 0.0)
    fleet.lose(0)
    assert not fleet._models.are_on_some_ranks((Weights("m"),))


def shared_costs(two: float, four: float) -> EngineCosts:
    """Steps on 2 and 4 ranks take these shares of those on one."""
    costs = make_costs()
    (steps,) = (line for line in costs.lines if line.op == "denoise")
    lines = (
        CostLine("m", "denoise", tuple(share * each for each in steps.coefficients), degree)
        for degree, share in ((2, two), (4, four))
    )
    return EngineCosts((*costs.lines, *lines), costs.copies)


def test_a_large_request_is_predicted_on_as_many_ranks_as_it_gains_by() -> None:
    fleet, shape = fleet_of((0,), (0, 1), (0, 1, 2, 3)), make_shape(active_tokens=4096)
    alone = predict_times(shape, fleet, 0.0).finish[0]
    fleet.observe(0, make_report(costs=shared_costs(0.55, 0.3)), 0.0)
    assert predict_times(shape, fleet, 0.0).finish == pytest.approx([alone, 0.55 * alone, 0.3 * alone], rel=0.05)
    ahead = outlook(shape, fleet, make_policy("mask-aware"), 0.0)
    assert ahead is not None
    assert ahead.alone == pytest.approx(0.3 * alone, rel=0.05), "no longer refused for a timeout that four ranks meet"
    fleet.sent(2, shape, 0.0)
    fleet.sent(2, shape, 0.0)
    together = predict_times(shape, fleet, 0.0).finish[2]
    assert together == pytest.approx(0.9 * alone, rel=0.15), "all share the ranks, and the constant part of each step"
    fleet.observe(0, make_report(costs=shared_costs(0.9, 0.8)), 0.0)
    assert predict_times(shape, fleet, 0.0).finish[1] == pytest.approx(alone, rel=0.05), "it gains too little"


def test_an_engine_whose_ranks_share_every_step_has_shown_no_step_on_one_rank() -> None:
    costs = shared_costs(0.5, 0.3)
    lines = tuple(line for line in costs.lines if line.op != "denoise" or line.degree > 1)
    fleet = Fleet(1, 8)
    fleet.observe(0, make_report(costs=EngineCosts(lines, costs.copies)), 0.0)
    assert fleet.degree(make_shape()) == 1
    assert predict_times(make_shape(), fleet, 0.0).finish[0] >= 0.0


def test_few_kinds_of_requests_are_kept_however_many_come_for_engines_that_differ() -> None:
    fleet = Fleet(2, 8, [{"m"}, {"m", "other"}])
    names = [f"class {number}" for number in range(3 * MAX_KINDS)]
    for engine in (0, 1):
        models = tuple(ModelLoad(name, "class", "loaded", 0.0, ranks=(0,)) for name in names)
        fleet.observe(engine, replace(make_report(costs=COSTS), lanes=(0, 1), num_ranks=2, models=models), 0.0)
    for name in names:
        shape = dataclasses.replace(make_shape(), needed=(Weights(name, "class"),))
        predict_times(shape, fleet.serving("m", 0.0), 0.0)
        assert ((Weights(name, "class"),), 1) in fleet._known
        assert len(fleet._known) <= MAX_KINDS + 1


def test_of_a_long_queue_that_is_overtaken_in_part_only_the_first_requests_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, add, added = Fleet(1, 8), EngineLanes._add, list[RequestLoad]()
    loads = [replace(load(10, 0.02), is_running=number < 8, owner="a") for number in range(1000)]
    last = replace(load(10, 0.02), priority=2, owner="a")
    fleet.observe(0, make_report(0, [*loads, last], 0.006, costs=COSTS), 0.0)
    shape = dataclasses.replace(make_shape(), owner="a")
    behind_all = predict_times(shape, fleet, 0.0).finish[0]
    monkeypatch.setattr(EngineLanes, "_add", lambda self, load: (added.append(load), add(self, load)))
    overtaking = fleet.before(0, 0.0, "a")
    assert overtaking is not fleet
    assert len(added) <= MAX_SIMULATED + 8
    assert predict_times(shape, overtaking, 0.0).finish[0] == pytest.approx(behind_all, rel=0.01)
