"""A message that cannot be encoded or decoded fails only the requests that are in it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from fakes import PIXELS, make_edit
from hypothesis import given
from hypothesis import strategies as st

from core.costs.load_report import LoadReport
from core.errors import InvalidRequestError, MessageError
from core.failure import Failure
from core.handles import TensorKey, TensorRef
from core.messages.codec import MessageDecoder, encode
from core.messages.engine import EngineOutputs, Failed, Finished, PartialImage, ToEngine
from core.messages.salvage import (
    WithheldItems,
    failure_of,
    read_member,
    readable_outputs,
    readable_plan,
    readable_result,
    sendable_outputs,
    sendable_plan,
    sendable_result,
)
from core.messages.worker import (
    Batch,
    BatchResult,
    Free,
    Item,
    ItemResult,
    PageCopied,
    PageCopy,
    PageForget,
    StepPlan,
    ToWorker,
    Transfer,
)
from core.scheduling.ops.text_encode import TextEncode

ERROR = MessageError("a test")
LOAD = LoadReport(num_received=1, num_running=0, num_waiting=0)


def finished(request_id: str, **changes: Any) -> Finished:
    fields = {
        "ms": {},
        "text_tokens": 3,
        "prompt_truncated": False,
        "cache": "off",
        "tier": None,
        "is_primed": False,
        "full_blocks": 0,
        "made": 1.0,
    }
    return Finished(request_id=request_id, **fields | changes)


def item(request_id: str, prompt: Any = "a hat") -> Item:
    return Item(request_id, "text_encode", TextEncode(prompt=prompt, max_sequence_length=8), ())


def batch(batch_id: int, *items: Item, ranks: Any = (0,)) -> Batch:
    return Batch(batch_id, "text_encode", "m", ranks, items)


def plan(*batches: Batch) -> StepPlan:
    transfer = Transfer(TensorRef(TensorKey("c", "image_encode", "latents"), 0, (1,), "float32", 4, PIXELS), 0)
    return StepPlan(
        seq=5,
        forget=(PageForget("k"),),
        batches=batches,
        transfers=(transfer,),
        free=(Free(TensorKey("d", "", ""), (1,)),),
    )


def failures(items: tuple[ItemResult, ...]) -> dict[str, bool]:
    return {one.request_id: one.failure is not None for one in items}


@given(st.one_of(st.binary(max_size=64), st.from_type(type(None)).map(msgspec.msgpack.encode)))
def test_bytes_that_are_no_message_name_no_request(payload: bytes) -> None:
    with pytest.raises(MessageError):
        MessageDecoder[ToEngine](ToEngine).decode(payload)
    assert read_member(payload, "request_id", str) is None
    assert readable_outputs(payload, ERROR) == []
    assert readable_plan(payload, 0, 1.0, ERROR) is None
    assert readable_result(payload, ERROR) is None


@given(st.data())
def test_the_id_of_a_request_with_a_field_of_another_type_is_found(data: st.DataObject) -> None:
    members = msgspec.msgpack.decode(encode(make_edit("r")))
    name = data.draw(st.sampled_from(sorted(members.keys() - {"request_id", "objective", "deadline"})))
    members[name] = data.draw(st.sampled_from([[1.5], b"x", [{"a": None}]]))
    payload = msgspec.msgpack.encode(members)
    with pytest.raises(MessageError):
        MessageDecoder[ToEngine](ToEngine).decode(payload)
    assert read_member(payload, "request_id", str) == "r"


def test_a_value_out_of_range_is_an_invalid_request() -> None:
    members = msgspec.msgpack.decode(encode(make_edit("r")))
    members["spec"]["sampling"]["n"] = 11
    with pytest.raises(MessageError) as caught:
        MessageDecoder[ToEngine](ToEngine).decode(msgspec.msgpack.encode(members))
    error = failure_of(caught.value).to_error()
    assert isinstance(error, InvalidRequestError)
    assert error.param == "n"


@pytest.mark.parametrize("value", [np.float64(1), "\ud83d", 2**64, object()])
def test_values_that_no_message_can_hold_raise_a_message_error(value: Any) -> None:
    with pytest.raises(MessageError, match="a Finished cannot be encoded"):
        encode(finished("r", ms={"queue": value}))


def test_outputs_that_cannot_be_encoded_fail_their_own_request() -> None:
    bad, preview = finished("b", text_tokens=np.int64(3)), PartialImage(request_id="c", index=np.int64(0), step=1)
    message = EngineOutputs(outputs=(finished("a"), bad, preview), load=LOAD)
    a, b = sendable_outputs(message).outputs
    assert a == finished("a")
    assert isinstance(b, Failed)
    assert b.request_id == "b"


def test_outputs_that_cannot_be_decoded_fail_their_own_request() -> None:
    message = EngineOutputs(
        outputs=(finished("a"), finished("b"), PartialImage(request_id="c", index=0, step=1)), load=LOAD
    )
    members = msgspec.msgpack.decode(encode(message))
    members["outputs"][1]["text_tokens"] = 1.5
    members["outputs"][2]["step"] = "one"  # an engine is not done with what it shows a preview of
    members["load"] = None
    a, b = readable_outputs(msgspec.msgpack.encode(members), ERROR)
    assert a == finished("a")
    assert b == Failed(request_id="b", failure=Failure("engine", "MessageError: a test"))


def test_items_that_cannot_be_encoded_are_taken_out_of_their_batches() -> None:
    sound, other = item("a"), item("e")
    saved = sendable_plan(
        plan(batch(1, sound, item("b", "\ud83d")), batch(2, item("f", 3 + 0j)), batch(3, other)), 0, 7.0
    )
    assert saved.plan == plan(batch(1, sound), batch(3, other))
    encode(saved.plan)
    (answer,) = saved.answers
    assert isinstance(answer, BatchResult)
    assert (answer.batch_id, failures(answer.items)) == (2, {"f": True})
    withheld = WithheldItems()
    withheld.update(saved.withheld)
    result = BatchResult(1, 0, 1.0, 0.1, (ItemResult("a", "text_encode"),))
    assert failures(withheld.complete(result).items) == {"a": False, "b": True}
    assert withheld.complete(result) is result, "once"


def test_the_valid_items_of_a_plan_that_cannot_be_decoded_are_done() -> None:
    copy = PageCopy("k", 64, 64, "disk", "host", PIXELS)
    whole = msgspec.structs.replace(
        plan(batch(1, item("a"), item("b")), batch(2, item("f")), batch(3, item("g")), batch(4, item("h"))),
        copies=(copy, copy),
    )
    members = msgspec.msgpack.decode(encode(whole))
    members["batches"][0]["items"][1]["work"]["max_sequence_length"] = 8.0
    members["batches"][1]["ranks"] = "all"
    members["batches"][2] = 3  # names no request
    members["copies"][1]["block_bytes"] = None
    members["transfers"].append("nonsense")
    payload = msgspec.msgpack.encode(members)
    with pytest.raises(MessageError):
        MessageDecoder[ToWorker](ToWorker).decode(payload)
    saved = readable_plan(payload, 0, 7.0, ERROR)
    assert saved is not None
    assert saved.plan == msgspec.structs.replace(plan(batch(1, item("a")), batch(4, item("h"))), copies=(copy,))
    assert {batch_id: failures(items) for batch_id, items in saved.withheld.items()} == {1: {"b": True}}
    answer, copied = saved.answers
    assert isinstance(answer, BatchResult)
    assert (answer.batch_id, failures(answer.items)) == (2, {"f": True})
    assert copied == PageCopied(0, "k", 64, "disk", "host", ok=False, seconds=0.0)


def test_results_keep_their_valid_items_in_both_directions() -> None:
    items = (ItemResult("a", "denoise"), ItemResult("b", "denoise"))
    sound = BatchResult(1, 0, 1.0, 0.1, items)
    members = msgspec.msgpack.decode(encode(sound))
    members["items"][1]["text_tokens"] = None
    read = readable_result(msgspec.msgpack.encode(members), ERROR)
    bad = ItemResult("b", "denoise", sigmas=(np.float32(1),))  # type: ignore[arg-type]
    sent = sendable_result(msgspec.structs.replace(sound, items=(items[0], bad)))
    encode(sent)
    for result in (read, sent):
        assert result is not None
        assert failures(result.items) == {"a": False, "b": True}
