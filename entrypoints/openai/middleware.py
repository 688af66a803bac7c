"""What every request passes: a request id, timing, one log line, the API key. Plain ASGI, so nothing is buffered."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import OverloadedError
from entrypoints.openai.errors import InvalidApiKeyError, describe, log_internal

REQUEST_ID = "stencil.request_id"  # keys of the ASGI scope
CLIENT_GONE = "stencil.client_gone"
OWNER = "stencil.owner"  # digest of the key that came; only where keys are asked for
CLIENT_GONE_STATUS = 499  # only ever in the log
_PROBES = ("/health", "/ready", "/metrics")  # asked every few seconds by machines

_access_log = logging.getLogger("stencil.access")


class RequestContext:
    """Outermost: gives each request its id, `x-request-id` and `openai-processing-ms`, turns what nobody caught into
    a 500, and logs one line that holds no prompt and no image."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request_id = scope[REQUEST_ID] = f"req_{uuid.uuid4().hex}"
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str(round((time.monotonic() - started) * 1e3))
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:  # the server leaves and waits no longer, which is no error to log
            if status:
                scope[CLIENT_GONE] = True
            else:
                leaving = OverloadedError("The server is shutting down.", retry_after=1.0)
                await describe(leaving).response()(scope, receive, send_with_headers)
        except Exception as error:  # the edge: a bug must reach its client as an answer and the log as a traceback
            log_internal(request_id, error)
            if status:
                raise
            await describe(error).response()(scope, receive, send_with_headers)
        finally:
            shown = CLIENT_GONE_STATUS if scope.get(CLIENT_GONE) else status or CLIENT_GONE_STATUS
            _log_access(scope, request_id, shown, time.monotonic() - started)


def _log_access(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    client = (scope.get("client") or ("-",))[0]
    path = scope["path"].encode("unicode_escape").decode()
    level = logging.DEBUG if path in _PROBES else logging.INFO
    _access_log.log(level, "%s %s %s %s %d %.0f ms", client, request_id, scope["method"], path, status, seconds * 1e3)


class ApiKeyGuard:
    """Lets requests to /v1/* pass only with ``authorization: Bearer <key>``."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()
        self._owner = hashlib.sha256(self._api_key).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/") or self._is_allowed(scope):
            scope[OWNER] = self._owner
            await self._app(scope, receive, send)
            return
        error = InvalidApiKeyError("Missing or incorrect API key. Send it as 'Authorization: Bearer <key>'.")
        await describe(error).response()(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        value = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = value.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key)
