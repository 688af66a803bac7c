"""Requests that come while nothing is served are refused, counted, and told when to come again."""

from __future__ import annotations

import pytest

from core.config import StencilConfig
from core.errors import OverloadedError
from engine.client.async_engine import AsyncEngine
from engine.observability.metrics import Metrics


def rejected(metrics: Metrics, reason: str) -> float:
    start = f'stencil:request_rejects_total{{reason="{reason}"}} '
    (line,) = (line for line in metrics.exposition().decode().splitlines() if line.startswith(start))
    return float(line.removeprefix(start))


@pytest.mark.parametrize("ask", [AsyncEngine.check_ready, AsyncEngine.choose_model])
async def test_a_request_is_refused_while_models_load_and_when_the_server_shuts_down(ask: object) -> None:
    engine = AsyncEngine(StencilConfig())  # serves nothing before it is started
    with pytest.raises(OverloadedError, match="not ready") as loading:
        ask(engine)  # type: ignore[operator]
    assert (loading.value.retry_after, rejected(engine.metrics, "not_ready")) == (2.0, 1.0)
    await engine._sessions.drain(0.0)
    with pytest.raises(OverloadedError, match="shutting down") as closing:
        ask(engine)  # type: ignore[operator]
    assert (closing.value.retry_after, rejected(engine.metrics, "shutting_down")) == (1.0, 1.0)
