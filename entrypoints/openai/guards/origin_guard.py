"""OriginGuard: middleware that protects a server without API keys from web pages of other origins. Browsers already
keep such pages from reading answers; this keeps them from changing anything. Plain ASGI.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from entrypoints.openai.answer.errors import ForeignOriginError
from entrypoints.openai.guards.middleware import answer

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class OriginGuard:
    """Answers 403 to requests that may change something, or that open a websocket, and whose `Origin` header names
    another host.

    Browsers let any page send a form to any host, also to a server on the user's own machine, and only hide the answer;
    but they send the page's origin along (https://fetch.spec.whatwg.org/#origin-header). Other clients send none.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str] = ()) -> None:
        """allowed: other origins whose pages may send such requests; "*": any."""
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _may_change(scope):
            headers = {
                name: value.decode("latin-1") for name, value in scope["headers"] if name in (b"origin", b"host")
            }
            origin, host = headers.get(b"origin"), headers.get(b"host", "")
            if origin is not None and not self._is_allowed(origin, host):
                await answer(scope, ForeignOriginError(origin, host))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, origin: str, host: str) -> bool:
        return "*" in self._allowed or origin in self._allowed or is_same_host(origin, host)


def _may_change(scope: Scope) -> bool:
    """Whether a request may change something, or is for a websocket: pages can read those of other origins."""
    is_unsafe = scope["type"] == "http" and scope["method"] not in SAFE_METHODS
    return is_unsafe or scope["type"] == "websocket"


def is_same_host(origin: str, host: str) -> bool:
    """Whether an `Origin` header names the host and port of a `Host` header. The scheme may differ, as behind a proxy
    that terminates TLS. The origin "null", which sandboxed and local pages send, matches no host.
    """
    try:
        parts = urlsplit(origin.strip().lower())
    except ValueError:  # such as an unclosed bracket
        return False
    port = _DEFAULT_PORTS.get(parts.scheme, "")
    return bool(parts.netloc) and parts.netloc.removesuffix(port) == host.strip().lower().removesuffix(port)
