"""Serves one HTTP connection: uvicorn's protocol with limits that it lacks, on the size of a request's head and on how
long a client may take to send it. Errors have OpenAI's envelope. Offers to switch to another protocol are ignored, but
for WebSocket where the application has such routes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from entrypoints.openai.answer.errors import INVALID_REQUEST, ErrorReply
from entrypoints.websocket_protocol import WebSocketProtocol, is_offer

MAX_HEAD_BYTES = 64 * 1024
"""Limit on a request line with its headers, and on trailers. Can be exceeded by what one socket read returns."""
MAX_HEADERS = 256
"""Limit per request: thousands of tiny headers are few bytes on the wire but megabytes of Python objects."""
HEAD_SECONDS = 30.0
"""Time limit from a request's first byte, or for the first request from connecting, to the end of its headers."""
REST_SECONDS = 30.0
"""How long the rest of a body is read and discarded after its request was answered. Clients that read the answer only
after sending everything would otherwise see a broken connection, also where the connection closes after the answer:
closing a socket with unread input resets it, and a reset destroys an answer that the client has not read yet (RFC 9112,
9.6)."""


class _Parser:
    """httptools' parser, made to ignore offers to upgrade to HTTP/2 (h2c) or WebSocket.

    httptools takes the bytes after such an offer for the other protocol, which loses the body of a request that must
    be answered nonetheless (RFC 9110, 7.8). Java's HTTP client makes the offer with its first request.
    """

    def __init__(self, protocol: GuardedProtocol) -> None:
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self._protocol)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def feed_data(self, data: bytes) -> None:
        """Parse `data`. At an upgrade offer that is not taken, parse the head again without it. Raises
        httptools.HttpParserError.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if self._parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("this is no proxy") from None
                if self._protocol.becomes_websocket(data[offer.args[0] :]):
                    return
                data = self._protocol.head(without=b"upgrade") + data[offer.args[0] :]
                self._begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class _Transport:
    """A connection's transport whose `close` only ends the sending direction, since the client may still send: the rest
    of a body, or more than the length that it announced."""

    def __init__(self, transport: asyncio.Transport, protocol: GuardedProtocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self.is_discarding = False

    def close(self) -> None:
        if self.is_closing():
            self._transport.close()
            return
        self.is_discarding = True
        self._transport.write_eof()
        self._protocol.discard_input()

    def write(self, data: bytes) -> None:
        if not self.is_discarding:  # a request that was refused in the middle of its body may still be answered
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self.is_discarding or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's connection handler with the limits of this module: answers what it refuses, then closes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)  # type: ignore[assignment]
        self._is_in_head = True  # the next bytes begin or continue a request's head
        self._head_bytes = 0  # received since the last complete head or piece of a body
        self._patience: asyncio.TimerHandle | None = None
        self._is_refused = False  # the connection is closing; further input is ignored
        self._is_handed_over = False  # another protocol has the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        super().connection_made(_Transport(transport, self))  # type: ignore[arg-type]
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._is_handed_over:
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._is_in_head and self._patience is None and self._is_answered:
            self._wait(HEAD_SECONDS)  # a second request on this connection

    def head(self, *, without: bytes | None = None) -> bytes:
        """The request's head that was just parsed. without: a header to leave out."""
        request_line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [b"%s: %s" % header for header in self.headers if header[0] != without]
        return b"\r\n".join([request_line, *headers, b"", b""])

    def becomes_websocket(self, rest: bytes) -> bool:
        """Hand the connection over, if the request that was just parsed asks for that, and none before it waits for its
        answer. rest: what has come behind its head.
        """
        if self.ws_protocol_class is None or self._is_refused or not self._is_answered:
            return False
        head = self.head()
        if len(head) > MAX_HEAD_BYTES or not is_offer(head):
            return False
        self._end_wait()
        self.connections.discard(self)
        self._is_handed_over = True
        WebSocketProtocol(self.config, self.server_state, self.app_state).begin(self._socket, head, rest)
        return True

    def on_headers_complete(self) -> None:
        if self._is_refused or self.parser.should_upgrade():  # the head will be parsed again without the offer
            return
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head()
            return
        super().on_headers_complete()
        self._is_in_head, self._head_bytes = False, 0
        self._end_wait()

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused or self.parser.should_upgrade():
            return
        self._is_in_head, self._head_bytes = True, 0
        self._end_wait()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_in_head and self._is_answered and not self.transport.is_closing():
            self._wait(REST_SECONDS)

    def shutdown(self) -> None:
        super().shutdown()
        if self._is_answered:
            self._socket.close()

    def timeout_keep_alive_handler(self) -> None:
        self._socket.close()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for input that is not valid HTTP."""
        self._refuse(400, "invalid_http", msg)

    def discard_input(self) -> None:
        """Read what the client still sends, until it closes the connection or REST_SECONDS have passed."""
        self.flow.resume_reading()
        self._wait(REST_SECONDS)

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse_head(self) -> None:
        message = f"The request's head is larger than {MAX_HEAD_BYTES} bytes or has more than {MAX_HEADERS} headers."
        self._refuse(431, "request_head_too_large", message)

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer with an error, unless another answer has begun, and close the connection."""
        if self._is_refused:
            return
        self._is_refused = True
        if self.cycle is None or not self.cycle.response_started or self._is_answered:
            body = bytes(ErrorReply(status, INVALID_REQUEST, code, message).response().body)
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _wait(self, seconds: float) -> None:
        self._end_wait()
        self._patience = self.loop.call_later(seconds, self._socket.close)

    def _end_wait(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
