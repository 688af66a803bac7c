"""Frames of the WebSocket protocol: what is put together, and what breaks the protocol."""

from __future__ import annotations

import struct

import pytest
from websocket_client import BINARY, CLOSE, PING, TEXT, masked

from entrypoints.websocket_frames import (
    MAX_MESSAGE_BYTES,
    NO_CODE,
    NOT_UTF8,
    PROTOCOL_ERROR,
    TOO_LARGE,
    Frame,
    FrameError,
    FrameReader,
    Opcode,
    close_frame,
    frame_of,
)

CONTINUATION, NOT_LAST = 0, 0x00


def read(*pieces: bytes) -> list[Frame]:
    reader = FrameReader()
    return [frame for piece in pieces for frame in reader.feed(piece)]


@pytest.mark.parametrize("length", [0, 1, 3, 125, 126, 65535, 65536])
def test_a_message_of_any_length_is_read_in_any_pieces(length: int) -> None:
    payload = bytes(place % 251 for place in range(length))
    data = masked(BINARY, payload)
    assert read(data) == [Frame(Opcode.BINARY, payload)]
    size = 1 if length < 200 else 1000
    assert read(*(data[place : place + size] for place in range(0, len(data), size))) == read(data)
    assert read(data + masked(TEXT, b"next"))[1].text == "next"


def test_parts_of_a_message_are_put_together_around_control_frames() -> None:
    first = masked(TEXT, b"a", first=NOT_LAST)
    middle = masked(CONTINUATION, b"b", first=NOT_LAST)
    found = read(first, middle, masked(PING, b"?"), masked(CONTINUATION, b"c"))
    assert found == [Frame(Opcode.PING, b"?"), Frame(Opcode.TEXT, b"abc")]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame_of(Opcode.TEXT, b"not masked"), PROTOCOL_ERROR),
        (masked(3, b""), PROTOCOL_ERROR),
        (masked(11, b""), PROTOCOL_ERROR),
        (masked(TEXT, b"", first=0xC0), PROTOCOL_ERROR),
        (masked(PING, b"", first=NOT_LAST), PROTOCOL_ERROR),
        (masked(PING, b"x" * 126), PROTOCOL_ERROR),
        (masked(CONTINUATION, b""), PROTOCOL_ERROR),
        (masked(TEXT, b"", first=NOT_LAST) + masked(TEXT, b""), PROTOCOL_ERROR),
        (masked(TEXT, b"x" * (MAX_MESSAGE_BYTES + 1)), TOO_LARGE),
        (b"\x81\xff" + struct.pack(">Q", 2**63), TOO_LARGE),
        (
            masked(TEXT, b"x" * MAX_MESSAGE_BYTES, first=NOT_LAST) + masked(CONTINUATION, b"x"),
            TOO_LARGE,
        ),
    ],
)
def test_what_breaks_the_protocol_says_how(data: bytes, code: int) -> None:
    with pytest.raises(FrameError) as caught:
        read(data)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", NO_CODE),
        (struct.pack(">H", 1000) + b"bye", 1000),
        (struct.pack(">H", 4999), 4999),
    ],
)
def test_a_close_frame_has_a_code(payload: bytes, code: int) -> None:
    (frame,) = read(masked(CLOSE, payload))
    assert frame.close_code == code


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"x", PROTOCOL_ERROR),
        (struct.pack(">H", 1005), PROTOCOL_ERROR),
        (struct.pack(">H", 999), PROTOCOL_ERROR),
        (struct.pack(">H", 1000) + b"\xff", NOT_UTF8),
    ],
)
def test_a_wrong_close_frame_breaks_the_protocol(payload: bytes, code: int) -> None:
    (frame,) = read(masked(CLOSE, payload))
    with pytest.raises(FrameError) as caught:
        _ = frame.close_code
    assert caught.value.code == code


def test_a_long_reason_is_cut_between_characters() -> None:
    frame = close_frame(1000, "ж" * 100)
    assert frame[1] == 2 + 122
    assert frame[4:].decode() == "ж" * 61
