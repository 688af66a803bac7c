"""The bytes of a request's body while they arrive, within limits on their number and speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.requests import ClientDisconnect, Request

from core.errors import AbortedError, InvalidRequestError
from entrypoints.openai.answer.errors import BodyTimeoutError, RequestTooLargeError

STALL_SECONDS = 60.0  # maximum pause within a body
MIN_BYTES_PER_SECOND = 8 * 1024  # average after STALL_SECONDS; otherwise a byte per minute would keep an upload slot
_MOST_DIGITS = 20  # of a length, that say enough; int() refuses more than 4300, also if most are zeros


async def read_chunks(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body's chunks. Raises RequestTooLargeError beyond `limit` bytes, and BodyTimeoutError if the client pauses
    for STALL_SECONDS or sends less than MIN_BYTES_PER_SECOND on average, and AbortedError if it goes away.
    """
    _check_content_length(request, limit)
    stream, received, started = request.stream(), 0, time.monotonic()
    while (chunk := await _next_chunk(stream, _patience(started, received))) is not None:
        received += len(chunk)
        if received > limit:
            raise body_too_large(limit)
        yield chunk


def _patience(started: float, received: int) -> float:
    """Seconds to wait for the next chunk."""
    return min(STALL_SECONDS, started + STALL_SECONDS + received / MIN_BYTES_PER_SECOND - time.monotonic())


async def _next_chunk(stream: AsyncGenerator[bytes], patience: float) -> bytes | None:
    try:
        async with asyncio.timeout(patience):
            return await anext(stream, None)
    except TimeoutError as error:
        message = f"The body came too slowly: nothing for {STALL_SECONDS:g} seconds, or less than "
        raise BodyTimeoutError(f"{message}{MIN_BYTES_PER_SECOND} bytes a second.") from error
    except ClientDisconnect as error:
        raise AbortedError("the client went away while sending") from error


def _check_content_length(request: Request, limit: int) -> None:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length.lstrip("0")[:_MOST_DIGITS] or 0) > limit:
        raise body_too_large(limit)


async def read_text(request: Request, limit: int) -> str:
    """Read a body of text in UTF-8 of at most `limit` bytes, whatever type it says it has: curl says that it is a form.
    A byte order mark, with which some editors begin a file, is no part of it. Raises as `read_chunks`, and
    InvalidRequestError.
    """
    body = b"".join([chunk async for chunk in read_chunks(request, limit)])
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not UTF-8 text: {error.reason} at byte {error.start}.") from error


def body_too_large(limit: int) -> RequestTooLargeError:
    """The error of a body, or of its text, of more bytes than that."""
    return RequestTooLargeError(f"The request body is larger than the maximum of {limit} bytes.")
