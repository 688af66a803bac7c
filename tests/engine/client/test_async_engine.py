"""What callers are told when the API server's side of the engine fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn

from core.config import StencilConfig
from core.errors import StencilError
from engine.client.async_engine import AsyncEngine


async def nothing() -> None:
    pass


async def fail() -> NoReturn:
    raise ValueError("a queue is full")


async def test_a_task_that_fails_is_the_cause_that_callers_are_told_of() -> None:
    told: list[StencilError] = []
    closing = SimpleNamespace(close=lambda: None)
    engine = AsyncEngine(StencilConfig())
    engine.services = SimpleNamespace(  # type: ignore[assignment]
        router=None,
        engines=SimpleNamespace(run=fail, fail=told.append, close=nothing),
        images=SimpleNamespace(closed=nothing, stop=nothing),
        keeper=None,
        launcher=closing,
        arena=closing,
    )
    await engine._run()
    assert [str(error) for error in told] == ["internal error: a queue is full"]
