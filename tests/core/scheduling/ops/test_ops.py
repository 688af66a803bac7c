"""The table of ops: a new one runs through scheduler and messages after one registration."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, make_edit

from core.config import SchedulerConfig
from core.costs.cost_model import CostKey
from core.errors import MessageError
from core.graph.catalog import WORKFLOWS
from core.graph.op import OPS, OpWork, Port, Sizes
from core.graph.work import Work
from core.graph.workflow import Edge, Node, Workflow
from core.graph.workflows.inpaint import INPAINT
from core.messages.codec import MessageDecoder, encode
from core.messages.engine import Failed, Finished
from core.messages.message import Message
from core.messages.worker import Batch, BatchResult, CostSample, Item, StepPlan, ToWorker
from core.scheduling.ops import BUILT_IN
from core.scheduling.ops.request_op import RequestOp
from core.scheduling.scheduler import StepScheduler
from model_executor.worker.ops import HANDLERS


class Sharpen(Message, OpWork, frozen=True):
    """The message of an op that this test adds."""

    strength: float


def half_the_tokens(sizes: Sizes) -> Work:
    return Work.of([sizes.num_tokens // 2])


SHARPEN = RequestOp(
    name="sharpen",
    component="vae",
    message=Sharpen,
    size=half_the_tokens,
    part="decode",
    inputs=(Port("latents", "latents"),),
    outputs=(Port("latents", "latents"),),
    make=lambda request, node, pages: Sharpen(strength=0.5),
)
SHARPENED = Workflow(
    name="sharpened",
    nodes=(
        *(node for node in INPAINT.nodes if node.op != "decode"),
        Node("sharpen", "sharpen", inputs=(Edge("denoise", "latents"),)),
        Node("decode", "decode", inputs=(Edge("sharpen", "latents"),)),
    ),
    outputs={"picture": "decode"},
    regions=INPAINT.regions,
)


@pytest.fixture
def sharpen() -> Iterator[RequestOp]:
    OPS.register(SHARPEN)
    yield SHARPEN
    OPS.unregister("sharpen")


def in_workflow(request_id: str, workflow: str) -> object:
    return msgspec.structs.replace(make_edit(request_id), workflow=workflow)


def test_a_new_op_runs_beside_ordinary_edits_after_one_registration(
    sharpen: RequestOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKFLOWS, "sharpened", SHARPENED)
    scheduler, workers = StepScheduler(SchedulerConfig(), {"m": MODEL}), FakeWorkers()
    scheduler.learn([CostSample("m", "sharpen", Work.of([128]), 0.5)])
    scheduler.add(in_workflow("a", "sharpened"))  # type: ignore[arg-type]
    scheduler.add(make_edit("b"))
    batches: list[Batch] = []
    outputs = []
    while scheduler.num_requests:
        plan = scheduler.schedule(0.0)
        if plan is not None:
            batches += plan.batches
            workers.submit(plan)
        for result in workers.run_one(0):
            assert isinstance(result, BatchResult)
            scheduler.apply(result)
        outputs += scheduler.take_outputs()
    assert {output.request_id for output in outputs if isinstance(output, Finished)} == {"a", "b"}
    assert [batch.op for batch in batches if any(item.request_id == "a" for item in batch.items)] == [
        "text_encode",
        "image_encode",
        *["denoise"] * 4,
        "sharpen",
        "decode",
    ]
    (sharpened,) = (batch for batch in batches if batch.op == "sharpen")
    assert [(item.request_id, item.work) for item in sharpened.items] == [("a", Sharpen(strength=0.5))]
    denoised = [sorted(item.request_id for item in batch.items) for batch in batches if batch.op == "denoise"]
    assert denoised == [["a", "b"]] * 4  # requests of different workflows share steps
    assert scheduler.cost_key("m", "sharpen") == CostKey(MODEL.family, (), "sharpen", "cpu", 1)
    scheduler.check_integrity()


def test_a_request_with_two_nodes_of_one_op_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = Workflow("twice", (Node("other_text", "text_encode"), *INPAINT.nodes), INPAINT.outputs, INPAINT.regions)
    monkeypatch.setitem(WORKFLOWS, "twice", twice)
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL})
    scheduler.add(in_workflow("a", "twice"))  # type: ignore[arg-type]
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [len(batch.items) for batch in plan.batches if batch.op == "text_encode"] == [2]
    assert scheduler.counts == (1, 0)
    scheduler.check_integrity()


def test_a_new_ops_message_is_decoded(sharpen: RequestOp) -> None:
    item = Item("a", "sharpen", "m", Sharpen(strength=0.25), ())
    plan = StepPlan(seq=0, batches=(Batch(0, "sharpen", (0,), (item,)),))
    assert MessageDecoder[ToWorker](ToWorker).decode(encode(plan)) == plan


def test_a_message_of_no_op_cannot_be_decoded() -> None:
    item = Item("a", "sharpen", "m", Sharpen(strength=0.25), ())
    plan = StepPlan(seq=0, batches=(Batch(0, "sharpen", (0,), (item,)),))
    with pytest.raises(MessageError, match="no op has messages tagged 'Sharpen'"):
        MessageDecoder[ToWorker](ToWorker).decode(encode(plan))


def test_a_name_is_registered_once(sharpen: RequestOp) -> None:
    with pytest.raises(ValueError, match="an op named sharpen"):
        OPS.register(SHARPEN)


def test_a_request_for_an_unknown_workflow_is_refused() -> None:
    scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL})
    scheduler.add(in_workflow("a", "nonsense"))  # type: ignore[arg-type]
    (failed,) = scheduler.take_outputs()
    assert isinstance(failed, Failed)
    assert "nonsense" in failed.failure.message
    assert scheduler.num_requests == 0


def test_a_worker_runs_every_built_in_op() -> None:
    assert set(HANDLERS) == {op.name for op in BUILT_IN}
