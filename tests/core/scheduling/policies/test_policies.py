"""Scheduling policies change nothing but their own state, and the scheduler refuses what cannot be carried out."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import get_args

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, make_edit, make_mask_request, make_selecting_edit, with_spec
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.clockwork import Clockwork
from core.config import SchedulerConfig, SchedulingPolicyName
from core.errors import ConfigError, InvalidRequestError
from core.failure import Failure
from core.late_adapters import LateAdapters
from core.messages.engine import Aborted, Finished, UseAdapters
from core.messages.worker import Batch, BatchResult
from core.patches import Patch
from core.scheduling.dispatch import Decision, Dispatch, GiveUp
from core.scheduling.policies import make_policy
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.request import Request
from core.scheduling.scheduler import StepScheduler
from core.scheduling.view import View

POLICIES = get_args(SchedulingPolicyName)


def _state(request: Request) -> tuple[object, ...]:
    """All of a request that a policy could change; a copy."""
    names = (name for name in request.progress.__slots__ if name != "workflow")
    return request.id, request.status, request.num_moving, *(deepcopy(getattr(request.progress, n)) for n in names)


@dataclass
class Observed(SchedulingPolicy):
    """Asks another policy twice, and checks that the first time has changed nothing."""

    inner: SchedulingPolicy
    arrived: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        before = [_state(request) for request in view.requests.live()]
        decisions = self.inner.choose(view, now)
        assert [_state(request) for request in view.requests.live()] == before
        again = self.inner.choose(view, now)
        assert len(again) == len(decisions)
        assert all(each in decisions for each in again), "perhaps in another order"
        for decision in decisions:
            if isinstance(decision, Dispatch):
                assert len(set(decision.ranks)) == len(decision.ranks)
                assert view.open_ranks.issuperset(decision.ranks)
        return decisions

    def on_arrival(self, request: Request) -> None:
        self.arrived.append(request.id)
        self.inner.on_arrival(request)

    def on_adapters(self, request: Request) -> None:
        self.inner.on_adapters(request)

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        assert batch.id == result.batch_id
        self.batches.append(batch.id)
        self.inner.on_result(batch, result)

    def on_end(self, request_id: str) -> None:
        self.ended.append(request_id)
        self.inner.on_end(request_id)


@pytest.mark.parametrize("name", [*POLICIES, "benchmarks.baselines.clockwork:Clockwork"])
@given(data=st.data(), num_ranks=st.integers(1, 3))
def test_every_policy_ends_every_request_and_changes_nothing_itself(
    name: str, data: st.DataObject, num_ranks: int
) -> None:
    """Requests come, abort and end at random moments, on ranks that answer in any order. Some wait for adapters."""
    policy, workers = Observed(make_policy(name)), FakeWorkers(num_ranks)
    scheduler = StepScheduler(SchedulerConfig(max_num_seqs=3), {"m": MODEL}, num_ranks, policy=policy)
    added, late, outputs, batches = list[str](), list[str](), [], list[int]()
    for turn in range(400):
        if turn < 12 and data.draw(st.booleans()):
            steps, previews = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2))
            added.append(f"r{turn}")
            make = data.draw(st.sampled_from([make_edit, make_edit, make_selecting_edit, make_mask_request]))
            request = make(added[-1], steps=steps, partial_images=previews, arrival=float(turn))
            if make is not make_mask_request and data.draw(st.integers(0, 3)) == 0:
                request, late = with_spec(request, late=LateAdapters(data.draw(st.integers(0, 4)))), [*late, added[-1]]
            scheduler.add(request)
        while late and (turn >= 12 or data.draw(st.booleans())):
            scheduler.use_adapters(UseAdapters(request_id=late.pop(), patches=(Patch("hat"),)))
        if turn < 12 and added and data.draw(st.integers(0, 5)) == 0:
            scheduler.abort([data.draw(st.sampled_from(added))])
        plan = scheduler.schedule(float(turn))
        while plan is not None:
            workers.submit(plan)
            batches += [batch.id for batch in plan.batches]
            plan = scheduler.schedule(float(turn), again=True)
        for rank in data.draw(st.permutations(range(num_ranks))) if turn < 12 else range(num_ranks):
            for result in workers.run_one(rank):
                if isinstance(result, BatchResult):
                    scheduler.apply(result)
                else:
                    scheduler.apply_transfer(result)
        scheduler.check_integrity()
        outputs += [output for output in scheduler.take_outputs() if isinstance(output, Finished | Aborted)]
        if turn >= 12 and not scheduler.num_requests:
            break
    assert sorted(output.request_id for output in outputs) == sorted(added)
    assert policy.arrived == added
    assert sorted(policy.ended) == sorted(added)
    assert sorted(policy.batches) == sorted(batches)


class FirstRank(SchedulingPolicy):
    """Gives all that can run there to rank 0; after what it is told to give up."""

    def __init__(self, *give_up: str) -> None:
        self.give_up = set(give_up)
        self.shown = list[frozenset[int]]()  # open ranks, by pass

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        self.shown.append(view.open_ranks)
        hopeless = [each for each in view.requests.live() if each.id in self.give_up]
        if hopeless:
            return [GiveUp(each, Failure("overloaded", "too late")) for each in hopeless]
        return [
            Dispatch(((request, node),), (0,))
            for request in view.requests.live()
            for node in view.ready(request)
            if view.can_run(request, node, (0,))
        ]


def test_a_rank_that_got_nothing_is_asked_about_again_when_something_has_happened() -> None:
    policy, workers = FirstRank(), FakeWorkers(2)
    scheduler = StepScheduler(SchedulerConfig(max_ahead_ms=1e6), {"m": MODEL}, 2, policy=policy)
    scheduler.add(make_edit("a"))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    workers.submit(plan)
    while (plan := scheduler.schedule(0.0, again=True)) is not None:
        workers.submit(plan)
    first, *others = policy.shown
    assert first == {0, 1}
    assert set(others) == {frozenset({0})}, "rank 0 is nearly idle"
    for result in workers.run_one(0):
        assert isinstance(result, BatchResult)
        scheduler.apply(result)
    scheduler.schedule(1.0)
    assert 1 in policy.shown[-1]


def test_others_begin_at_once_in_the_place_of_a_request_that_is_given_up() -> None:
    scheduler = StepScheduler(SchedulerConfig(max_num_seqs=1), {"m": MODEL}, policy=FirstRank("a"))
    scheduler.add(make_edit("a"))
    scheduler.add(make_edit("b"))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert {item.request_id for batch in plan.batches for item in batch.items} == {"b"}


class Fixed(SchedulingPolicy):
    """Decides what the test says."""

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = decisions

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        return self.decisions


@pytest.mark.parametrize(
    ("node", "ranks", "reason"),
    [
        ("text_encode", (), "needs a rank"),
        ("text_encode", (1,), "not open"),
        ("text_encode", (0, 0), "named twice"),
        ("denoise", (0,), "denoise of a is not ready"),
        ("decode", (0,), "decode of a is not ready"),
    ],
)
def test_a_decision_that_cannot_be_carried_out_is_refused(node: str, ranks: tuple[int, ...], reason: str) -> None:
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL})
    scheduler.add(make_edit("a"))
    request = scheduler._requests["a"]
    scheduler._policy = Fixed(Dispatch(((request, request.workflow.node(node)),), ranks))
    with pytest.raises(AssertionError, match=reason):
        scheduler.schedule(0.0)
    assert request.progress.num_in_flight == 0


def test_a_batch_of_two_ops_is_refused() -> None:
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL})
    scheduler.add(make_edit("a"))
    request = scheduler._requests["a"]
    nodes = [request.workflow.node(name) for name in ("text_encode", "image_encode")]
    scheduler._policy = Fixed(Dispatch(tuple((request, node) for node in nodes), (0,)))
    with pytest.raises(AssertionError, match="one op and one set of components"):
        scheduler.schedule(0.0)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="Supported values are: 'default'"):
        msgspec.structs.replace(SchedulerConfig(), policy="fastest")


def test_a_policy_is_named_by_the_path_of_its_class() -> None:
    config = SchedulerConfig(policy="benchmarks.baselines.clockwork:Clockwork")
    assert isinstance(StepScheduler(config, {"m": MODEL})._policy, Clockwork)


class NeedsArguments(Fixed):
    def __init__(self, number: int) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fastest", "the policies are default, neustream, ddit, lego, and module:Class"),
        ("no.such.module:Policy", "No module named 'no'"),
        ("core.scheduling.policies.policy:NoPolicy", "no attribute 'NoPolicy'"),
        ("core.scheduling.policies.policy:SchedulingPolicy", "SchedulingPolicy is no policy"),
        ("core.scheduling.requests.request:Request", "Request is no policy"),
        (f"{__name__}:NeedsArguments", "made without arguments"),
    ],
)
def test_a_name_that_is_no_policys_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_policy(name)
