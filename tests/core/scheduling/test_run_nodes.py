"""Nodes of the op run in the scheduler: any graph of users' classes, on ranks that die, under every policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import get_args

import msgspec
import pytest
from fakes import MODEL, apply, make_edit
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_that_die import DIED, Site
from run_workflows import CLASSES, DIAMOND, DOUBLING, SLEEPING, WAYWARD, mixer, random_workflow, run_request

from core.config import SchedulerConfig, SchedulingPolicyName
from core.failure import Failure
from core.graph.form import tensor
from core.graph.op import Port
from core.graph.workflow import Workflow
from core.handles import ArrayRef, LoadedComponent
from core.messages.engine import Aborted, EngineRequest, Failed, Finished, Output
from core.messages.specs import RunSpec
from core.messages.worker import BatchResult
from core.run_class import RunClass
from core.scheduling.ops.run import RUN
from core.scheduling.policies import make_policy
from core.scheduling.policies.planner.default import Default
from core.scheduling.ranks.quarantine import GOOD_BATCHES
from core.scheduling.scheduler import StepScheduler

POLICIES = get_args(SchedulingPolicyName)


def digests(site: Site, request: EngineRequest) -> list[int]:
    """Of all that its results were made from."""
    makers = dict.fromkeys(site.scheduler.workflows[request.workflow].outputs.values())
    return [site.workers.made[request.request_id, maker] for maker in makers]


def made_alone(request: EngineRequest, served: Sequence[Workflow]) -> list[int]:
    site = Site(Random(0), 1, Default(), served)
    site.scheduler.add(request)
    site.finish()
    return digests(site, request)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_two_hundred_requests_end_once_whatever_dies_or_is_aborted(num_ranks: int) -> None:
    random = Random(num_ranks)
    served = [random_workflow(random, f"w{index}", random.randint(1, 9)) for index in range(20)]
    site = Site(random, num_ranks, Default(), served)
    requests = [run_request(str(index), random.choice(served)) for index in range(200)]
    aborted = set[str]()
    for request in requests:
        site.scheduler.add(request)
        if random.random() < 0.1:
            aborted.add(random.choice(requests).request_id)
            site.scheduler.abort(aborted)
        if random.random() < 0.1:
            site.disturb(1)
    site.disturb(5)
    site.finish()
    assert sorted(site.ended) == sorted(request.request_id for request in requests)
    ends = {output.request_id: output for output in site.outputs}
    assert {name for name, output in ends.items() if isinstance(output, Aborted)} <= aborted
    finished = [request for request in requests if isinstance(ends[request.request_id], Finished)]
    assert len(finished) >= 200 - len(aborted)
    expected = {workflow.name: made_alone(run_request("alone", workflow), served) for workflow in served}
    for request in finished:
        assert digests(site, request) == expected[request.workflow]


@settings(max_examples=40)
@given(st.sampled_from(POLICIES), st.integers(0, 1 << 30), st.integers(1, 3), st.integers(0, 3))
def test_every_policy_ends_runs_beside_edits(name: str, seed: int, num_ranks: int, num_deaths: int) -> None:
    random = Random(seed)
    served = [random_workflow(random, f"w{index}", random.randint(1, 6)) for index in range(3)]
    site = Site(random, num_ranks, make_policy(name), served, max_num_seqs=3)
    runs = [run_request(f"run{index}", random.choice(served)) for index in range(5)]
    everything = [*runs, *(make_edit(f"edit{index}") for index in range(2))]
    random.shuffle(everything)
    for request in everything:
        site.scheduler.add(request)
    site.disturb(num_deaths)
    site.finish()
    assert sorted(site.ended) == sorted(request.request_id for request in everything)
    for request in runs:
        assert digests(site, request) == made_alone(request, served)


@settings(max_examples=25)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(0, 4))
def test_loops_of_classes_survive_deaths(seed: int, num_ranks: int, num_deaths: int) -> None:
    random = Random(seed)
    site = Site(random, num_ranks, Default(), (DOUBLING,))
    runs = [run_request(str(index), DOUBLING, rounds=(random.randint(1, 6),)) for index in range(4)]
    for request in runs:
        site.scheduler.add(request)
    site.disturb(num_deaths)
    site.finish()
    assert sorted(site.ended) == sorted(request.request_id for request in runs)
    for request in runs:
        assert digests(site, request) == made_alone(request, (DOUBLING,))


# ------------------------------------------------------------------------------------------------------ one by one


def make_site(num_ranks: int = 1, *served: Workflow, **limits: int) -> Site:
    return Site(Random(0), num_ranks, Default(), served or (DIAMOND,), **limits)


def until_loaded(site: Site) -> None:
    """The class that a first request needs is there on every rank."""
    site.scheduler.add(run_request("first", DIAMOND))
    site.finish()
    for _ in range(3):
        site.step()


def test_the_router_hears_which_classes_are_loaded() -> None:
    site = make_site(1)
    told = {load.name: load for load in site.scheduler.load_report().models if load.kind == "class"}
    assert {name: load.state for name, load in told.items()} == {each.name: "unloaded" for each in CLASSES}
    assert all(load.seconds > 0 for load in told.values())
    until_loaded(site)
    told |= {load.name: load for load in site.scheduler.load_report().models if load.kind == "class"}
    assert [name for name, load in told.items() if load.state == "loaded"] == ["mixer"]


def test_branches_run_on_several_ranks_at_once() -> None:
    site = make_site(3)
    until_loaded(site)
    for index in range(3):
        site.scheduler.add(run_request(str(index), DIAMOND))
    site.schedule()
    sent = [batch.ranks for queue in site.workers.queues for plan in queue for batch in plan.batches]
    assert {(0,), (1,), (2,)} <= set(sent)
    site.finish()


def test_no_more_requests_run_together_than_there_are_slots() -> None:
    site = make_site(1, max_num_seqs=2)
    until_loaded(site)
    for index in range(5):
        site.scheduler.add(run_request(str(index), DIAMOND))
    most = 0
    while site.scheduler.num_requests:
        site.step()
        most = max(most, site.scheduler.counts[0])
    assert most == 2


def test_the_request_that_is_to_blame_for_a_death_fails_alone_with_its_cause() -> None:
    site = make_site(1, DIAMOND, max_retries=0)
    until_loaded(site)
    for name in ("slow", "other"):
        site.scheduler.add(run_request(name, DIAMOND))
    site.schedule()
    cause = Failure("run_failed", "node top: class mixer took longer than its 60 s")
    site.workers.lose(0)
    site.scheduler.lose_rank(0, cause, culprit="slow")
    site.finish()
    ends = {output.request_id: output for output in site.outputs}
    assert ends["slow"] == Failed("slow", cause)
    assert isinstance(ends["other"], Finished), "it is no suspect: no retries are allowed here"


def overrun(site: Site, name: str, owner: str) -> Output:
    """How a request ends that passes a time limit."""
    site.scheduler.add(run_request(name, DIAMOND, owner=owner))
    site.schedule()
    if site.scheduler.num_requests:
        site.workers.lose(0)
        site.scheduler.lose_rank(0, Failure("run_failed", "it took longer than its 60 s"), culprit=name)
        site.check()
        site.join(0)
        for _ in range(3):
            site.step()
    site.check()
    return site.outputs[-1]


def test_a_class_is_refused_to_the_owner_whose_runs_keep_passing_its_time_limit() -> None:
    """However long its ranks have served, and to nobody else."""
    site = make_site(1, DIAMOND)
    until_loaded(site)
    kinds = [failure_kind(overrun(site, name, "a")) for name in ("1", "2", "3")]
    assert kinds == ["run_failed", "run_failed", "model_unavailable"]
    site.scheduler.add(run_request("other", DIAMOND, owner="b"))
    site.finish()
    assert isinstance(site.outputs[-1], Finished)


def test_a_class_is_not_refused_for_rare_runs_that_pass_its_time_limit() -> None:
    site = make_site(1, DIAMOND)
    until_loaded(site)
    for index in range(5):
        assert failure_kind(overrun(site, f"slow{index}", "a")) == "run_failed"
        for number in range(GOOD_BATCHES):
            site.scheduler.add(run_request(f"{index}-{number}", DIAMOND, owner="a"))
        site.finish()
        assert isinstance(site.outputs[-1], Finished)


def test_a_load_that_passes_its_time_limit_has_failed_however_long_its_rank_has_served() -> None:
    site = make_site(1, DIAMOND, max_retries=0)
    until_loaded(site)
    sleeper = next(each.key for each in CLASSES if each.name == "sleeper")
    site.scheduler.workflows["sleeping"] = SLEEPING
    site.scheduler.add(run_request("long", SLEEPING))
    while (0, sleeper) not in site.workers.loading:
        site.step()
    site.scheduler.add(run_request("beside", DIAMOND))
    site.schedule()
    site.workers.lose(0)
    site.scheduler.lose_rank(0, Failure("config", "it took longer than its 600 s"), culprit=sleeper)
    site.scheduler.add(run_request("next", SLEEPING))
    site.finish()
    ends = {output.request_id: output for output in site.outputs}
    assert {name: failure_kind(ends[name]) for name in ("long", "next", "beside")} == {
        "long": "model_unavailable",
        "next": "model_unavailable",
        "beside": "",
    }


def test_the_size_that_a_class_declares_makes_room_for_its_first_load() -> None:
    first, second = (RunClass(name=name, path=f"a:{name}", nbytes=60) for name in ("mixer", "shouter"))
    limits = SchedulerConfig(model_bytes=100)
    scheduler = StepScheduler(limits, {"m": MODEL}, classes=(first, second), workflows=(DIAMOND,))
    residency = scheduler.ranks.residency
    residency.join_all([(0, [LoadedComponent(first.key, 60)])])
    assert residency.excess([second.key], residency.present((0,))) == 20


def failure_kind(output: Output) -> str:
    return output.failure.kind if isinstance(output, Failed) else ""


def test_a_rank_may_take_as_long_as_the_limits_of_what_it_runs() -> None:
    site = make_site(1)
    until_loaded(site)
    site.scheduler.add(run_request("a", DIAMOND))
    site.schedule()
    assert site.scheduler.busy_ranks([0])[0].allowed == 60.0
    site.finish()
    site.scheduler.add(make_edit("edit"))
    site.schedule()
    assert site.scheduler.busy_ranks([0])[0].allowed == 0.0
    site.finish()


def sized(name: str, *most: int) -> Workflow:
    """One node that takes a vector of any length up to a limit."""
    form = tensor("float32", *most)
    node = replace(mixer("only"), takes=(Port.of("a", form),), given={"a": "vector"})
    return Workflow(name, (node,), {"y": "only"}, inputs=(Port.of("vector", form),), output_ports={"y": "y"})


def test_costs_are_learnt_by_class_and_size() -> None:
    site = make_site(1, sized("sized", 4000))
    for index in range(40):
        length = 500 + 3500 * (index % 2)
        request = run_request(str(index), sized("sized", 4000))
        request = msgspec.structs.replace(
            request, spec=msgspec.structs.replace(request.spec, inputs={"vector": ArrayRef(0, 0, (length,), "float32")})
        )
        site.scheduler.add(request)
        while site.scheduler.num_requests:
            site.schedule()
            for loaded in site.workers.finish_loads():
                site.scheduler.apply_load(loaded, 0.0)
            for result in site.workers.run_one(0):
                assert isinstance(result, BatchResult)
                apply(site.scheduler, msgspec.structs.replace(result, seconds=length * 1e-5))
        site.check()
    report = next(costs for costs in [site.scheduler.load_report().costs] if costs)
    (line,) = [line for line in report.lines if line.op == "run"]
    assert line.model == "mixer"
    predictor, keys = site.scheduler._predictor, site.scheduler._bindings.keys("mixer", "class")
    site.scheduler.add(run_request("next", sized("sized", 4000)))
    request = site.scheduler._requests["next"]
    work = request.work(request.workflow.nodes[0])
    assert work.queries == (4000,)
    assert predictor.op_seconds(keys, RUN, work) == pytest.approx(0.04, rel=0.05)


def test_the_work_of_a_node_is_what_its_inputs_have_once_they_are_made() -> None:
    site = make_site(1)
    until_loaded(site)
    site.scheduler.add(run_request("a", DIAMOND))
    request = site.scheduler._requests["a"]
    end = request.workflow.node("end")
    assert request.work(end).queries == (32,), "as declared"
    request.note_sizes(request.workflow.node("left"), {"y": 3, "mean": 1})
    assert request.work(end).queries == (19,)
    site.finish()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (
            msgspec.structs.replace(run_request("a", DIAMOND), workflow="inpaint", rounds=(1,)),
            "inpaint makes a picture",
        ),
        (msgspec.structs.replace(make_edit("a"), workflow="diamond", rounds=()), "asks for a picture"),
        (
            msgspec.structs.replace(run_request("a", DIAMOND), spec=RunSpec(inputs={}, outputs={})),
            "diamond takes vector",
        ),
        (msgspec.structs.replace(run_request("a", WAYWARD), workflow="diamond"), "has no input how; there are vector"),
    ],
)
def test_a_request_that_its_workflow_cannot_serve_is_refused(request_: EngineRequest, reason: str) -> None:
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL}, classes=CLASSES, workflows=(DIAMOND, WAYWARD))
    scheduler.add(request_)
    (failed,) = scheduler.take_outputs()
    assert isinstance(failed, Failed)
    assert failed.failure.kind == "invalid_request"
    assert reason in failed.failure.message


@pytest.mark.parametrize(("shape", "dtype"), [((17,), "float32"), ((4, 4), "float32"), ((4,), "float64")])
def test_an_array_that_is_not_as_declared_is_refused(shape: tuple[int, ...], dtype: str) -> None:
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL}, classes=CLASSES, workflows=(DIAMOND,))
    spec = msgspec.structs.replace(run_request("a", DIAMOND).spec, inputs={"vector": ArrayRef(0, 0, shape, dtype)})
    scheduler.add(msgspec.structs.replace(run_request("a", DIAMOND), spec=spec))
    (failed,) = scheduler.take_outputs()
    assert isinstance(failed, Failed)
    assert failed.failure.param == "vector"


def test_a_run_beside_too_many_deaths_fails() -> None:
    site = make_site(2, max_retries=1)
    until_loaded(site)
    site.scheduler.add(run_request("a", DIAMOND))
    for _ in range(2):
        site.schedule()
        rank = next(iter(site.scheduler.busy_ranks(range(2))))
        site.kill(rank)
        site.join(rank)
        for loaded in site.workers.finish_loads():
            site.scheduler.apply_load(loaded, 0.0)
    site.finish()
    (end,) = [output for output in site.outputs if output.request_id == "a"]
    assert isinstance(end, Failed)
    assert end.failure.kind == "rank_dead"
    assert DIED.message in end.failure.message
