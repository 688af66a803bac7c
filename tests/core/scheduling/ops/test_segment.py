"""Requests whose mask is found: what their nodes say, and what depends on the mask."""

from __future__ import annotations

import msgspec
import pytest
from fakes import MODEL, PIXELS, SEARCH, make_edit, make_mask_request, make_selecting_edit

from core.config import SchedulerConfig
from core.failure import Failure
from core.graph.catalog import WORKFLOWS
from core.handles import ArrayRef, LoadedComponent, ModelKey
from core.messages.engine import EngineRequest, Failed, Finished
from core.messages.specs import EditSpec
from core.messages.worker import BatchResult, ItemResult, Load, ModelFailed
from core.model_info import ModelInfo
from core.scheduling.node_cache import NO_PAGES
from core.scheduling.ops.denoise import DENOISE, Denoise
from core.scheduling.ops.image_encode import IMAGE_ENCODE, ImageEncode
from core.scheduling.ops.segment import SEGMENT, Segment
from core.scheduling.ranks.residency import keys_of
from core.scheduling.requests.bindings import Bindings
from core.scheduling.requests.request import Request
from core.scheduling.scheduler import StepScheduler

KEYS = tuple(ModelKey("k", kind) for kind in ("text_encoder", "vae", "transformer"))
SEGMENTER = ModelKey("s", "segmenter")
FINDING = msgspec.structs.replace(MODEL, components=KEYS, segmenter=(SEGMENTER,), selects_by=("words",))


def record(edit: EngineRequest, model: ModelInfo = FINDING) -> Request:
    return Request.of(edit, WORKFLOWS, Bindings({model.name: model}))


def result(node: str, **fields: object) -> ItemResult:
    return ItemResult("a", node, **fields)  # type: ignore[arg-type]


def test_the_message_has_room_for_every_token() -> None:
    request = record(make_selecting_edit("a", is_mask_aware=True))
    work = SEGMENT.make(request, request.workflow.node("segment"), NO_PAGES)
    assert isinstance(work, Segment)
    assert (work.template, work.search, work.mask) == (PIXELS, SEARCH, request.spec.mask)
    assert work.active == ArrayRef(0, 4096, (256,), "int32")


def test_the_image_is_encoded_under_the_mask_that_is_found() -> None:
    request = record(make_selecting_edit("a", is_mask_aware=True))
    node = request.workflow.node("image_encode")
    assert [(edge.source, edge.name) for edge in node.inputs] == [("segment", "mask")]
    work = IMAGE_ENCODE.make(request, node, NO_PAGES)
    assert isinstance(work, ImageEncode)
    assert work.mask is None


@pytest.mark.parametrize(
    ("found", "is_mask_aware", "full_steps"),
    [(1, True, 0), (99, True, 0), (100, True, 2), (255, True, 2), (256, False, 0)],
)
def test_how_an_edit_runs_follows_from_its_mask(found: int, is_mask_aware: bool, full_steps: int) -> None:
    request = record(make_selecting_edit("a", is_mask_aware=True))
    before = request.work_of(request.workflow.node("denoise"), is_masked=True)
    assert request.awaits_mask
    SEGMENT.note(request, result("segment", active_tokens=found, score=0.75))
    assert not request.awaits_mask
    assert (request.spec.is_mask_aware, request.spec.sampling.full_steps) == (is_mask_aware, full_steps)
    assert request.spec.active == ArrayRef(0, 4096, (found,), "int32")
    assert (request.active_tokens, request.mask_score) == (found, 0.75)
    after = request.work_of(request.workflow.node("denoise"), is_masked=True)
    assert (before.queries, after.queries) == ((50 + 24,), (found + 24,))
    step = DENOISE.make(request, request.workflow.node("denoise"), NO_PAGES)
    assert isinstance(step, Denoise)


def test_a_mask_that_is_found_again_does_not_depend_on_the_one_before() -> None:
    request = record(make_selecting_edit("a", is_mask_aware=True))
    for found in (256, 50):
        SEGMENT.note(request, result("segment", active_tokens=found))
    assert request.spec == record(make_selecting_edit("a", is_mask_aware=True)).spec.with_mask(50)  # type: ignore[union-attr]
    assert request.spec.is_mask_aware


