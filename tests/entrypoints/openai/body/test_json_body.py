"""Long strings are removed from a JSON body for any split into chunks and any escapes."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequestError
from entrypoints.openai.body import json_body
from entrypoints.openai.body.json_body import JsonBody

LIMIT = 40


@pytest.fixture(autouse=True, scope="module")
def short_strings_are_long() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "LONG_STRING_BYTES", LIMIT)
        patch.setattr(json_body, "PIECE_BYTES", LIMIT)
        yield


async def split(data: bytes, size: int) -> tuple[bytes, dict[str, bytes]]:
    body = JsonBody()
    for start in range(0, len(data), size):
        await body.feed(data[start : start + size])
    strings = {marker: await upload.read() for marker, upload in body.long_strings.items()}
    body.close()
    return bytes(body.text), strings


def restore(value: Any, strings: dict[str, bytes]) -> Any:
    """`value` with long strings in place of their markers."""
    match value:
        case str():
            return strings[value].decode() if value in strings else value
        case list():
            return [restore(item, strings) for item in value]
        case dict():
            return {restore(key, strings): restore(item, strings) for key, item in value.items()}
        case _:
            return value


SHORT = st.text(st.sampled_from('aZ0/\n"\\é😀{}[],:'), max_size=3)  # at most 36 bytes, escaped
BASE64 = st.text(st.sampled_from("aZ09+/=\n\r\t"), max_size=100)
LONG = BASE64 | st.text(st.sampled_from('aZ0/\n"\\é😀'), max_size=100)
DOCUMENT = st.recursive(
    SHORT | LONG | st.integers() | st.none(), lambda x: st.lists(x) | st.dictionaries(SHORT | LONG, x), max_leaves=8
)


@given(DOCUMENT, st.integers(1, 150), st.booleans())
@settings(max_examples=300, deadline=None)
def test_long_strings_and_text_together_are_the_document(document: Any, size: int, ascii_only: bool) -> None:
    data = json.dumps(document, ensure_ascii=ascii_only).replace("/", "\\/").encode()
    text, strings = asyncio.run(split(data, size))
    assert restore(json.loads(text), strings) == document


@pytest.mark.parametrize("size", range(1, 12))
async def test_every_way_to_escape_base64(size: int) -> None:
    data = rb'{"a": "\u002b' + b"abcd" * 10 + rb'\/\u002F==\n", "b": "short"}'
    text, strings = await split(data, size)
    (marker,) = strings
    assert strings[marker] == b"+" + b"abcd" * 10 + b"//==\n"
    assert json.loads(text) == {"a": marker, "b": "short"}


@pytest.mark.parametrize("data", [rb'{"a": "\u00zz"}', rb'{"a": "abc', b'"\\'])
@pytest.mark.parametrize("size", [1, 3, 100])
async def test_malformed_stays_malformed(data: bytes, size: int) -> None:
    text, _ = await split(data, size)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


@pytest.mark.parametrize("bad", [rb"\u00zz", rb"\x", rb"\ud800", rb"\ude00", rb"\udcc3\udca9"])
@pytest.mark.parametrize("size", [1, 3, 100])
async def test_malformed_long_strings_are_refused_as_they_come(bad: bytes, size: int) -> None:
    with pytest.raises(InvalidRequestError, match="Could not parse the JSON body"):
        await split(b'{"a": "' + b"abcd" * 20 + bad + b' and more"}', size)


@pytest.mark.parametrize(
    "data",
    [
        b'{"z":[' + b'"",' * 349_000,
        b'{"z":"' + rb"\/" * 524_000,
        b'{"z":"' + rb"\u002f" * 174_000,
        b'{"z":[' + rb'"\\",' * 209_000,
    ],
    ids=["short strings", "escaped slashes", "escaped code points", "escaped backslashes"],
)
async def test_the_event_loop_is_not_blocked(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MB takes milliseconds, and other tasks run in between, however large the chunks are."""
    monkeypatch.setattr(json_body, "LONG_STRING_BYTES", 512 * 1024)
    monkeypatch.setattr(json_body, "PIECE_BYTES", 64 * 1024)
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    ticker = asyncio.create_task(tick())
    started = time.thread_time()
    await split(data, 1024 * 1024)
    seconds = time.thread_time() - started
    ticker.cancel()
    assert turns >= len(data) // 65536
    assert seconds < 0.1
