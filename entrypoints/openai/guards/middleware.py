"""Middleware for every request: its id and record, its API key, uncaught errors. Plain ASGI, so nothing is buffered."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.client.admission.not_ready import not_ready
from engine.observability.metrics import Metrics
from engine.observability.tracing import Tracer
from entrypoints.openai.answer.errors import InvalidApiKeyError, describe, log_internal
from entrypoints.openai.guards.key_ring import KeyRing
from entrypoints.openai.guards.request_record import RequestRecord

REQUEST_ID = "stencil.request_id"  # keys of the ASGI scope
RECORD = "stencil.record"
OWNER = "stencil.owner"  # digest of the request's key; absent if no keys are required


REQUESTS = ("http", "websocket")
"""Types of the ASGI scopes that clients open."""


class RequestContext:
    """The outermost middleware: gives each request its id and record, and each answer `x-request-id` and
    `openai-processing-ms`.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: Tracer) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in REQUESTS:
            await self._app(scope, receive, send)
            return
        request_id = scope[REQUEST_ID] = f"req_{uuid.uuid4().hex}"
        record = scope[RECORD] = RequestRecord(request_id, scope, self._metrics, self._tracer)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "websocket.accept":
                record.status = 101
            elif message["type"].endswith("http.response.start"):  # a refused websocket has such an answer, too
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                headers["openai-processing-ms"] = str(round((time.monotonic() - record.started) * 1e3))
            await send(message)

        with record.open():
            await self._app(scope, receive, send_with_headers)


class UncaughtErrors:
    """Answers uncaught exceptions with 500, and what a shutdown cancels with 503. Runs behind CORSMiddleware, so that
    pages of allowed origins can read that, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in REQUESTS:
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope[RECORD]
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:  # the server shuts down: not an error to log
            if record.status:
                record.is_client_gone = True
            else:
                await answer(scope, not_ready(is_closing=True))(scope, receive, send)
        except Exception as error:  # a bug: the client must get an answer, and the log a traceback
            log_internal(error)
            if record.status:
                raise
            await answer(scope, error)(scope, receive, send)


def answer(scope: MutableMapping[str, Any], error: BaseException) -> Response:
    """The HTTP answer for `error`, whose code is noted in the request's record."""
    reply = describe(error)
    scope[RECORD].note_error(reply.code)
    return reply.response()


ADMIN_PATH = "/v1/workflows"
"""Where keys of administrators are asked for instead, by the routes themselves."""


class ApiKeyGuard:
    """Answers 401 to requests to /v1/* without ``authorization: Bearer <key>`` with one of the ring's keys, but for
    those to ADMIN_PATH and below it.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, is_guarded: Callable[[str], bool] = lambda _: False) -> None:
        """is_guarded: of which other paths this is true, too."""
        self._app = app
        self._keys = keys
        self._is_guarded = is_guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] in REQUESTS else ""
        if self._is_guarded(path) or (path.startswith("/v1/") and not _is_for_admins(path)):
            owner = self._keys.owner_of(bearer_key(scope))
            if owner is None:
                error = InvalidApiKeyError("Missing or incorrect API key. Send it as 'Authorization: Bearer <key>'.")
                await answer(scope, error)(scope, receive, send)
                return
            scope[OWNER] = owner
        await self._app(scope, receive, send)


def owner_of(scope: MutableMapping[str, Any]) -> str:
    """The digest of the caller's key, which owns what it makes; "" for all callers if no keys are required."""
    return str(scope.get(OWNER, ""))


def _is_for_admins(path: str) -> bool:
    return path == ADMIN_PATH or path.startswith(f"{ADMIN_PATH}/")


def bearer_key(scope: Scope) -> bytes:
    """The request's key; empty, which never matches, if there is none."""
    scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    return bytes(key.strip()) if scheme.lower() == b"bearer" else b""
