"""Fleet: an engine's state follows from its reports, what was sent to it since, and the time that has passed."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import get_args

import pytest
from fakes import MODEL, PIXELS, make_edit, make_hires_edit, make_mask_request, make_selecting_edit, with_spec
from load_reports import COSTS, SLOW_COSTS, load, make_costs, make_report, make_shape
from msgspec.structs import replace
from run_workflows import DIAMOND, run_request

from core.config import CLASS_SECONDS, RouterPolicy
from core.costs.cost_model import FEATURES, CostKey, CostModel, features_of
from core.costs.load_report import EngineCosts, ResidentPages
from core.graph.work import Work
from core.messages.engine import PrimeTemplate
from core.page_scheme import PageLayout, PageScheme
from core.routing.fleet import Fleet
from core.routing.fleet_costs import MAX_SIZES, work_features
from core.routing.policies import make_policy
from core.routing.request_shape import Loop, RequestShape
from core.routing.template_map import MAX_EXPECTED
from core.routing.weights import Weights

SCHEME = PageScheme(
    layout=PageLayout(num_blocks=2, num_heads=2, head_dim=8, dtype="int8"),
    keyframes=(1.0, 0.5, 0.0),
    latent_bytes=128,
    fingerprint="f",
    guidance_scale=30.0,
    mask_margin=8,
    full_steps=0,
)


def test_features_are_those_of_the_cost_model() -> None:
    work = Work.of_pairs([(300, 1024)])
    assert work_features(300, 1024) == pytest.approx(features_of(work))
    assert len(FEATURES) == len(work_features(1, 1))


def test_a_shape_costs_what_the_cost_model_predicts() -> None:
    key, model = CostKey("flux", (), "denoise", "cpu", 1), CostModel()
    for active in (100, 700, 2000, 4000):
        for number in (1, 2, 5):
            work = Work.of_pairs([(active + 512, 4608)] * number)
            model.observe(key, work, 0.006 + 2e-5 * (active + 512) * number + 1e-4 * number)
    fleet, shape = Fleet(1, 8), make_shape(active_tokens=900)
    coefficients = model.coefficients(key)
    line = COSTS.lines[0].__class__("m", "denoise", coefficients)
    fleet.observe(0, make_report(costs=EngineCosts((line,), ())), 0.0)
    seconds = fleet.size_costs(shape).base + 3 * fleet.step_seconds(shape)
    assert seconds == pytest.approx(model.predict(key, Work.of_pairs([(900 + 512, 4608)] * 3)))


def test_the_shape_of_an_edit() -> None:
    info = type(MODEL)(**{field: getattr(MODEL, field) for field in MODEL.__struct_fields__} | {"page_scheme": SCHEME})
    exact = RequestShape.of_request(make_edit("a", steps=7), info)
    assert (exact.num_steps, exact.full_steps, exact.template, exact.num_keyframes) == (7, 7, None, 0)
    shape = RequestShape.of_request(with_spec(make_edit("a", steps=7), is_mask_aware=True), info)
    assert shape.template == SCHEME.template_key("0")
    assert (shape.full_steps, shape.num_keyframes) == (0, 3)
    assert shape.entry_bytes == SCHEME.layout.entry_bytes(256)
    prime = PrimeTemplate("t", "m", PIXELS, 256, 256, "0", 256, 0.0)
    assert RequestShape.of_template(prime, info).template == shape.template
    assert RequestShape.of_template(prime, info).num_steps == 0


def test_what_a_request_needs_loaded() -> None:
    made = make_edit("a"), make_selecting_edit("b"), make_mask_request("c")
    own, segmenter = Weights("m"), Weights("m", "segmenter")
    shapes = [RequestShape.of_request(each, MODEL).needed for each in made]
    assert shapes == [(own,), (own, segmenter), (segmenter,)]
    run = RequestShape.of_run(run_request("d", DIAMOND), DIAMOND)
    assert (run.model, run.needed) == ("", (Weights("mixer", "class"),))


@pytest.mark.parametrize("policy", get_args(RouterPolicy))
def test_a_run_goes_to_any_living_engine_whatever_models_it_serves(policy: RouterPolicy) -> None:
    fleet = Fleet(2, 8, [["a"], ["b"]])
    shape = RequestShape.of_run(run_request("d", DIAMOND), DIAMOND)
    chosen: list[int] = []
    for now in (0.0, 1.0):
        chosen.append(make_policy(policy).choose(shape, fleet.serving(shape.model, now), now).engine)
        fleet.sent(chosen[-1], shape, now)
    assert sorted(chosen) == [0, 1]
    fleet.lose(0)
    assert make_policy(policy).choose(shape, fleet.serving(shape.model, 2.0), 2.0).engine == 1


@pytest.mark.parametrize("conditions_per_token", [0, 1])
def test_an_edit_of_two_passes_costs_what_both_do(conditions_per_token: int) -> None:
    """Each pass has its own size; text is encoded and the picture decoded once, the image encoded twice."""
    edit = make_hires_edit("a", steps=4, strength=0.5, num_condition_tokens=256 * conditions_per_token)
    shape = RequestShape.of_request(edit, MODEL)
    assert (shape.num_steps, shape.full_steps, shape.loops) == (4 + 2, 4 + 2, (Loop("m", 4, 64),))
    assert (shape.image_tokens, shape.template) == (256, None)
    assert [(each.op, each.image_tokens) for each in shape.encodings] == [
        ("text_encode", 256),
        ("image_encode", 64),
        ("upscale", 256),
        ("image_encode", 256),
        ("decode", 256),
    ]
    key, model = CostKey("flux", (), "denoise", "cpu", 1), CostModel()
    for tokens in (50, 100, 300, 600):
        for number in (1, 2, 5):
            work = Work.of([tokens] * number)
            model.observe(key, work, 0.006 + 2e-5 * tokens * number + 1e-8 * tokens**2 * number + 1e-4 * number)
    others = [line for line in make_costs(other=0.5).lines if line.op != "denoise"]
    steps = others[0].__class__("m", "denoise", model.coefficients(key))
    fleet = Fleet(1, 8)
    fleet.observe(0, make_report(costs=EngineCosts((steps, *others), ())), 0.0)
    costs = fleet.size_costs(shape)
    first, second = (image * (1 + conditions_per_token) + 24 for image in (64, 256))
    passes = 4 * model.predict(key, Work.of([first])) + 2 * model.predict(key, Work.of([second]))
    assert shape.num_steps * (costs.base + fleet.step_seconds(shape)) == pytest.approx(passes)
    assert costs.other == pytest.approx(4 * 0.5)
    assert fleet.size_costs(RequestShape.of_request(make_edit("b"), MODEL)).other == pytest.approx(3 * 0.5)


def test_another_owners_pages_do_not_attract_edits_to_an_engine() -> None:
    info = replace(MODEL, page_scheme=SCHEME)
    edit = with_spec(make_edit("a"), is_mask_aware=True)
    prime = PrimeTemplate("t", "m", PIXELS, 256, 256, "0", 256, 0.0)
    shapes = {
        salt: (
            RequestShape.of_request(with_spec(edit, cache_salt=salt), info).template,
            RequestShape.of_template(replace(prime, cache_salt=salt), info).template,
        )
        for salt in ("", "mine", "yours")
    }
    assert all(of_edit == of_template for of_edit, of_template in shapes.values())
    assert len(set(shapes.values())) == 3
    assert shapes[""][0] == SCHEME.template_key("0"), "without keys, pages on disk keep their names"


def test_text_tokens_beyond_the_prompts_count() -> None:
    info = replace(MODEL, page_scheme=SCHEME, extra_text_tokens=77)
    edit = with_spec(make_edit("a"), extra_text_tokens=77)
    masked = with_spec(edit, is_mask_aware=True)
    prime = PrimeTemplate("t", "m", PIXELS, 256, 256, "0", 256, 0.0)
    shapes = [
        RequestShape.of_request(edit, info),
        RequestShape.of_request(masked, info),
        RequestShape.of_template(prime, info),
    ]
    assert [shape.text_tokens for shape in shapes] == [24 + 77] * 3


def test_sent_requests_count_until_they_are_acknowledged() -> None:
    fleet, shape = Fleet(2, 8), make_shape()
    fleet.observe(0, make_report(costs=COSTS), 0.0)
    fleet.sent(0, shape, 0.0)
    fleet.sent(0, shape, 0.0)
    assert fleet.num_requests.tolist() == [2, 0]
    fleet.observe(0, make_report(num_received=1, requests=[load(28, 0.02)]), 0.0)
    assert fleet.num_requests.tolist() == [2, 0], "the second is still on its way"
    both = fleet.held_seconds[0]
    fleet.observe(0, make_report(num_received=2, requests=[load(28, 0.02)]), 0.0)
    assert fleet.num_requests.tolist() == [1, 0], "the first has ended since"
    assert fleet.held_seconds[0] == pytest.approx(0.02)
    assert both > 0.02


def test_steps_go_by_between_reports() -> None:
    fleet = Fleet(1, 2)
    fleet.observe(0, make_report(requests=[load(9, 0.1), load(19, 0.1)], base_seconds=0.1), 5.0)
    assert fleet.slots.free_at[0] == pytest.approx(5.0 + 10 * 0.3), "one step is under way"
    assert sorted(fleet.slots.steps[:, 0]) == pytest.approx([0.0, 10.0])
    fleet.sent(0, make_shape(num_steps=4), 5.0 + 3.0 + 5 * 0.2)
    assert sorted(fleet.slots.steps[:, 0])[-1] == pytest.approx(1.0), "five of ten are done, and four are ahead of it"


def test_an_engine_that_was_lost_is_forgotten() -> None:
    fleet, shape = Fleet(2, 8), make_shape(template="t")
    report = make_report(
        requests=[load(5, 0.1)], base_seconds=0.1, resident_pages=[ResidentPages("t", 3, 0)], costs=COSTS
    )
    fleet.observe(0, report, 0.0)
    fleet.sent(0, shape, 0.0)
    fleet.sent(0, make_shape(template="other"), 0.0)
    fleet.lose(0)
    assert not fleet.is_alive[0]
    assert len(fleet.templates) == 0
    assert not fleet.slots.steps.any()
    assert fleet.num_requests.tolist() == [0, 0]
    fleet.observe(0, report, 0.0)
    assert fleet.num_requests.tolist() == [0, 0], "a report that was on its way when it died"
    fleet.restore(0)
    fleet.sent(0, shape, 1.0)
    assert fleet.num_requests.tolist() == [1, 0]
    fleet.observe(0, make_report(num_received=1, requests=[load(5, 0.1)], base_seconds=0.1), 1.0)
    assert fleet.num_requests.tolist() == [1, 0], "a new engine counts from the start"


def test_an_engine_without_a_rank_that_lives_is_no_candidate_and_keeps_its_queue() -> None:
    fleet = Fleet(2, 8)
    report = make_report(requests=[load(5, 0.1)], base_seconds=0.1)
    fleet.observe(0, report, 0.0)
    fleet.observe(0, replace(report, num_ranks=0), 1.0)
    assert fleet.is_alive.tolist() == [False, True]
    assert (fleet.num_alive, fleet.has_lost(0)) == (1, False)
    assert fleet.num_requests.tolist() == [1, 0]
    fleet.observe(0, report, 2.0)
    assert fleet.is_alive.tolist() == [True, True]
    fleet.lose(0)
    fleet.observe(0, report, 3.0)
    assert fleet.is_alive.tolist() == [False, True], "a report that was on its way when it died"


def test_an_engine_that_refuses_a_model_is_no_candidate_for_it_unless_all_do() -> None:
    fleet, report = Fleet(2, 8), make_report()
    assert fleet.serving("m", 0.0) is fleet
    fleet.observe(0, replace(report, refused={"m": 10.0}), 0.0)
    assert fleet.serving("n", 0.0) is fleet
    others = fleet.serving("m", 9.0)
    assert (others.is_alive.tolist(), others.num_alive) == ([False, True], 1)
    assert (fleet.is_alive.tolist(), fleet.num_alive) == ([True, True], 2)
    assert fleet.serving("m", 10.0).is_alive.tolist() == [True, True], "it is tried again"
    fleet.observe(1, replace(report, refused={"m": 20.0}), 0.0)
    assert fleet.serving("m", 9.0).is_alive.tolist() == [True, True]
    fleet.observe(0, report, 1.0)
    assert fleet.serving("m", 9.0).is_alive.tolist() == [True, False]
    fleet.lose(0)
    assert fleet.serving("m", 9.0).is_alive.tolist() == [False, True], "better than none"
    fleet.lose(1)
    fleet.restore(1)
    assert fleet.serving("m", 9.0) is fleet


def test_the_cost_model_that_one_engine_reported_last_holds_for_all() -> None:
    fleet, shape = Fleet(3, 8), make_shape()
    fleet.observe(0, make_report(costs=COSTS), 0.0)
    fast, prime = fleet.step_seconds(shape), fleet.size_costs(shape).prime
    fleet.observe(1, make_report(costs=SLOW_COSTS), 0.0)
    assert fleet.step_seconds(shape) == pytest.approx(2 * fast)
    assert fleet.size_costs(shape).prime == pytest.approx(2 * prime), "kept costs follow the reports"
    fleet.lose(1)
    assert fleet.step_seconds(shape) == pytest.approx(2 * fast)


def test_pages_on_their_way_are_expected_until_they_come() -> None:
    fleet, shape = Fleet(2, 8), make_shape(template="t", num_keyframes=3)

    def pages() -> list[list[float]]:
        found = fleet.templates.pages("t", 3)
        to_prime = found.prime_first + found.prime_later
        return [found.loads_first.tolist(), found.is_missing.tolist(), to_prime.tolist()]

    fleet.observe(0, make_report(costs=COSTS), 0.0)
    assert pages() == [[0, 0], [1, 1], [3, 3]]
    fleet.sent(0, shape, 0.0)
    assert pages() == [[0, 0], [1, 1], [0, 3]]
    first = fleet.priming_seconds[0]
    assert first > 0
    fleet.sent(0, shape, 0.0)
    assert fleet.priming_seconds[0] == first, "both wait for the same pages"
    fleet.observe(0, make_report(num_received=2, requests=[load()], resident_pages=[ResidentPages("t", 1, 0)]), 1.0)
    assert pages() == [[0, 0], [1, 1], [0, 3]]
    fleet.observe(0, make_report(num_received=2, requests=[load()], resident_pages=[ResidentPages("t", 2, 1)]), 2.0)
    assert pages() == [[1, 0], [0, 1], [0, 3]]
    fleet.observe(0, make_report(num_received=2, resident_pages=[ResidentPages("t", 0, 0)]), 3.0)
    assert len(fleet.templates) == 0


def test_an_idle_engine_makes_no_pages() -> None:
    fleet = Fleet(1, 8)
    fleet.sent(0, make_shape(template="t"), 0.0)
    fleet.observe(0, make_report(num_received=1, requests=[load()]), 0.0)
    assert len(fleet.templates) == 1
    fleet.observe(0, make_report(num_received=1), 1.0)
    assert len(fleet.templates) == 0, "the edit was given up before they were made"


def test_memory_is_bounded() -> None:
    fleet = Fleet(1, 8)
    for i in range(500):
        fleet.sent(0, make_shape(template=f"t{i}", image_tokens=100 + i), 0.0)
        fleet.observe(0, make_report(num_received=i + 1, requests=[load()]), 0.0)
    assert len(fleet.templates) == MAX_EXPECTED
    assert len(fleet.costs._sizes) <= MAX_SIZES
    assert not fleet._pending[0]


def test_a_higher_class_does_not_queue_behind_those_that_wait_in_lower_ones() -> None:
    running = [replace(load(10, 0.01), is_running=True, priority=1)] * 8
    fleet = Fleet(1, max_num_seqs=8)
    fleet.observe(0, make_report(requests=[*running, *[replace(load(10, 0.01), priority=1)] * 20], costs=COSTS), 0.0)
    assert fleet.before(1, 0.0) is fleet, "an equal waits for its turn"
    higher = fleet.before(0, 0.0)
    assert higher.slots.free_at[0] == pytest.approx(0.88), "when those that run are done: one step is under way"
    assert fleet.slots.free_at[0] > 2 * higher.slots.free_at[0]
    fleet.sent(0, make_shape(), 0.0)
    assert fleet.before(0, 0.0).slots.num_placed[0] == 1 + higher.slots.num_placed[0], (
        "requests on the way are of its own class"
    )
    fleet.lose(0)
    assert fleet.before(0, 0.0) is fleet


def test_an_owner_does_not_queue_behind_anothers_flood() -> None:
    running = [replace(load(10, 0.01), is_running=True, owner="a")] * 8
    fleet = Fleet(1, max_num_seqs=8)
    fleet.observe(0, make_report(requests=[*running, *[replace(load(10, 0.01), owner="a")] * 20], costs=COSTS), 0.0)
    for _ in range(20):
        fleet.sent(0, dataclasses.replace(make_shape(), owner="a"), 0.0)
    assert fleet.before(0, 0.0, "a") is fleet
    other = fleet.before(0, 0.0, "b")
    assert other.held_seconds[0] == pytest.approx(9 * 0.01), "those that run, and the first of those that wait"
    assert other.slots.free_at[0] < fleet.slots.free_at[0] / 4


def test_a_request_that_has_waited_for_long_is_not_overtaken() -> None:
    waiting = [replace(load(10, 0.01), priority=2, arrival=float(second)) for second in range(20)]
    fleet = Fleet(1, max_num_seqs=1)
    fleet.observe(0, make_report(requests=waiting, costs=COSTS), 20.0)
    some, all_give_way = (fleet.before(priority, 2 * CLASS_SECONDS + 9.5) for priority in (0, -1))
    assert fleet.before(0, 2 * CLASS_SECONDS + 30.0) is fleet
    assert some.held_seconds[0] == pytest.approx(10 * 0.01), "those that came first"
    assert all_give_way.held_seconds[0] == 0.0


def test_a_higher_class_counts_requests_sent_long_after_the_last_report() -> None:
    fleet = Fleet(1, max_num_seqs=1)
    fleet.observe(0, make_report(requests=[load(10, 1.0)], base_seconds=0.006, costs=COSTS), 0.0)
    for priority in (0, 0, 1):
        fleet.sent(0, dataclasses.replace(make_shape(), priority=priority), 5.0)
    alike = Fleet(1, max_num_seqs=1)
    alike.observe(0, make_report(requests=[load(10, 1.0)], base_seconds=0.006, costs=COSTS), 0.0)
    for _ in range(2):
        alike.sent(0, make_shape(), 5.0)
    assert fleet.before(0, 5.0).slots.free_at[0] == pytest.approx(alike.slots.free_at[0]), (
        "as if the lower one had not been sent"
    )

    fleet.observe(0, make_report(num_received=3), 20.0)
    for priority in (0, 0, 1):
        fleet.sent(0, dataclasses.replace(make_shape(), priority=priority), 1000.0)
    alone = fleet.step_seconds(make_shape()) + float(fleet.base_seconds[0])
    assert fleet.before(0, 1000.0).slots.free_at[0] == pytest.approx(1000.0 + 2 * 28 * alone, rel=0.05)


@pytest.mark.parametrize("num_on_their_way", [0, 3])
def test_the_end_of_a_long_queue_is_predicted_from_sums_nearly_as_one_by_one(
    num_on_their_way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Random(5)
    loads = [load(draw.randint(4, 50), draw.uniform(0.005, 0.02), draw.uniform(0.0, 0.3)) for _ in range(1000)]

    def free_at() -> float:
        fleet = Fleet(1, max_num_seqs=8)
        for _ in range(num_on_their_way):
            fleet.sent(0, make_shape(), 1.0)
        fleet.observe(0, make_report(requests=loads, base_seconds=0.006, costs=COSTS), 1.0)
        assert fleet.num_requests[0] == 1000 + num_on_their_way
        assert fleet.slots.num_placed[0] >= 6
        return float(fleet.slots.free_at[0])

    from_sums = free_at()
    monkeypatch.setattr("core.routing.fleet.MAX_SIMULATED", 2000)
    one_by_one = free_at()
    assert from_sums != one_by_one
    longest = max(each.steps_left * (0.006 + 8 * 0.02) for each in loads)
    assert from_sums == pytest.approx(one_by_one, abs=longest)
    assert from_sums == pytest.approx(one_by_one, rel=0.01)


def test_a_report_is_applied_before_what_was_sent_after_it_is_lined_up() -> None:
    """Slots are computed when they are read, from the last report; reading them in between changes nothing."""
    fleets = [Fleet(2, max_num_seqs=2) for _ in range(2)]
    for fleet, is_read in zip(fleets, (True, False), strict=True):
        for second in range(3):
            requests = [load(9 - second, 0.1), load(19, 0.1), load(5, 0.2)]
            fleet.observe(0, make_report(num_received=3 + second, requests=requests, base_seconds=0.1), float(second))
            assert not is_read or fleet.slots.free_at[0] > 0
            fleet.sent(0, make_shape(), second + 0.5)
            assert not is_read or fleet.slots.free_at[0] > 0
            fleet.sent(1, make_shape(), second + 0.5)
    assert [fleet.slots.free_at.tolist() for fleet in fleets] == [fleets[0].slots.free_at.tolist()] * 2
    assert [fleet.slots.steps.tolist() for fleet in fleets] == [fleets[0].slots.steps.tolist()] * 2
