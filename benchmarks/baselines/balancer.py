"""Requests spread over several servers, each to the one with the fewest under way: request-level balancing.

What a baseline with two processes has in place of Stencil's router. Bodies and answers pass as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request, Response

from benchmarks.baselines.edit_app import serve


class Balancer:
    """urls: of the servers. Ties go to the one that was sent to least recently."""

    def __init__(self, urls: Sequence[str], http: httpx.AsyncClient) -> None:
        self._urls = list(urls)  # least recently sent to first
        self._num_open = dict.fromkeys(urls, 0)  # url -> requests under way
        self._http = http

    async def forward(self, request: Request) -> Response:
        url = min(self._urls, key=lambda each: self._num_open[each])
        self._urls.remove(url)
        self._urls.append(url)
        self._num_open[url] += 1
        try:
            return await self._send(url, request)
        finally:
            self._num_open[url] -= 1

    async def metrics(self) -> Response:
        """All servers' lines, one after the other."""
        answers = [await self._http.get(f"{url}/metrics") for url in self._urls]
        return Response("".join(answer.text for answer in answers), media_type="text/plain")

    async def _send(self, url: str, request: Request) -> Response:
        kind = {"content-type": request.headers.get("content-type", "")}
        body = await request.body()
        answer = await self._http.request(request.method, url + request.url.path, content=body, headers=kind)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def make_app(urls: Sequence[str]) -> FastAPI:
    """Routes of the edits API, and of what `benchmark_serving` asks."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as http:
            app.state.balancer = Balancer(urls, http)
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        balancer: Balancer = request.app.state.balancer
        return await balancer.metrics()

    @app.post("/v1/images/edits")
    async def edits(request: Request) -> Response:
        balancer: Balancer = request.app.state.balancer
        return await balancer.forward(request)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("urls", nargs="+", metavar="URL", help="of the servers, without a path")
    args = parser.parse_args()
    serve(make_app(args.urls), args.port)


if __name__ == "__main__":
    main()
