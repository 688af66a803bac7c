"""The policies default and ddit: which ranks compute which steps, in simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import mode
from typing import Any

import msgspec
import pytest
from cache_kit import SCHEME, make_masked
from fakes import MODEL, FakeWorkers, make_edit, make_hires_edit, make_selecting_edit
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines.former.step_batching import StepBatching
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.durations import Durations
from benchmarks.simulation.engine import Ranks, SimulatedEngine
from benchmarks.simulation.machine import FrozenCosts
from benchmarks.simulation.ranks import BatchEnded, RankClocks
from core.config import CacheConfig, SchedulerConfig, SchedulingPolicyName
from core.costs.useful_degree import useful_degree
from core.failure import Failure
from core.graph.work import Work
from core.handles import LoadedComponent, ModelKey
from core.messages.engine import EngineRequest, Finished, Output
from core.messages.worker import Batch, BatchResult, CostSample, StepPlan, Transfer
from core.scheduling.policies.buddies import Buddies
from core.scheduling.policies.planner.default import Default
from core.scheduling.policies.planner.predictions import OVERTAKEN, Predictions
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.scheduler import StepScheduler

SMALL, MIDDLE, LARGE = 88, 280, 1048
"""Tokens of a step, 24 of them text."""

SPEED = {
    SMALL: {1: 1.0, 2: 0.9, 4: 0.8},
    MIDDLE: {1: 1.0, 2: 1.95, 4: 2.1},
    LARGE: {1: 1.0, 2: 1.8, 4: 3.4},
}
SECONDS = {SMALL: 0.1, MIDDLE: 0.4, LARGE: 1.2}
DECODE = 0.1


@dataclass(frozen=True)
class Times(Durations):
    """Items of a step run one after the other, unless `shares`: then as the longest of them."""

    shares: bool = False
    decode: float = DECODE
    overrun: float = 1.0  # of decoding, as a multiple of what is predicted

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        if batch.op != "denoise":
            return self.decode * self.overrun if batch.op == "decode" else 0.0
        seconds = [SECONDS[tokens] / SPEED[tokens].get(len(batch.ranks), 1.0) for tokens in work.queries]
        return max(seconds) if self.shares else sum(seconds)

    def transfer_seconds(self, transfer: Transfer) -> float:
        return 0.001


@dataclass
class Step:
    """A step that was made."""

    started: float
    ended: float
    requests: tuple[str, ...]
    ranks: tuple[int, ...]


class CheckedClocks(RankClocks):
    """Notes the steps; no request may have two of them at once on different ranks."""

    def __init__(self, num_ranks: int, durations: Durations) -> None:
        super().__init__(num_ranks, durations)
        self.steps = list[Step]()
        self._last: dict[str, Step] = {}

    def submit(self, plan: StepPlan, seconds_of: Any, load_seconds: Any, now: float) -> Any:
        events = super().submit(plan, seconds_of, load_seconds, now)
        for event in events:
            if isinstance(event, BatchEnded) and event.batch.op == "denoise":
                self._note(event)
        return events

    def _note(self, event: BatchEnded) -> None:
        names = tuple(item.request_id for item in event.batch.items)
        step = Step(event.started, event.when, names, event.batch.ranks)
        for name in names:
            before = self._last.get(name)
            assert before is None or before.ended <= step.started + 1e-9, "two steps of a request at once"
            self._last[name] = step
        self.steps.append(step)


@dataclass
class Site:
    """A simulated engine that knows the speeds of all degrees."""

    policy: SchedulingPolicyName
    num_ranks: int
    times: Times = field(default_factory=Times)
    slots: int = 64
    is_profiled: bool = True
    ahead: bool = False
    max_degree: int = 64
    models: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"m": ()})  # name -> its ranks; (): all

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            policy=self.policy,
            max_num_seqs=self.slots,
            max_plans_in_flight=2 if self.ahead else 1,
            max_ahead_ms=60000.0,
            max_degree=self.max_degree,
            model_bytes=1 if any(self.models.values()) else 0,
        )
        loaded = {name: LoadedComponent(ModelKey(name, "transformer"), 1) for name in self.models if self.models[name]}
        infos = {
            name: msgspec.structs.replace(
                MODEL, name=name, page_scheme=SCHEME, components=(loaded[name].key,) if name in loaded else ()
            )
            for name in self.models
        }
        cache = CacheConfig(host_bytes=10**9)
        self.scheduler = StepScheduler(config, infos, self.num_ranks, cache, sizes=loaded.values())
        started = {
            rank: [loaded[name] for name in loaded if rank in self.models[name]] for rank in range(self.num_ranks)
        }
        samples = [each for name in self.models for each in self._samples(name)] if self.is_profiled else ()
        self.scheduler.learn(samples, started.items())
        self.clock, self.ends, self.outputs = Clock(), dict[str, float](), list[Output]()
        self.engine = SimulatedEngine(self.clock, self.scheduler, self.times, self._note, Ranks())
        self.clocks = self.engine.clocks = CheckedClocks(self.num_ranks, self.times)

    def _samples(self, model: str = "m") -> list[CostSample]:
        steps = [
            CostSample(model, "denoise", Work.of([tokens]), seconds / speed, is_profile=True, degree=degree)
            for tokens, seconds in SECONDS.items()
            for degree, speed in SPEED[tokens].items()
        ]
        pairs = [
            CostSample(model, "denoise", Work.of([t, t]), s * (1 if self.times.shares else 2), True)
            for t, s in SECONDS.items()
        ]
        return [*steps, *pairs, CostSample(model, "decode", Work.of([256]), self.times.decode, is_profile=True)]

    def _note(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends, "a second terminal output"
            self.outputs.append(output)
            self.ends[output.request_id] = self.clock.now

    def serve(self, requests: Sequence[EngineRequest]) -> dict[str, float]:
        """Request id -> when it ended."""
        for request in requests:
            self.clock.at(request.arrival, lambda request=request: self.engine.add(request))  # type: ignore[misc]
        self.clock.run()
        self.scheduler.check_integrity()
        assert sorted(self.ends) == sorted(request.request_id for request in requests)
        return self.ends

    def ranks_of(self, name: str) -> list[tuple[int, ...]]:
        """The ranks of its steps."""
        return [step.ranks for step in self.clocks.steps if name in step.requests]


def picture(name: str, tokens: int, steps: int = 6, arrival: float = 0.0, **changes: Any) -> EngineRequest:
    """An exact picture whose steps have so many tokens."""
    return make_edit(name, steps=steps, arrival=arrival, num_tokens=tokens - 24, **changes)


POLICIES: list[SchedulingPolicyName] = ["ddit", "default"]


# ------------------------------------------------------------------------------------------------------ properties

DRAWN = st.lists(
    st.tuples(st.sampled_from([SMALL, MIDDLE, LARGE]), st.integers(1, 8), st.floats(0, 20), st.sampled_from("ab")),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(
    drawn=DRAWN,
    num_ranks=st.integers(1, 9),
    slots=st.sampled_from([2, 64]),
    ahead=st.booleans(),
    times=st.builds(Times, st.booleans(), st.sampled_from([DECODE, 0.5]), st.sampled_from([0.5, 1.0, 8.0])),
)
def test_every_request_ends_and_groups_are_sets_of_buddies(
    policy: SchedulingPolicyName, drawn: list[Any], num_ranks: int, slots: int, ahead: bool, times: Times
) -> None:
    site = Site(policy, num_ranks, times, slots=slots, ahead=ahead)
    site.serve([picture(str(i), t, steps, at, owner=owner) for i, (t, steps, at, owner) in enumerate(drawn)])
    assert {type(output) for output in site.outputs} == {Finished}
    sets = [each for size in (1, 2, 4, 8) for each in Buddies(range(num_ranks)).sets(size)]
    assert {step.ranks for step in site.clocks.steps} <= set(sets)
    for index, (tokens, steps, _, _) in enumerate(drawn):
        assert len(site.ranks_of(str(index))) == steps
        if useful_degree({d: 1 / s for d, s in SPEED[tokens].items()}) == 1:
            assert {len(ranks) for ranks in site.ranks_of(str(index))} == {1}


@settings(max_examples=40, deadline=None)
@given(drawn=DRAWN, num_ranks=st.integers(2, 8))
def test_a_request_is_overtaken_for_a_bounded_time(drawn: list[Any], num_ranks: int) -> None:
    """No request starts before one that came earlier by more than OVERTAKEN says, but for the one step for which the
    ranks of this may be busy.
    """
    site = Site("default", num_ranks)
    site.serve([picture(str(index), *values[:3]) for index, values in enumerate(drawn)])
    starts = {str(index): site.ranks_of(str(index)) and _start(site, str(index)) for index in range(len(drawn))}
    for first, (tokens, steps, arrival, _) in enumerate(drawn):
        patience = OVERTAKEN * (steps * SECONDS[tokens] + DECODE) / num_ranks
        for second, (_, _, later, _) in enumerate(drawn):
            if later > arrival + patience:
                assert starts[str(first)] <= starts[str(second)] + SECONDS[LARGE]


def _start(site: Site, name: str) -> float:
    return next(step.started for step in site.clocks.steps if name in step.requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stream_of_short_requests_starves_no_long_one(policy: SchedulingPolicyName) -> None:
    """The short ones alone need more than all ranks can do."""
    site, long = Site(policy, 2), picture("long", LARGE, steps=10)
    work = 10 * SECONDS[LARGE] + DECODE
    stream = [picture(f"short {index}", MIDDLE, 2, arrival=0.35 * index) for index in range(300)]
    ends = site.serve([*stream, long])
    assert ends["long"] < 2 * (OVERTAKEN * work / 2 + work)
    assert ends["long"] < max(ends.values()) / 1.1


# ------------------------------------------------------------------------------------------------------ what it decides


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lone_request_gets_its_useful_ranks_and_decodes_on_the_lowest(policy: SchedulingPolicyName) -> None:
    site = Site(policy, 8)
    site.serve([picture("large", LARGE)])
    assert set(site.ranks_of("large")[1:]) == {(0, 1, 2, 3)}
    (output,) = site.outputs
    assert isinstance(output, Finished)
    assert output.degrees[1:] == (4,) * 5


def test_each_pass_of_a_request_gets_the_ranks_that_are_useful_for_its_own_size() -> None:
    """Steps of the first are SMALL, of the second MIDDLE."""
    site = Site("default", 4)
    site.serve([make_hires_edit("a", steps=6, strength=1.0)])
    assert [len(ranks) for ranks in site.ranks_of("a")] == [1] * 6 + [2] * 6


def test_a_prediction_follows_the_mask_that_is_found() -> None:
    scheduler, predictions = Site("default", 4).scheduler, Predictions()
    scheduler.add(make_selecting_edit("a", predicted=SMALL - 24, is_mask_aware=True))
    view, request = scheduler._views.view(0.0), scheduler._requests["a"]
    before = predictions.of(view, request)
    request.note_mask(256, 0.9)
    assert predictions.of(view, request) == Predictions().of(view, request) != before


def test_ddit_starts_with_what_is_free_and_promotes_the_hungry() -> None:
    """The second takes what the first has left, and grows when that ends."""
    site = Site("ddit", 4)
    site.serve([picture("first", MIDDLE, 4), picture("second", LARGE, 20, arrival=0.01)])
    assert set(site.ranks_of("first")) == {(0, 1)}
    assert site.ranks_of("second")[0] == (2, 3)
    assert site.ranks_of("second")[-1] == (0, 1, 2, 3)


def test_ddit_serves_hungry_requests_before_waiting_ones() -> None:
    """The decoding of the first ends when the third waits already."""
    site = Site("ddit", 2)
    first, second = picture("first", SMALL, 10), picture("second", MIDDLE, 30, arrival=0.01)
    site.serve([first, second, picture("third", SMALL, 2, arrival=0.5)])
    assert (site.ranks_of("second")[0], site.ranks_of("second")[-1]) == ((1,), (0, 1))
    assert _start(site, "third") >= site.clocks.steps[-3].ended


def test_default_takes_ranks_back_when_others_need_them() -> None:
    site = Site("default", 4)
    others = [picture(str(index), LARGE, 4, arrival=2.0) for index in range(3)]
    site.serve([picture("first", LARGE, 40), *others])
    sizes = [len(ranks) for ranks in site.ranks_of("first")]
    assert sizes[1] == 4
    assert 1 in sizes[4:12]
    assert sizes[-1] == 4
    assert all(_start(site, str(index)) < 2.0 + SECONDS[LARGE] for index in range(3))


def test_short_requests_go_first_in_a_burst() -> None:
    requests = [picture(f"long {index}", LARGE, 10) for index in range(6)]
    requests += [picture(f"short {index}", MIDDLE, 2) for index in range(6)]
    ends, fifo = Site("default", 2).serve(requests), Site("ddit", 2).serve(requests)
    assert sum(ends.values()) < 0.8 * sum(fifo.values())
    assert max(ends.values()) < 1.05 * max(fifo.values())
    assert max(end for name, end in ends.items() if "short" in name) < 6.0


def test_ranks_that_cost_little_are_used_unless_more_requests_keep_coming() -> None:
    """Of two ranks each does 0.97 of one alone."""
    at_once = [picture(str(index), MIDDLE, 10) for index in range(9)]
    one_by_one = [picture(str(index), MIDDLE, 10, arrival=0.3 * index) for index in range(40)]
    degrees = list[int]()
    for requests in (at_once, one_by_one):
        site = Site("default", 2)
        site.serve(requests)
        degrees.append(mode(len(step.ranks) for step in site.clocks.steps if 6.0 < step.started < 11.0))
    assert degrees == [2, 1]


def test_a_request_that_is_due_begins_when_it_must_and_shorter_ones_go_first_until_then() -> None:
    """It is the longest."""
    others = [picture(str(index), MIDDLE, 10) for index in range(2)]
    for objective, last in ((6.0, "0"), (20.0, "urgent"), (None, "urgent")):
        site = Site("default", 2)
        urgent = msgspec.structs.replace(picture("urgent", LARGE, 6), objective=objective)
        ends = site.serve([*others, urgent])
        assert max(ends, key=lambda name: ends[name]) == last
        assert objective is None or ends["urgent"] <= objective


@pytest.mark.parametrize("policy", POLICIES)
def test_no_more_ranks_than_allowed_compute_a_step(policy: SchedulingPolicyName) -> None:
    site = Site(policy, 8, max_degree=2)
    site.serve([picture("large", LARGE)])
    assert max(len(step.ranks) for step in site.clocks.steps) == 2


def test_without_a_profile_every_step_has_one_rank() -> None:
    site = Site("default", 4, is_profiled=False)
    site.serve([picture(str(index), LARGE, 3) for index in range(3)])
    assert {len(step.ranks) for step in site.clocks.steps} == {1}


def test_small_requests_share_a_rank_beside_a_large_one() -> None:
    site = Site("default", 4, Times(shares=True))
    small = [picture(f"small {index}", SMALL, 8, arrival=3.0) for index in range(4)]
    site.serve([picture("large", LARGE, 30), *small])
    shared = [step for step in site.clocks.steps if step.requests[0].startswith("small")]
    (rank,) = {step.ranks[0] for step in shared}
    assert max(len(step.requests) for step in shared) >= 2
    first, last = shared[0].ended, shared[-1].started
    beside = [s.ranks for s in site.clocks.steps if "large" in s.requests and first < s.started < last]
    assert beside
    assert all(rank not in ranks for ranks in beside)
    assert site.ranks_of("large")[-1] == (0, 1, 2, 3)


def test_small_requests_wait_for_their_turn() -> None:
    """The second of them comes long after the large ones."""
    large = [picture(name, LARGE, 4) for name in ("a", "b")]
    small = [picture(f"small {at}", SMALL, 2, arrival=at) for at in (0.5, 3.0)]
    site = Site("default", 2, Times(shares=True))
    ends = site.serve([*large, *small])
    assert _start(site, "small 0.5") < 0.5 + SECONDS[LARGE] + DECODE
    assert _start(site, "small 3.0") >= min(ends["a"], ends["b"]) - DECODE


def test_small_requests_of_another_model_do_not_wait_for_ranks_that_lack_it() -> None:
    """Large ones of a have the ranks with a, and a small one of a waits in front of the one of b."""
    large = [msgspec.structs.replace(picture(name, LARGE, 30), model="a") for name in ("first", "second")]
    small = [msgspec.structs.replace(picture(f"small {name}", SMALL, 2, arrival=25.0), model=name) for name in "ab"]
    site = Site("default", 3, Times(shares=True), models={"a": (0, 1), "b": (2,)})
    site.serve([*large, *small])
    assert site.ranks_of("small b") == [(2,)] * 2
    assert _start(site, "small b") < 25.1


def test_requests_that_shared_the_last_rank_part_when_another_is_back() -> None:
    workers, scheduler = FakeWorkers(2), StepScheduler(SchedulerConfig(policy="default"), {"m": MODEL}, 2)
    scheduler.learn(Site("default", 2)._samples())
    scheduler.lose_rank(1, Failure("rank_dead", "killed"))
    for name in "abc":
        scheduler.add(picture(name, LARGE, 8))
    finished, used = list[Output](), set[tuple[int, ...]]()
    for turn in range(100):
        while (plan := scheduler.schedule(float(turn))) is not None:
            workers.submit(plan)
            used |= {batch.ranks for batch in plan.batches if turn > 5}
        if turn == 5:
            scheduler.join_rank(1, [])  # while they compute
        for rank in range(2):
            for result in workers.run_one(rank):
                if isinstance(result, BatchResult):
                    scheduler.apply(result)
                else:
                    scheduler.apply_transfer(result)
        finished += scheduler.take_outputs()
    assert [type(output) for output in finished] == [Finished] * 3
    assert (1,) in used


def test_the_ranks_of_one_that_dies_are_left_and_the_request_goes_on() -> None:
    workers, config = FakeWorkers(4), SchedulerConfig(policy="default")
    scheduler = StepScheduler(config, {"m": MODEL}, 4)
    scheduler.learn(Site("default", 4)._samples())
    scheduler.add(picture("a", LARGE, 8))
    finished, random = list[Output](), Random(0)
    for turn in range(200):
        if turn == 5:
            workers.lose(2)
            scheduler.lose_rank(2, Failure("rank_dead", "killed"))
        plan = scheduler.schedule(float(turn))
        if plan is not None:
            workers.submit(plan)
            assert turn <= 5 or all(2 not in batch.ranks for batch in plan.batches)
        for rank in random.sample(range(4), 4):
            for result in workers.run_one(rank) if rank not in workers.dead else ():
                if isinstance(result, BatchResult):
                    scheduler.apply(result)
                else:
                    scheduler.apply_transfer(result)
        finished += scheduler.take_outputs()
        scheduler.check_integrity()
    (output,) = finished
    assert isinstance(output, Finished)
    assert set(output.degrees) >= {2, 4}


# ------------------------------------------------------------------------------------------------------ masked edits


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(0, 12), st.sampled_from(["c0", "c1"])),
        min_size=1,
        max_size=10,
    )
)
def test_edits_of_unknown_time_are_served_on_one_rank_as_they_were(drawn: list[Any]) -> None:

    def plans(policy: SchedulingPolicy) -> list[StepPlan | None]:
        model = msgspec.structs.replace(MODEL, page_scheme=SCHEME)
        config = SchedulerConfig(max_num_seqs=3, max_plans_in_flight=1)
        cost = FrozenCosts()
        cost.is_frozen = True  # nothing is known of their time
        scheduler = StepScheduler(config, {"m": model}, 1, CacheConfig(host_bytes=10**9), cost=cost, policy=policy)
        workers, made = FakeWorkers(1), list[StepPlan | None]()
        for turn in range(40):
            for index, (active, steps, when, content) in enumerate(drawn):
                if when == turn:
                    scheduler.add(make_masked(str(index), content=content, steps=steps, active=active, arrival=when))
            made.append(scheduler.schedule(float(turn)))
            if made[-1] is not None:
                workers.submit(made[-1])
            for result in workers.run_one(0):
                if isinstance(result, BatchResult):
                    scheduler.apply(result)
                else:
                    scheduler.apply_transfer(result)
            scheduler.take_outputs()
        return made

    assert plans(Default()) == plans(StepBatching())
