"""Fixtures: the HTTP application on a fake engine, without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fake_engine import FakeEngine

from entrypoints.openai.app import ServerSettings, create_app

MAX_UPLOAD_BYTES = 2 * 1024 * 1024


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerSettings(api_keys=(), max_upload_bytes=MAX_UPLOAD_BYTES))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client
