"""Edits through users' classes in the scheduler: beside plain edits, on ranks that die, under every policy."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, get_args

import msgspec
import pytest
from fakes import MODEL, make_edit
from hypothesis import given, settings
from hypothesis import strategies as st
from load_reports import make_costs
from ranks_that_die import Site, check_finished
from run_workflows import CLASSES, DIAMOND, GUARDED, JUDGED, UNSHOWN, run_request

from core.config import SchedulerConfig, SchedulingPolicyName
from core.costs.load_report import CostLine, EngineCosts
from core.failure import Failure
from core.graph.catalog import with_registered
from core.graph.workflow import Workflow
from core.handles import ArrayRef, Artefact
from core.messages.engine import EngineRequest, Failed, Finished
from core.messages.specs import EditSpec
from core.messages.worker import Batch, ModelFailed
from core.routing.fleet import Fleet
from core.routing.request_shape import RequestShape
from core.routing.weights import Weights
from core.scheduling.ops.decode import Decode
from core.scheduling.ops.run import Run
from core.scheduling.policies import make_policy
from core.scheduling.policies.planner.default import Default
from core.scheduling.scheduler import StepScheduler

POLICIES = get_args(SchedulingPolicyName)
SERVED = (GUARDED, JUDGED, UNSHOWN, DIAMOND)


def guarded(request_id: str, workflow: Workflow = GUARDED, **changes: Any) -> EngineRequest:
    """An edit through a class. changes: other values in fields of its spec; else as for `make_edit`."""
    spec_fields = {name: changes.pop(name) for name in set(changes) & set(EditSpec.__struct_fields__)}
    edit = make_edit(request_id, **changes)
    value = Artefact(ArrayRef(0, 0, (8,), "uint8"), "value")
    mine = {"inputs": {"prompt": ArrayRef(0, 0, (11,), "uint8")}, "outputs": {"is_bad": value, "mean": value}}
    mine["outputs"] |= edit.picture.outputs
    spec = msgspec.structs.replace(edit.picture, **(mine | spec_fields))
    return msgspec.structs.replace(edit, workflow=workflow.name, spec=spec)


@settings(max_examples=25)
@given(st.sampled_from(POLICIES), st.integers(0, 1 << 30), st.integers(1, 3), st.integers(0, 3))
def test_every_policy_ends_them_beside_edits_and_runs_whatever_dies(
    name: str, seed: int, num_ranks: int, num_deaths: int
) -> None:
    random = Random(seed)
    site = Site(random, num_ranks, make_policy(name), SERVED, max_num_seqs=3)
    edits = [guarded(f"guarded{index}", steps=random.randint(1, 5), partial_images=index) for index in range(3)]
    edits += [guarded(f"judged{index}", JUDGED, partial_images=index) for index in range(2)]
    edits += [make_edit(f"edit{index}", partial_images=index) for index in range(2)]
    everything = [*edits, run_request("run", DIAMOND)]
    random.shuffle(everything)
    for request in everything:
        site.scheduler.add(request)
    site.disturb(num_deaths)
    site.finish()
    assert sorted(site.ended) == sorted(request.request_id for request in everything)
    for request in edits:
        check_finished(site, request, SERVED)


def test_only_the_class_writes_where_callers_see_it() -> None:
    places = [ArrayRef(0, offset, (256, 256, 3), "uint8") for offset in (1, 2)]
    request = guarded("a", steps=5, previews=tuple(map(Artefact, places)))
    site = Site(Random(0), 1, Default(), SERVED)
    site.scheduler.add(request)
    written, private = dict[ArrayRef, str](), set[str]()
    while site.scheduler.num_requests:
        site.schedule()
        batches = [batch for queue in site.workers.queues for plan in queue for batch in plan.batches]
        for item in (item for batch in batches for item in batch.items):
            if isinstance(item.work, Run):
                written |= {place: item.node for _, place in item.work.results.values()}
            elif isinstance(item.work, Decode):
                assert item.work.pixels is None
                private.add(item.node)
        site.step()
    assert private == {"preview", "decode"}
    pictures = {place: name for place, name in written.items() if len(place.shape) == 3}
    assert pictures == {request.picture.pixels: "guard"} | dict.fromkeys(places, "guard_preview")


def test_they_share_steps_with_plain_edits() -> None:
    site = Site(Random(0), 1, Default(), SERVED)
    site.scheduler.add(guarded("first"))
    site.finish()  # its class is loaded
    for index in range(2):
        site.scheduler.add(guarded(f"guarded{index}", steps=8))
        site.scheduler.add(make_edit(f"edit{index}", steps=8))
    shared = 0
    while site.scheduler.num_requests:
        site.schedule()
        batches = [batch for queue in site.workers.queues for plan in queue for batch in plan.batches]
        shared = max(shared, *(len(batch.items) for batch in batches if batch.op == "denoise"), 0, 0)
        site.step()
    assert shared == 4


def test_a_class_is_given_pictures_before_others_make_steps() -> None:
    """What ends a request goes first, the decode before the class, too."""
    site = Site(Random(0), 1, Default(), SERVED, max_plans_in_flight=1)
    site.scheduler.add(guarded("first"))
    site.finish()
    site.scheduler.add(guarded("a", steps=1))
    site.scheduler.add(make_edit("b", steps=50))
    while "a" not in site.ended:
        site.step()
    assert site.workers.steps_done("b") <= 4


@pytest.mark.parametrize(
    ("request_", "param", "reason"),
    [
        (guarded("a", UNSHOWN, partial_images=1), "partial_images", "shows no previews, which would not pass through"),
        (guarded("a", inputs={}), "prompt", "workflow guarded takes prompt"),
        (
            guarded("a", inputs={"prompt": ArrayRef(0, 0, (5000,), "uint8")}),
            "prompt",
            "its shape is .5000., and text of up to 4096 bytes",
        ),
        (guarded("a", width=1040), "size", "node guard, image: its shape is .256, 1040, 3.*ask for a smaller picture"),
        (guarded("a", JUDGED, height=1040), "size", "workflow judged, node guard, image"),
        (guarded("a", outputs=make_edit("a").picture.outputs), "outputs", "memory for its is_bad"),
        (msgspec.structs.replace(run_request("a", DIAMOND), workflow="guarded", rounds=(1,)), "workflow", "a picture"),
    ],
)
def test_a_request_that_its_workflow_cannot_serve_is_refused(request_: EngineRequest, param: str, reason: str) -> None:
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL}, classes=CLASSES, workflows=SERVED)
    scheduler.add(request_)
    (failed,) = scheduler.take_outputs()
    assert isinstance(failed, Failed)
    assert (failed.failure.kind, failed.failure.param) == ("invalid_request", param)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(failed.failure.message)


def test_what_the_scheduler_predicts_counts_the_class() -> None:
    site = Site(Random(0), 1, Default(), SERVED)
    for index in range(3):
        site.scheduler.add(guarded(str(index)))
        site.finish()
    predictor = site.scheduler._predictor
    site.scheduler.add(guarded("guarded"))
    site.scheduler.add(make_edit("plain"))
    after, plain = (predictor.work_left(site.scheduler._requests[name]).after for name in ("guarded", "plain"))
    assert after == pytest.approx(2 * plain, rel=0.1), "of the fakes, a decode takes as long as a class"
    request = site.scheduler._requests["guarded"]
    elements = 3 * 256 * 256 + len("a red shirt")
    assert request.work(request.workflow.node("guard")).queries == (elements,)


def test_what_admission_predicts_counts_the_class() -> None:
    workflows = with_registered(SERVED, {each.name for each in CLASSES})
    shape = RequestShape.of_request(guarded("a"), MODEL, workflows)
    assert Weights("guard", "class") in shape.needed
    (run,) = [each for each in shape.encodings if each.op == "run"]
    assert (run.model, run.image_tokens) == ("guard", 3 * 256 * 256 + len("a red shirt") + 1)
    fleet = Fleet(1, 8)
    line = CostLine("guard", "run", (0.25, 0.0, 0.0, 0.0, 0.0, 0.0))
    fleet.costs.observe(EngineCosts((*make_costs(other=0.5).lines, line), ()))
    plain = fleet.size_costs(RequestShape.of_request(make_edit("b"), MODEL, workflows)).other
    assert fleet.size_costs(shape).other == pytest.approx(plain + 0.25)


def test_a_class_that_cannot_be_loaded_fails_the_edits_through_it_alone() -> None:
    nodes = tuple(replace(node, role="broken") if node.op == "run" else node for node in GUARDED.nodes)
    site = Site(Random(0), 1, Default(), (replace(GUARDED, nodes=nodes), DIAMOND))
    site.scheduler.add(guarded("lost"))
    site.scheduler.add(make_edit("fine"))
    site.schedule()
    broken = next(each.key for each in CLASSES if each.name == "broken")
    while (0, broken) not in site.workers.loading:
        site.step()
    site.workers.loading.remove((0, broken))
    site.scheduler.apply_load(ModelFailed(0, broken, Failure("config", "broken: its file is gone")), 0.0)
    site.finish()
    ends = {output.request_id: output for output in site.outputs}
    lost = ends["lost"]
    assert isinstance(lost, Failed)
    assert (lost.failure.kind, "its file is gone" in lost.failure.message) == ("model_unavailable", True)
    assert isinstance(ends["fine"], Finished)


def test_an_edit_fails_alone_whose_class_takes_too_long() -> None:
    site = Site(Random(0), 1, Default(), SERVED, max_retries=0)
    site.scheduler.add(guarded("first"))
    site.finish()
    for request in (guarded("slow", steps=1), make_edit("beside", steps=20)):
        site.scheduler.add(request)
    while not any(
        is_of_class(batch, "slow") for queue in site.workers.queues for plan in queue for batch in plan.batches
    ):
        site.step()
        site.schedule()
    assert site.scheduler.busy_ranks([0])[0].allowed >= 60.0
    site.workers.lose(0)
    cause = Failure("run_failed", "node guard: class guard took longer than its 60 s")
    site.scheduler.lose_rank(0, cause, culprit="slow")
    site.finish()
    ends = {output.request_id: output for output in site.outputs}
    assert ends["slow"] == Failed("slow", cause)
    assert isinstance(ends["beside"], Finished)


def is_of_class(batch: Batch, request_id: str) -> bool:
    return batch.op == "run" and any(item.request_id == request_id for item in batch.items)
