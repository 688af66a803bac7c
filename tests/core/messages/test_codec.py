"""Messages that cannot be encoded or decoded raise a MessageError, and the request in one is found."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from fakes import make_edit
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequestError, MessageError
from core.messages.codec import MessageDecoder, encode, failure_of, read_member
from core.messages.engine import ToEngine
from core.messages.worker import BatchResult, ItemResult


@given(st.one_of(st.binary(max_size=64), st.from_type(type(None)).map(msgspec.msgpack.encode)))
def test_bytes_that_are_no_message_name_no_request(payload: bytes) -> None:
    with pytest.raises(MessageError):
        MessageDecoder[ToEngine](ToEngine).decode(payload)
    assert read_member(payload, "request_id", str) is None


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
    item = ItemResult("r", "image_encode", sigmas=(value,))
    with pytest.raises(MessageError, match="a BatchResult cannot be encoded"):
        encode(BatchResult(1, 0, 1.0, 0.1, (item,)))
