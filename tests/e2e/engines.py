"""Starts an AsyncEngine in the test's process, with real engines and image processors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import on_ray

from core.config import StencilConfig
from engine.client.async_engine import AsyncEngine


@asynccontextmanager
async def serving_engine(config: StencilConfig) -> AsyncIterator[AsyncEngine]:
    """A started and ready engine; always shut down at the end."""
    with on_ray.settings() as settings:
        placed = msgspec.structs.replace(config.engine, **settings)
        engine = AsyncEngine(msgspec.structs.replace(config, engine=placed))
        await engine.start()
        try:
            await engine.ready()
            yield engine
        finally:
            await engine.shutdown(drain_seconds=5)
