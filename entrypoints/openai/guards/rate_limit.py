"""RateLimit: middleware that limits each caller's requests per minute and sends OpenAI's headers. Plain ASGI."""

from __future__ import annotations

import ipaddress
import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.routing.rate_limiter import Quota, RateLimiter
from entrypoints.openai.answer.errors import RateLimitError
from entrypoints.openai.guards.middleware import OWNER, answer
from entrypoints.openai.guards.request_record import TRACED

LIMITED = (*TRACED, "/v1/load_lora_adapter", "/prompt", "/api/prompt")
"""Paths whose POSTs are counted: those that give engines work, or have them read files."""

_IPV6_PREFIX = 64  # bits that identify a caller: a client usually has all addresses below them


class RateLimit:
    """Answers 429 before the body is read. Counts POSTs to the paths in LIMITED; runs behind ApiKeyGuard, so requests
    with an invalid key are not counted. Every answer to a counted request has OpenAI's ``x-ratelimit-*`` headers.
    """

    def __init__(self, app: ASGIApp, limiter: RateLimiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in LIMITED:
            await self._app(scope, receive, send)
            return
        quota = self._limiter.take(_caller(scope), time.monotonic())

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(rate_limit_headers(quota))
            await send(message)

        refusal = None if quota.is_allowed else answer(scope, RateLimitError(quota.limit, quota.retry_after))
        await (refusal or self._app)(scope, receive, send_with_headers)


def rate_limit_headers(quota: Quota) -> dict[str, str]:
    """OpenAI's rate limit headers; the reset is in seconds, such as ``1.5s``."""
    return {
        "x-ratelimit-limit-requests": str(quota.limit),
        "x-ratelimit-remaining-requests": str(quota.remaining),
        "x-ratelimit-reset-requests": f"{round(quota.reset_after, 3):g}s",
    }


def _caller(scope: Scope) -> str:
    """The key's digest, or without keys the client's IPv4 address or IPv6 network, which is usually one client's."""
    if OWNER in scope:
        return str(scope[OWNER])
    host = str((scope.get("client") or ("",))[0])
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a proxy may forward any text; all invalid ones are one caller
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, _IPV6_PREFIX), strict=False))
