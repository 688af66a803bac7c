"""Serves one WebSocket connection (RFC 6455) of an ASGI application.

Not one of the packages that uvicorn knows, for one small route: the server sends messages without extensions to clients
that hardly say anything.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.utils import get_client_addr, get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from entrypoints.websocket_frames import (
    GOING_AWAY,
    NORMAL,
    Frame,
    FrameError,
    FrameReader,
    Opcode,
    close_frame,
    frame_of,
)

PING_SECONDS = 20.0
"""How often a client is asked whether it is there; one that has said nothing meanwhile twice is given up."""

CLOSE_SECONDS = 5.0
"""How long a client may take to answer that the connection closes."""

MAX_WAITING = 16
"""Messages of a client that wait for the application, before no more are read."""

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_log = logging.getLogger("stencil.api")
Headers = list[tuple[bytes, bytes]]


def accept_key(method: bytes, headers: Headers) -> bytes | None:
    """The answer to a client's offer to speak WebSocket; None: it is no such offer, or a wrong one (RFC 6455, 4.2)."""
    known = dict(headers)
    tokens = {token.strip() for token in known.get(b"connection", b"").lower().split(b",")}
    is_offer = method == b"GET" and known.get(b"upgrade", b"").lower() == b"websocket" and b"upgrade" in tokens
    key = known.get(b"sec-websocket-key", b"").strip()
    try:
        is_key = len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        is_key = False
    if not (is_offer and is_key and known.get(b"sec-websocket-version") == b"13"):
        return None
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


class WebSocketProtocol(asyncio.Protocol):
    """Takes a connection over from the HTTP protocol, which has read the head of the request."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        self._app, self._state, self._app_state = config.loaded_app, server_state, app_state
        self._root_path = config.root_path
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()  # for the application
        self._writable = asyncio.Event()
        self._writable.set()
        self._is_accepted = self._is_denied = False  # how the handshake has ended
        self._has_sent_close = False
        self._has_heard = True  # the client has said something since it was asked last
        self._has_ended = False  # the application knows that the client has gone
        self._is_broken = False  # the client has broken the protocol; what it says further is ignored
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, transport: asyncio.Transport, url: bytes, headers: Headers, key: bytes, rest: bytes) -> None:
        """Take over. key: see `accept_key`. rest: what has come behind the head."""
        self._transport, self._key = transport, key
        self._state.connections.add(self)  # type: ignore[arg-type]
        parsed = httptools.parse_url(url)
        scope: dict[str, Any] = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "GET",  # for the record of the request
            "scheme": "wss" if is_ssl(transport) else "ws",
            "server": get_local_addr(transport),
            "client": get_remote_addr(transport),
            "root_path": self._root_path,
            "path": self._root_path + unquote(parsed.path.decode("ascii")),
            "raw_path": parsed.path,
            "query_string": parsed.query or b"",
            "headers": headers,
            "subprotocols": [],
            "state": self._app_state.copy(),
            "extensions": {"websocket.http.response": {}},
        }
        self._events.put_nowait({"type": "websocket.connect"})
        transport.set_protocol(self)
        task = self._loop.create_task(self._run(scope))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)
        self._wait(PING_SECONDS, self._beat)
        if rest:
            self.data_received(rest)

    # ------------------------------------------------------------------------------------------- from the client

    def data_received(self, data: bytes) -> None:
        self._has_heard = True
        if self._is_broken:
            return
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except FrameError as error:
            self._is_broken = True
            self._close(error.code, str(error))
            self._end(error.code)
        if self._events.qsize() > MAX_WAITING:
            self._transport.pause_reading()

    def _take(self, frame: Frame) -> None:
        match frame.opcode:
            case Opcode.PING if self._writable.is_set():  # else the client reads no answers
                self._write(frame_of(Opcode.PONG, frame.payload))
            case Opcode.PING | Opcode.PONG:
                pass
            case Opcode.CLOSE:
                code = frame.close_code
                self._close(code)
                self._end(code)
                self._transport.close()
            case _ if self._has_ended:
                pass
            case Opcode.TEXT:
                self._events.put_nowait({"type": "websocket.receive", "text": frame.text})
            case _:
                self._events.put_nowait({"type": "websocket.receive", "bytes": frame.payload})

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._writable.set()
        self._end(1006)

    def eof_received(self) -> None:
        """The client will say nothing more: the transport closes."""

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _end(self, code: int) -> None:
        """Tell the application that the client has gone."""
        if not self._has_ended:
            self._has_ended = True
            self._events.put_nowait({"type": "websocket.disconnect", "code": code, "reason": ""})

    # ------------------------------------------------------------------------------------------- from the application

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self._app(scope, self._receive, self._send)
        except Exception:  # the actor's edge
            _log.exception("a websocket failed: %s", get_client_addr(scope))  # type: ignore[arg-type]
            self._close(1011)
        finally:
            if not self._is_accepted and not self._is_denied:
                self._deny(500, [], b"")
            self._close(NORMAL)

    async def _receive(self) -> dict[str, Any]:
        event = await self._events.get()
        if self._events.qsize() <= MAX_WAITING and not self._transport.is_closing():
            self._transport.resume_reading()
        return event

    async def _send(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "websocket.accept":
                self._accept(message.get("headers", ()))
            case "websocket.close" if not self._is_accepted:
                self._deny(403, [], b"")
            case "websocket.close":
                self._close(message.get("code", NORMAL), message.get("reason") or "")
            case "websocket.http.response.start":
                self._denial: tuple[int, Headers] = message["status"], list(message.get("headers", ()))
                self._denial_body = b""
            case "websocket.http.response.body":
                self._denial_body += message.get("body", b"")
                if not message.get("more_body", False):
                    self._deny(*self._denial, self._denial_body)
            case "websocket.send" if not self._has_sent_close:
                text = message.get("text")
                kind = Opcode.BINARY if text is None else Opcode.TEXT
                self._write(frame_of(kind, message["bytes"] if text is None else text.encode()))
        await self._writable.wait()

    def _accept(self, headers: Any) -> None:
        lines = [b"HTTP/1.1 101 Switching Protocols", b"upgrade: websocket", b"connection: upgrade"]
        lines += [b"sec-websocket-accept: " + self._key, *(b"%s: %s" % header for header in headers)]
        self._is_accepted = True
        self._write(b"\r\n".join([*lines, b"", b""]))

    def _deny(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer the offer as any other request, and close."""
        self._is_denied = self._has_sent_close = True
        lines = [
            b"%s: %s" % header for header in headers if header[0].lower() not in (b"content-length", b"connection")
        ]
        lines += [b"content-length: %d" % len(body), b"connection: close"]
        self._write(STATUS_LINE[status] + b"\r\n".join([*lines, b"", body]))
        self._transport.close()

    def shutdown(self) -> None:
        """Called by uvicorn when the server ends."""
        self._close(GOING_AWAY)
        self._end(GOING_AWAY)

    def _close(self, code: int, reason: str = "") -> None:
        """Say that the connection closes, and give the client some time to say the same."""
        if self._has_sent_close or not self._is_accepted:
            return
        self._has_sent_close = True
        self._write(close_frame(code, reason))
        self._wait(CLOSE_SECONDS, self._transport.abort)

    def _beat(self) -> None:
        """Give up a client that has said nothing since it was asked, and ask again."""
        if not self._has_heard:
            self._transport.abort()
            return
        self._has_heard = False
        if self._is_accepted:
            self._write(frame_of(Opcode.PING, b""))
        self._wait(PING_SECONDS, self._beat)

    def _wait(self, seconds: float, then: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, then)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
