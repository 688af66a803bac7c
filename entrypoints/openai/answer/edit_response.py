"""EditResponse: runs an edit or generation on the engine and sends its images, as one JSON body or as events.

An ASGI response, because it must send outputs while the engine's `edit` context is open: they are in shared memory.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Generic, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditReport, ImageOutput
from entrypoints.openai.answer.errors import describe, log_internal
from entrypoints.openai.answer.responses import (
    Parts,
    error_event,
    image_event,
    images_response,
    mask_response,
    send_pieces,
)
from entrypoints.openai.body.chunks import STALL_SECONDS
from entrypoints.openai.body.submission import Submission
from entrypoints.openai.edit_request import ImagesCall
from entrypoints.openai.guards.middleware import RECORD
from entrypoints.openai.guards.request_record import RequestRecord
from entrypoints.run_until import run_until

KEEP_ALIVE_SECONDS = 15.0
_KEEP_ALIVE = b": keep-alive\n\n"
_STREAM_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx buffers partial images
}
_log = logging.getLogger("stencil.api")
Call = TypeVar("Call")


class _ClientStalledError(Exception):
    """The client has read nothing for STALL_SECONDS."""


class EngineResponse(Response, ABC, Generic[Call]):
    """The answer to one call. Refusals are raised before the first byte is sent, so that they keep their status."""

    def __init__(self, engine: AsyncEngine, call: Call, submission: Submission) -> None:
        self._engine = engine
        self._call = call
        self._submission = submission
        self._reports: list[EditReport] = []  # of finished images
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope[RECORD]
        try:
            if not await run_until(disconnected(receive), self._run(record, _impatient(send))):
                record.is_client_gone = True
        except _ClientStalledError:
            _log.warning("gave up on a client that does not read its answer")
            record.is_client_gone = True  # uvicorn closes the connection, as the answer is incomplete
        finally:
            self._submission.close()
            record.note_reports(self._reports)

    @abstractmethod
    async def _run(self, record: RequestRecord, send: Send) -> None:
        """Run the call, and send its answer."""


class EditResponse(EngineResponse[ImagesCall]):
    """The answer to an edit, a generation, or a request for a mask."""

    _is_streaming = False  # the stream has begun, and is not complete

    async def _run(self, record: RequestRecord, send: Send) -> None:
        try:
            async with self._engine.edit(record.request_id, self._call.edit, self._call.choice) as outputs:
                self._submission.close()  # the engine has its own copy by now
                if self._call.stream:
                    await self._send_events(outputs, send)
                else:
                    await self._send_json(outputs, send)
        except _ClientStalledError:
            raise  # the client would not read an error either
        except Exception as error:  # here, and not within the context: that counts what fails
            if not self._is_streaming:
                raise
            await _send_error(record, error, send)  # otherwise the stream would end like a success without an image

    async def _send_json(self, outputs: AsyncIterator[ImageOutput], send: Send) -> None:
        images = [output async for output in outputs if output.partial_index is None]
        for image in images:
            self._note(image)
        if self._call.edit.makes_mask:
            parts = mask_response(self._call, images[0])
        else:
            parts = images_response(self._call, sorted(images, key=lambda image: image.image_index))
        await send_json(send, parts)

    async def _send_events(self, outputs: AsyncIterator[ImageOutput], send: Send) -> None:
        await _start(send, _STREAM_HEADERS)
        self._is_streaming = True
        async with aclosing(_with_silences(outputs)) as events:
            async for output in events:
                self._note(output)
                await _send_parts(send, [_KEEP_ALIVE] if output is None else image_event(self._call, output))
        await _end(send)
        self._is_streaming = False

    def _note(self, output: ImageOutput | None) -> None:
        if output is not None and output.report is not None:
            self._reports.append(output.report)


async def _with_silences(outputs: AsyncIterator[ImageOutput]) -> AsyncGenerator[ImageOutput | None]:
    """The outputs, and None after every KEEP_ALIVE_SECONDS without one."""
    upcoming = asyncio.create_task(_next(outputs))
    try:
        while True:
            await asyncio.wait({upcoming}, timeout=KEEP_ALIVE_SECONDS)
            if not upcoming.done():
                yield None
            elif (output := upcoming.result()) is None:
                return
            else:
                yield output
                upcoming = asyncio.create_task(_next(outputs))
    finally:
        upcoming.cancel()
        await asyncio.wait({upcoming})


async def disconnected(receive: Receive) -> None:
    """Wait until the client closes the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(outputs: AsyncIterator[ImageOutput]) -> ImageOutput | None:
    return await anext(outputs, None)


def _impatient(send: Send) -> Send:
    """`send` that raises _ClientStalledError after STALL_SECONDS, so that such clients do not hold memory for ever."""

    async def send_or_give_up(message: Message) -> None:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await send(message)
        except TimeoutError as error:
            raise _ClientStalledError from error

    return send_or_give_up


async def send_json(send: Send, parts: Parts) -> None:
    """Send a whole answer of status 200. parts: of its body."""
    length = sum(len(part) for part in parts)
    await _start(send, {"content-type": "application/json", "content-length": str(length)})
    await _send_parts(send, parts)
    await _end(send)


async def _send_error(record: RequestRecord, error: Exception, send: Send) -> None:
    """End a stream with an error as its last event."""
    log_internal(error)
    reply = describe(error)
    record.note_error(reply.code)
    await _send_parts(send, [error_event(reply.envelope)])
    await _end(send)


async def _start(send: Send, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_parts(send: Send, parts: Parts) -> None:
    for piece in send_pieces(parts):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)  # `send` does not yield while the client keeps up


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b""})