def test_only_requests_that_find_masks_need_the_segmenter() -> None:
    assert {*keys_of(record(make_edit("a")).needs)} == {*KEYS}
    assert {*keys_of(record(make_selecting_edit("a", is_mask_aware=True)).needs)} == {*KEYS, SEGMENTER}
    assert keys_of(record(make_mask_request("a")).needs) == [SEGMENTER], "and a mask alone needs nothing else"


def test_refiners_read_the_mask_too() -> None:
    workflow = WORKFLOWS["selected_refined"]
    readers = [node.name for node in workflow.nodes if any(edge.source == "segment" for edge in node.inputs)]
    assert readers == ["image_encode", "refiner_image_encode"]


# ---------------------------------------------------------------------------------------------------- a scheduler


def scheduler_of(*loaded: ModelKey) -> StepScheduler:
    scheduler = StepScheduler(SchedulerConfig(), {"m": FINDING})
    scheduler.learn([], [(0, [LoadedComponent(key, 1) for key in loaded])])
    return scheduler


def answer(scheduler: StepScheduler, plan: object, **fields: object) -> None:
    for batch in plan.batches:  # type: ignore[attr-defined]
        items = tuple(ItemResult(item.request_id, item.node, **fields) for item in batch.items)  # type: ignore[arg-type]
        scheduler.apply(BatchResult(batch_id=batch.id, rank=0, started=1.0, seconds=0.1, items=items))


def test_a_mask_alone_ends_with_what_was_found() -> None:
    scheduler = scheduler_of(*KEYS, SEGMENTER)
    scheduler.add(make_mask_request("a"))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [batch.op for batch in plan.batches] == ["segment"]
    answer(scheduler, plan, active_tokens=7, score=0.5)
    (finished,) = scheduler.take_outputs()
    assert isinstance(finished, Finished)
    assert (finished.active_tokens, finished.mask_score) == (7, 0.5)
    assert finished.ms["segment"] == pytest.approx(100.0)
    scheduler.check_integrity()


def test_the_masks_of_several_requests_are_found_in_one_batch() -> None:
    scheduler = scheduler_of(*KEYS, SEGMENTER)
    for name in ("a", "b", "c"):
        scheduler.add(msgspec.structs.replace(make_mask_request("a"), request_id=name))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [[item.request_id for item in batch.items] for batch in plan.batches] == [["a", "b", "c"]]


def test_nothing_found_fails_its_request_alone() -> None:
    scheduler = scheduler_of(*KEYS, SEGMENTER)
    for name in ("a", "b"):
        scheduler.add(msgspec.structs.replace(make_mask_request("a"), request_id=name))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    (batch,) = plan.batches
    failure = Failure("nothing_found", "there is no hat", "mask_prompt")
    items = (ItemResult("a", "segment", failure=failure), ItemResult("b", "segment", active_tokens=3))
    scheduler.apply(BatchResult(batch_id=batch.id, rank=0, started=1.0, seconds=0.1, items=items))
    first, second = scheduler.take_outputs()
    assert isinstance(first, Failed)
    assert first.failure == failure
    assert isinstance(second, Finished)


def test_a_segmenter_is_loaded_for_the_first_request_that_needs_it() -> None:
    scheduler = scheduler_of(*KEYS)
    assert scheduler.schedule(0.0) is None, "without requests nothing is loaded"
    scheduler.add(make_selecting_edit("a", is_mask_aware=True))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert (plan.loads, plan.batches) == ((Load((0,), (SEGMENTER,)),), ())


def test_a_segmenter_that_cannot_be_loaded_fails_only_who_needs_it() -> None:
    scheduler = scheduler_of(*KEYS)
    scheduler.add(make_selecting_edit("a", is_mask_aware=True))
    scheduler.add(make_edit("b"))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.loads == (Load((0,), (SEGMENTER,)),)
    assert {item.request_id for batch in plan.batches for item in batch.items} == {"b"}
    scheduler.apply_load(ModelFailed(0, SEGMENTER, Failure("config", "it is broken")), 1.0)
    (failed,) = scheduler.take_outputs()
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.failure.kind) == ("a", "model_unavailable")
    scheduler.add(make_selecting_edit("c"))
    assert [output.request_id for output in scheduler.take_outputs()] == ["c"], "refused for a while"
    scheduler.add(make_edit("d"))
    assert scheduler.take_outputs() == ()
    assert isinstance(make_selecting_edit("a", is_mask_aware=True).spec, EditSpec)
