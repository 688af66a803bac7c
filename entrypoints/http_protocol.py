"""One connection of a client, with the limits that uvicorn leaves out: how large a request's head may be, and how long
a client may take for what no application waits for. What it refuses has OpenAI's error envelope. An offer to speak
another protocol is declined.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from entrypoints.openai.errors import INVALID_REQUEST, ErrorReply

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line and its headers together, and of trailers; what is read from the socket at once comes on top."""
MAX_HEADERS = 256
"""Of a request: thousands of tiny ones are small as bytes and megabytes as objects."""
HEAD_SECONDS = 30.0
"""From the first byte of a request, or from a connection's begin, to the end of the headers."""
REST_SECONDS = 30.0
"""How long the rest of a body is read and thrown away whose request has its answer: clients that look at it only when
they have sent everything would see a broken connection instead."""


class _Parser:
    """httptools' parser, for a server that changes to no other protocol: HTTP/2 (h2c) or WebSocket.

    That one takes what follows such an offer for the other protocol's, and so takes the body off a request that must be
    answered all the same (RFC 9110, 7.8). Java's own client makes the offer with its first request.
    """

    def __init__(self, protocol: GuardedProtocol) -> None:
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self._protocol)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def feed_data(self, data: bytes) -> None:
        """Parse on, an offer that was declined anew without it. Raises httptools.HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if self._parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("this is no proxy") from None
                data = self._protocol.head_without_offer() + data[offer.args[0] :]
                self._begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class GuardedProtocol(HttpToolsProtocol):
    """Closes connections that only take up room."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)  # type: ignore[assignment]
        self._is_in_head = True  # the next thing to come is, or goes on with, a request's head
        self._head_bytes = 0  # received since the last progress: a whole head, a piece of a body
        self._patience: asyncio.TimerHandle | None = None
        self._is_refused = False  # the connection closes, and what else it brings is not looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._is_in_head and self._patience is None and self._is_answered:
            self._wait(HEAD_SECONDS)  # a second request on this connection

    def head_without_offer(self) -> bytes:
        """The head that has just come, as from a client that offers no other protocol."""
        request_line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([request_line, *headers, b"", b""])

    def on_headers_complete(self) -> None:
        if self._is_refused or self.parser.should_upgrade():  # then it comes again
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

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP."""
        self._refuse(400, "invalid_http", msg)

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse_head(self) -> None:
        message = f"The request's head is larger than {MAX_HEAD_BYTES} bytes or has more than {MAX_HEADERS} headers."
        self._refuse(431, "request_head_too_large", message)

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer, where that is still possible, and close."""
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
        self._patience = self.loop.call_later(seconds, self.transport.close)

    def _end_wait(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
