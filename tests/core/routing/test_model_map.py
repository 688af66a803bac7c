"""Requests go where their model is, unless its queue is longer than loading the model elsewhere takes."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from load_reports import COSTS, PER_KILOTOKEN, load, make_report, make_shape
from msgspec.structs import replace
from run_workflows import DIAMOND, run_request

from core.config import RouterPolicy
from core.costs.load_report import LoadReport, ModelLoad, ModelState, RequestLoad, SpareBytes
from core.costs.prediction_margin import PredictionMargin
from core.errors import EngineDeadError
from core.routing.admission import Terms, judge
from core.routing.fleet import Fleet
from core.routing.policies import make_policy, outlook, predict_times
from core.routing.request_shape import RequestShape
from core.routing.weights import Weights

POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)
SHAPE = make_shape()
LOADED = ModelLoad("m", "model", "loaded", 0.0)


def unloaded(seconds: float, state: ModelState = "unloaded", nbytes: int = 0) -> ModelLoad:
    return ModelLoad("m", "model", state, seconds, nbytes=nbytes)


def report(
    *models: ModelLoad,
    requests: list[RequestLoad] | None = None,
    until: float | None = 0.0,
    room: SpareBytes | None = None,
    **more: int,
) -> LoadReport:
    made = make_report(requests=requests or [], base_seconds=0.006 if requests else 0.0, costs=COSTS, **more)
    return replace(made, models=models, load_seconds=until, room=room)


def fleet_of(*reports: LoadReport, slots: int = 8, now: float = 0.0) -> Fleet:
    fleet = Fleet(len(reports), slots)
    for engine, each in enumerate(reports):
        fleet.observe(engine, each, now)
    return fleet


def chosen(fleet: Fleet, now: float = 0.0, policy: RouterPolicy = "mask-aware") -> int:
    return make_policy(policy).choose(SHAPE, fleet.serving("m", now), now).engine


def test_the_engine_that_has_the_model_is_preferred() -> None:
    fleet = fleet_of(report(unloaded(2.0)), report(LOADED))
    assert [chosen(fleet) for _ in range(3)] == [1, 1, 1]
    alone = predict_times(SHAPE, fleet_of(report(LOADED)), 0.0).finish[0]
    assert predict_times(SHAPE, fleet, 0.0).finish == pytest.approx([alone + 2.0, alone])


def test_the_engine_that_has_a_runs_class_is_preferred() -> None:
    shape = RequestShape.of_run(run_request("r", DIAMOND), DIAMOND)
    lacking, having = ModelLoad("mixer", "class", "unloaded", 0.5), ModelLoad("mixer", "class", "loaded", 0.0)
    fleet = fleet_of(report(lacking), report(having))
    for now in (0.0, 1.0, 2.0):
        assert make_policy("mask-aware").choose(shape, fleet.serving("", now), now).engine == 1
        fleet.sent(1, shape, now)


def test_a_class_that_no_request_runs_any_more_is_forgotten() -> None:
    """Also what was sent there for it; engines that have it again say so."""
    shape = RequestShape.of_run(run_request("r", DIAMOND), DIAMOND)
    lacks, has = (
        ModelLoad("mixer", "class", state, seconds) for state, seconds in (("unloaded", 2.0), ("loaded", 0.0))
    )
    fleet = fleet_of(report(lacks), report(has))
    fleet.sent(0, shape, 0.0)
    fleet.forget_classes({"mixer"})
    assert fleet.load_wait(shape, 0.0) is None
    fleet.observe(0, report(lacks), 1.0)
    fleet.observe(1, report(has), 1.0)
    wait = fleet.load_wait(shape, 1.0)
    assert wait is not None
    assert list(wait.is_first) == [False, False], "the request that was sent there asks for it"


@pytest.mark.parametrize(("queue_seconds", "engine"), [(1.5, 1), (2.5, 0)])
def test_unless_its_queue_is_longer_than_loading_elsewhere_takes(queue_seconds: float, engine: int) -> None:
    """One slot, so that the request waits for the one before."""
    steps = round(queue_seconds / 0.1)
    queue = [load(steps, 0.094)]
    fleet = fleet_of(report(unloaded(2.0)), report(LOADED, requests=queue), slots=1)
    assert chosen(fleet) == engine


def test_a_model_on_no_engine_is_loaded_where_it_ends_soonest() -> None:
    assert chosen(fleet_of(report(unloaded(2.0)), report(unloaded(1.0)))) == 1
    assert chosen(fleet_of(report(unloaded(2.0), until=0.5), report(unloaded(1.0), until=4.0))) == 0
    busy = [load(50, 0.1)]
    assert chosen(fleet_of(report(unloaded(2.0)), report(unloaded(1.0), requests=busy), slots=1)) == 0


def test_a_burst_follows_its_first_request() -> None:
    """Each request on the engine that loads adds less than the load, until their sum exceeds it."""
    fleet = fleet_of(report(unloaded(2.0)), report(unloaded(2.0)), slots=1)
    engines = []
    for _ in range(6):
        engines.append(chosen(fleet))
        fleet.sent(engines[-1], SHAPE, 0.0)
    alone = float(predict_times(SHAPE, fleet_of(report(LOADED)), 0.0).finish[0])
    first = engines[0]
    together = engines.index(1 - first)
    assert (together - 1) * alone < 2.0 < (together + 1) * alone
    assert engines.count(first) == engines.count(1 - first) == 3


def test_the_reports_replace_what_the_router_noted() -> None:
    fleet = fleet_of(report(unloaded(2.0)), report(unloaded(2.0)))
    fleet.sent(0, SHAPE, 0.0)
    work = 28 * (600 + 512) / 1e3 * PER_KILOTOKEN  # of the one that waits already
    wait = fleet.load_wait(SHAPE, 0.5)
    assert wait is not None
    assert wait.seconds == pytest.approx([1.5 + work, 2.0])
    fleet.observe(0, report(until=None, num_received=0), 0.5)
    again = fleet.load_wait(SHAPE, 0.5)
    assert again is not None
    assert again.seconds == pytest.approx([1.5 + work, 2.0]), "it is not in the report yet"
    fleet.observe(0, report(until=None, num_received=1), 0.5)
    refused = fleet.load_wait(SHAPE, 0.5)
    assert refused is not None
    assert refused.seconds.tolist() == [2.0, 2.0], "the engine loads nothing for it"
    fleet.sent(0, SHAPE, 0.5)
    fleet.observe(0, report(unloaded(1.0, "loading"), until=1.0, num_received=2), 1.0)
    loading = fleet.load_wait(SHAPE, 1.25)
    assert loading is not None
    assert loading.seconds == pytest.approx([0.75 + work, 2.0])
    fleet.observe(1, report(LOADED), 1.25)
    assert fleet.load_wait(SHAPE, 2.0) is None, "both have it"


def test_another_models_load_is_waited_for() -> None:
    other = dataclasses.replace(SHAPE, model="other", needed=(Weights("other"),))
    fleet = fleet_of(report(unloaded(2.0), ModelLoad("other", "model", "unloaded", 3.0)))
    fleet.sent(0, SHAPE, 0.0)
    wait = fleet.load_wait(other, 0.5)
    assert wait is not None
    assert wait.seconds.tolist() == [4.5]


@pytest.mark.parametrize("policy", POLICIES)
def test_only_engines_that_serve_a_model_get_its_requests(policy: RouterPolicy) -> None:
    fleet = Fleet(3, 8, [{"a"}, {"m"}, {"m", "a"}])
    for engine in range(3):
        fleet.observe(engine, report(LOADED), 0.0)
    seen = set()
    for _ in range(8):
        engine = chosen(fleet, policy=policy)
        seen.add(engine)
        fleet.sent(engine, SHAPE, 0.0)
    assert seen == {1, 2}
    fleet.lose(1)
    assert (chosen(fleet, policy=policy), fleet.num_serving("m")) == (2, 1)
    fleet.lose(2)
    assert fleet.num_serving("m") == 0
    with pytest.raises(EngineDeadError):
        chosen(fleet, policy=policy)


def test_of_the_engines_that_serve_a_model_those_that_refuse_it_come_last() -> None:
    fleet = Fleet(3, 8, [{"a"}, {"m"}, {"m"}])
    refusing = report(unloaded(1.0, "failed"))
    fleet.observe(1, replace(refusing, refused={"m": 10.0}), 0.0)
    fleet.observe(2, report(unloaded(9.0)), 0.0)
    assert (chosen(fleet, 9.0), chosen(fleet, 11.0)) == (2, 1)
    fleet.lose(2)
    assert chosen(fleet, 9.0) == 1, "it says for how long it is refused"


def test_a_search_for_a_mask_waits_for_the_segmenter_alone() -> None:
    fleet = fleet_of(
        report(unloaded(2.0), ModelLoad("m", "segmenter", "unloaded", 0.5)),
        report(LOADED, ModelLoad("m", "segmenter", "unloaded", 1.0)),
    )
    model, segmenter = Weights("m"), Weights("m", "segmenter")
    waits = [
        fleet.load_wait(dataclasses.replace(SHAPE, needed=needed), 0.0)
        for needed in ((model,), (model, segmenter), (segmenter,))
    ]
    assert [wait.seconds.tolist() for wait in waits if wait is not None] == [[2.0, 0.0], [2.5, 1.0], [0.5, 1.0]]


def test_a_dead_engine_has_nothing_and_a_new_one_what_it_reports() -> None:
    fleet = fleet_of(report(unloaded(2.0, "loading"), until=2.0), report(unloaded(2.0)))
    fleet.lose(0)
    wait = fleet.load_wait(SHAPE, 0.0)
    assert wait is not None
    assert not wait.repeated.any(), "nobody loads it any more"
    fleet.restore(0)
    fleet.observe(0, report(unloaded(3.0)), 1.0)
    again = fleet.load_wait(SHAPE, 1.0)
    assert again is not None
    assert again.seconds.tolist() == [3.0, 2.0]


def test_the_first_request_of_a_model_has_no_objective_that_its_load_would_miss() -> None:
    """Else a model whose load takes longer than the objective would never be used on a busy server."""
    busy = [load(5, 0.01)]
    terms, margin = Terms(timeout=None, slo=1.5), PredictionMargin()
    fleet = fleet_of(report(unloaded(5.0), requests=busy))
    first = outlook(SHAPE, fleet, make_policy("mask-aware"), 0.0)
    assert first is not None
    assert first.seconds > 5.0
    assert not judge(first, terms, margin).has_objective
    fleet.sent(0, SHAPE, 0.0)
    second = outlook(SHAPE, fleet, make_policy("mask-aware"), 0.0)
    assert second is not None
    assert judge(second, terms, margin).has_objective


def test_a_load_without_room_begins_when_the_engine_is_done() -> None:
    """With slots to spare, the request could else begin beside the others."""
    busy, lacks = [load(50, 0.1), load(20, 0.1)], unloaded(2.0, nbytes=10)
    alone = float(predict_times(SHAPE, fleet_of(report(LOADED)), 0.0).finish[0])
    fleet = fleet_of(
        report(lacks, requests=busy, room=SpareBytes(0, 5)), report(lacks, requests=busy, room=SpareBytes(0, 10))
    )
    waits, beside = predict_times(SHAPE, fleet, 0.0).finish
    work = 70 * 0.1 + 50 * 0.006
    assert waits == pytest.approx(work + 2.0 + alone, abs=0.3)
    assert beside < waits
    idle = predict_times(SHAPE, fleet_of(report(lacks, room=SpareBytes(0, 5))), 0.0).finish[0]
    assert idle == pytest.approx(alone + 2.0), "it holds nothing that has to end"


def test_the_router_expects_that_load_as_late_until_the_engine_reports_it() -> None:
    lacks, busy = unloaded(2.0, nbytes=10), [load(50, 0.1)]
    fleet = fleet_of(report(lacks, requests=busy, room=SpareBytes(0, 5)), report(lacks, room=SpareBytes(0, 5)))
    fleet.sent(0, SHAPE, 0.0)
    wait = fleet.load_wait(SHAPE, 0.0)
    assert wait is not None
    assert wait.seconds[0] > 50 * 0.1 + 2.0
    before = float(wait.seconds[0])
    fleet.observe(0, report(requests=busy, until=None, room=SpareBytes(0, 5), num_received=0), 0.0)
    again = fleet.load_wait(SHAPE, 0.0)
    assert again is not None
    assert again.seconds[0] == pytest.approx(before), "the report does not know of it yet"


def test_two_loads_without_room_wait_for_the_same_requests_once() -> None:
    """The second one begins after the first, which has waited for them already."""
    other = dataclasses.replace(SHAPE, needed=(Weights("other"),))
    busy, lacks = [load(50, 0.1)], unloaded(2.0, nbytes=10)
    second = ModelLoad("other", "model", "unloaded", 2.0, nbytes=10)
    fleet = fleet_of(report(lacks, second, requests=busy, room=SpareBytes(0, 5)))
    fleet.sent(0, SHAPE, 0.0)
    alone = float(predict_times(SHAPE, fleet_of(report(LOADED)), 0.0).finish[0])
    finish = float(predict_times(other, fleet, 0.0).finish[0])
    drained = 50 * 0.106 + 2.0
    assert drained + 2.0 + alone <= finish < drained + 2.0 + 3 * alone


def test_what_was_used_longest_ago_is_dropped_first() -> None:
    """Of engines with equal queues: one with room, then the one whose model was not used for longest."""
    lacks, busy = unloaded(2.0, nbytes=10), [load(50, 0.1) for _ in range(3)]
    rooms = SpareBytes(0, 10, 99.0), SpareBytes(0, 10, 10.0), SpareBytes(10, 10, 99.0)
    recent, old, free = (report(lacks, requests=busy, room=room) for room in rooms)
    assert [
        chosen(fleet_of(*each, now=100.0), 100.0) for each in ((recent, old), (old, recent), (recent, old, free))
    ] == [1, 0, 2]


def test_a_hot_model_does_not_take_the_place_of_another_hot_one() -> None:
    """It waits for its own engine, although loading it on the other one would end sooner. What was not asked for since
    long gives way.
    """
    lacks = unloaded(2.0, nbytes=10)
    queue = report(LOADED, requests=[load(25, 0.1) for _ in range(2)], room=SpareBytes(0, 0))
    hot, cold = (report(lacks, room=SpareBytes(0, 10, used)) for used in (99.9, 0.0))
    assert [chosen(fleet_of(queue, other, slots=1, now=100.0), 100.0) for other in (hot, cold)] == [0, 1]


def test_room_counts_what_was_sent_there_to_be_loaded() -> None:
    other = dataclasses.replace(SHAPE, needed=(Weights("other"),))
    fleet = fleet_of(
        report(
            unloaded(2.0, nbytes=10), ModelLoad("other", "model", "unloaded", 2.0, nbytes=10), room=SpareBytes(0, 10)
        )
    )
    first = fleet.load_wait(SHAPE, 0.0)
    assert first is not None
    assert first.dropping is not None
    assert not first.dropping.waits[0]
    fleet.sent(0, other, 0.0)
    second = fleet.load_wait(SHAPE, 0.0)
    assert second is not None
    assert second.dropping is not None
    assert second.dropping.waits[0]
