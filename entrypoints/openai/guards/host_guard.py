"""HostGuard: middleware that refuses requests for hosts that the server does not serve. Plain ASGI."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from entrypoints.hosts import is_loopback, named_host
from entrypoints.openai.answer.errors import HostNotAllowedError
from entrypoints.openai.guards.middleware import REQUESTS, answer


class HostGuard:
    """Answers 403, on every path, to a request whose `Host` header names none of the server's hosts.

    Protects from DNS rebinding: a web page makes its own name resolve to the address of its visitor's machine. The
    browser then takes a server there for the page's own origin and lets the page read its answers; but the Host header
    still has the page's name. Browsers always send one, so a request without it comes from another client and passes.

    Not Starlette's TrustedHostMiddleware, which answers in plain text instead of the API's error envelope, checks only
    the first of several Host headers, and refuses health checks that send none.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """allowed: hosts of the server besides loopback, normalised by `entrypoints.hosts`."""
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in REQUESTS:
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            foreign = next((host for host in hosts if not self._is_allowed(host)), None)
            if foreign is not None:
                await answer(scope, HostNotAllowedError(foreign, named_host(foreign)))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = named_host(host)
        return name is not None and (name in self._allowed or is_loopback(name))
