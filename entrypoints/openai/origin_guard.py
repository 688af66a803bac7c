"""What web pages of other origins may do to a server that asks for no key: read nothing, as for every page, and change
nothing. Plain ASGI.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from entrypoints.openai.errors import ForeignOriginError
from entrypoints.openai.middleware import answer

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class OriginGuard:
    """Answers 403 to a request that changes something and says that a page of another host has sent it.

    Browsers let any page send a form to any host, this one on its user's own machine too, and keep only the answer from
    it; but they name the page's origin (https://fetch.spec.whatwg.org/#origin-header). Other clients name none.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str] = ()) -> None:
        """allowed: origins whose pages may all the same, "*" for any."""
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS:
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


def is_same_host(origin: str, host: str) -> bool:
    """Whether an `Origin` header names the host and port of a `Host` header. The scheme may differ, as it does behind a
    proxy that speaks TLS; "null", which a page without an origin of its own sends, is no host.
    """
    try:
        parts = urlsplit(origin.strip().lower())
    except ValueError:  # a bracket that is not closed
        return False
    port = _DEFAULT_PORTS.get(parts.scheme, "")
    return bool(parts.netloc) and parts.netloc.removesuffix(port) == host.strip().lower().removesuffix(port)
