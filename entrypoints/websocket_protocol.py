"""Serves one WebSocket connection: uvicorn's protocol over the websockets library, with limits that it lacks, on what a
client sends before it is accepted, on answers that it does not read, and on how long it may take to close.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request
from websockets.server import ServerProtocol

MAX_MESSAGE_BYTES = 64 * 1024
"""Limit on a message of a client."""

MAX_FRAGMENTS = 1024
"""Limit on the frames of a message. They may be empty, so that MAX_MESSAGE_BYTES does not limit how many there are."""

PING_SECONDS = 20.0
"""How long after a ping was answered the next one is sent, and how long a client may take to answer it."""

CLOSE_SECONDS = 5.0
"""How long a client may take to read the rest and to close, once the application has ended."""


def is_offer(head: bytes) -> bool:
    """Whether a request with this head asks for a WebSocket in a way that can be accepted (RFC 6455, 4.2.1)."""
    protocol = ServerProtocol()
    protocol.debug = False
    protocol.receive_data(head)
    return any(
        isinstance(event, Request) and protocol.accept(event).status_code == 101 for event in protocol.events_received()
    )


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Takes a connection over from the HTTP protocol, which has read the head of the request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn.debug = False  # it would log the request's headers, and with them its API key
        self._early = b""  # received before the connection was accepted
        self._last_wait: asyncio.TimerHandle | None = None

    def begin(self, transport: asyncio.Transport, head: bytes, rest: bytes) -> None:
        """Take over. head: see `is_offer`. rest: what has come behind it."""
        transport.set_protocol(self)
        transport.pause_reading()  # until the offer is accepted: a ping must not be answered before
        self._early = rest
        self.connection_made(transport)
        self.data_received(head)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._last_wait is not None:
            self._last_wait.cancel()
        super().connection_lost(exc)

    async def send(self, message: ASGISendEvent) -> None:
        """Returns when the client has read most of it. Raises ClientDisconnected, also if this side has closed the
        connection because of what the client did.
        """
        await self.writable.wait()
        if self.close_sent:
            raise ClientDisconnected
        await super().send(message)
        await self.writable.wait()
        if message["type"] == "websocket.accept" and not self.transport.is_closing():
            self.transport.resume_reading()
            if self._early:
                self.data_received(self._early)

    def handle_ping(self) -> None:
        """Answer, unless the client reads no answers: they would pile up."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.close_sent:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"a message has more than {MAX_FRAGMENTS} frames")
            self.handle_parser_exception()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self._last_wait = self.loop.call_later(CLOSE_SECONDS, self.transport.abort)
