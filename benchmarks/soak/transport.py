"""The wire under all well-behaved clients: sees every attempt, those too that a client library silently repeats."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from benchmarks.soak.ledger import Ledger

REQUEST_SECONDS = 240.0
"""After which a request that had no answer counts as lost; the machine may be shared."""
RETRIES = 200
"""How often a client comes back that was told 503 and when."""


class WatchedTransport(httpx.AsyncBaseTransport):
    """Counts attempts and refusals (503 with a Retry-After); blames every other 5xx but 504, and whatever breaks."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None, keepalive_expiry=5.0))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._ledger.count("attempts")
        try:
            response = await self._inner.handle_async_request(request)
        except httpx.TransportError as error:
            self._ledger.blame("lost", f"no answer: {error!r}", url=str(request.url))
            raise
        self._ledger.saw_request_id(response.headers.get("x-request-id", ""))
        await self._judge(request, response)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _WatchedStream(response.stream, self._ledger, str(request.url))
        return response

    async def _judge(self, request: httpx.Request, response: httpx.Response) -> None:
        status = response.status_code
        if status == 503 and "retry-after" in response.headers:
            self._ledger.count("refused")
        elif status >= 500 and status != 504:
            body = (await response.aread())[:500]
            self._ledger.blame("lost", f"status {status}", url=str(request.url), body=body)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _WatchedStream(httpx.AsyncByteStream):
    """A body that may break off."""

    def __init__(self, inner: httpx.AsyncByteStream, ledger: Ledger, url: str) -> None:
        self._inner = inner
        self._ledger = ledger
        self._url = url

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._inner:
                yield chunk
        except httpx.TransportError as error:
            self._ledger.blame("lost", f"an answer that breaks off: {error!r}", url=self._url)
            raise

    async def aclose(self) -> None:
        await self._inner.aclose()


def watched_client(url: str, ledger: Ledger) -> httpx.AsyncClient:
    """An httpx client of the server on this wire."""
    return httpx.AsyncClient(base_url=url, transport=WatchedTransport(ledger), timeout=REQUEST_SECONDS)
