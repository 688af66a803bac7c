"""The page budget that engines report: the smallest decides which edits run mask-aware, and restarts keep it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fakes import MODEL

from core.config import CacheConfig, EngineConfig, StencilConfig
from core.ipc.shared_array import Arena
from engine.observability.metrics import Metrics
from engine.router.local_backend import LocalBackend
from engine.router.router import Router


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    arena = Arena.create(0, 1 << 20)
    config = StencilConfig(engine=EngineConfig(data_parallel_size=2, cache=CacheConfig(host_bytes=5)))
    router = Router(config, LocalBackend(arena), Metrics())
    yield router
    await router.engines.close()
    arena.close()


async def test_the_least_of_all_engines_counts(router: Router) -> None:
    assert router.engines.cache.device_bytes is None
    for replica, room in zip(router.engines.replicas.values(), (500, 300), strict=True):
        replica._on_ready({MODEL.name: MODEL}, room)
    assert router.engines.cache == CacheConfig(host_bytes=5, device_bytes=300)


async def test_a_restart_takes_what_was_found_first(router: Router) -> None:
    first = router.engines.replicas[0]
    first._on_ready({MODEL.name: MODEL}, 500)
    assert first._config.cache.device_bytes == 500, "what its next process is started with"
    first._on_ready({MODEL.name: MODEL}, 200)
    assert first._config.cache.device_bytes == 500
