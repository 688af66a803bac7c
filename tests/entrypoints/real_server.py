"""Runs the HTTP application with a fake engine on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from fake_engine import FakeEngine

from entrypoints import serve
from entrypoints.openai.app import ServerSettings, create_app


@asynccontextmanager
async def running(
    engine: FakeEngine, api_keys: tuple[str, ...] = (), *, comfy_api: bool = False
) -> AsyncIterator[tuple[uvicorn.Server, tuple[str, int]]]:
    """Starts the server; returns it with its address."""
    settings = ServerSettings(api_keys=api_keys, max_upload_bytes=1000, comfy_api=comfy_api)
    server = serve.http_server(create_app(engine, settings), has_websockets=comfy_api)
    with serve.bind("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield server, address
        finally:
            server.should_exit = True
            await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
