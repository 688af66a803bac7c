"""Which host a request may be for. Plain ASGI."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from entrypoints.hosts import is_loopback, named_host
from entrypoints.openai.errors import HostNotAllowedError
from entrypoints.openai.middleware import answer


class HostGuard:
    """Answers 403, on every path, to a request whose `Host` header names none of the server's hosts.

    A page can have its own name resolve to the address of its visitor's machine (DNS rebinding). For the browser it is
    then of the same origin as a server that listens there, and may send everything and read all answers; but the Host
    header still holds the page's name. Browsers always send one, so a request without it is some other client's.

    Starlette's TrustedHostMiddleware answers in plain text instead of the API's error envelope, looks at the first of
    several Host headers alone, and refuses health checks that send none.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """allowed: the server's, besides the loopback's, as `entrypoints.hosts` spells them."""
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            foreign = next((host for host in hosts if not self._is_allowed(host)), None)
            if foreign is not None:
                await answer(scope, HostNotAllowedError(foreign, named_host(foreign)))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = named_host(host)
        return name is not None and (name in self._allowed or is_loopback(name))
