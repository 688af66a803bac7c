"""What the server records of each HTTP request: one log line, and a count if it was refused."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from api_calls import IMAGE, post_edit
from fake_engine import FakeEngine

from core.errors import DeadlineExceededError, EngineDeadError, OverloadedError
from core.ipc.logs import JsonFormatter
from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.openai.guards.request_record import outcome_of


class Lines(logging.Handler):
    """The log lines, as the objects of JSON lines."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter("stencil"))
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))

    def only(self) -> dict[str, Any]:
        (line,) = [line for line in self.lines if line["logger"] == "stencil.access"]
        return line


@pytest.fixture
def log() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("stencil")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


async def test_a_finished_request(client: httpx.AsyncClient, log: Lines) -> None:
    response = await post_edit(client, n="2")
    line = log.only()
    assert line["request_id"] == response.headers["x-request-id"]
    assert (line["message"], line["level"]) == ("finished", "info")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/images/edits", 200)
    assert (line["images"], line["mask_ratio"], line["steps"], line["cache"]) == (2, 0.25, 8, "off")
    assert line["ms"] == {
        "queue": 1.0,
        "preprocess": 2.0,
        "encode": 3.0,
        "prime": 0.0,
        "denoise": 4.0,
        "decode": 5.0,
        "postprocess": 6.0,
    }
    assert 0 <= line["seconds"] < 5
    assert "error" not in line


async def test_each_part_of_ms_is_the_slowest_images(client: httpx.AsyncClient, engine: FakeEngine, log: Lines) -> None:
    slow = replace(engine.report, ms=engine.report.ms | {"decode": 50.0}, engine=1)
    reports = iter([slow, replace(engine.report, engine=0)])
    engine.report_of = lambda _: next(reports)
    await post_edit(client, n="2", stream="true")
    assert log.only()["ms"]["decode"] == 50.0
    assert log.only()["engines"] == [0, 1]


@pytest.mark.parametrize(
    ("error", "message", "status", "code"),
    [
        (EngineDeadError("/secret"), "failed", 500, "engine_died"),
        (DeadlineExceededError("late"), "failed", 504, "deadline_exceeded"),
        (OverloadedError("full", retry_after=1), "refused", 503, "server_is_overloaded"),
    ],
)
async def test_requests_that_were_not_served_are_logged_with_their_error(
    client: httpx.AsyncClient, engine: FakeEngine, log: Lines, error: Exception, message: str, status: int, code: str
) -> None:
    engine.entering = error
    await post_edit(client)
    line = log.only()
    assert (line["message"], line["status"], line["error"]) == (message, status, code)
    assert "images" not in line


async def test_a_stream_that_fails_after_its_200(client: httpx.AsyncClient, engine: FakeEngine, log: Lines) -> None:
    engine.failing = EngineDeadError("/secret")
    await post_edit(client, stream="true", partial_images="1")
    line = log.only()
    assert (line["message"], line["status"], line["error"]) == ("failed", 200, "engine_died")
    assert {line["request_id"] for line in log.lines} == {line["request_id"]}


async def test_text_from_clients_is_escaped_and_cut(engine: FakeEngine, log: Lines) -> None:
    app = create_app(engine, ServerSettings(api_keys=(), max_upload_bytes=1000))
    transport = httpx.ASGITransport(app, client=("\x9b31m\x85\u2028" + "a" * 5000, 1))  # a header that a proxy forwards
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.get("/%1b[31m%c2%85" + "a" * 5000)
    line = log.only()
    for text in (line["client"], line["path"]):
        assert text.isprintable()
        assert len(text) < 300
    assert line["path"].startswith("/\\x1b[31m\\x85aaa")


async def test_a_bad_field_and_an_unknown_path(client: httpx.AsyncClient, log: Lines) -> None:
    await post_edit(client, n="99")
    assert (log.only()["message"], log.only()["status"]) == ("refused", 400)
    log.lines.clear()
    await client.get("/v1/nothing%0A")
    line = log.only()
    assert (line["message"], line["error"], line["path"]) == ("refused", "unknown_url", "/v1/nothing\\n")


async def test_lines_hold_no_prompt(client: httpx.AsyncClient, log: Lines) -> None:
    await post_edit(client, prompt="a secret wish")
    await post_edit(client, prompt="a secret wish", n="99")
    assert len(log.lines) == 2
    assert "wish" not in json.dumps(log.lines)


async def test_probes_are_logged_at_debug_level_only(client: httpx.AsyncClient, log: Lines) -> None:
    for path in ("/health", "/ready", "/metrics"):
        await client.get(path)
    assert log.lines == []


async def test_requests_at_once_keep_their_ids(client: httpx.AsyncClient, engine: FakeEngine, log: Lines) -> None:
    engine.gate.clear()
    calls = [asyncio.create_task(post_edit(client)) for _ in range(5)]
    while engine.num_open < 4:  # its whole queue
        await asyncio.sleep(0.01)
    engine.gate.set()
    responses = await asyncio.gather(*calls)
    assert {line["request_id"] for line in log.lines} == {each.headers["x-request-id"] for each in responses}


@pytest.mark.parametrize(
    ("status", "error", "outcome"),
    [
        (200, None, "finished"),
        (200, "internal_error", "failed"),
        (500, "internal_error", "failed"),
        (504, "deadline_exceeded", "failed"),
        (503, "server_is_overloaded", "refused"),
        (401, "invalid_api_key", "refused"),
        (499, None, "cancelled"),
        (499, "request_cancelled", "cancelled"),
    ],
)
def test_outcomes(status: int, error: str | None, outcome: str) -> None:
    assert outcome_of(status, error) == outcome


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
async def guarded(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerSettings(api_keys=("k",), max_upload_bytes=1000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


def refusals(engine: FakeEngine) -> dict[str, float]:
    """Reason -> number of refusals."""
    prefix = 'stencil:request_rejects_total{reason="'
    lines = [line for line in engine.metrics.exposition().decode().splitlines() if line.startswith(prefix)]
    counts = {line.split('"')[1]: float(line.rsplit(" ")[-1]) for line in lines}
    return {reason: count for reason, count in counts.items() if count}


async def test_refusals_are_counted_by_reason(guarded: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert refusals(engine) == {}
    await post_edit(guarded)
    await guarded.get("/nothing")  # an unknown route: not counted as a refusal
    guarded.headers["authorization"] = "Bearer k"
    await post_edit(guarded)
    await post_edit(guarded, n="99")
    assert refusals(engine) == {"unauthorized": 1, "invalid": 1}
    engine.num_open = engine.config.max_queue
    await post_edit(guarded)
    assert refusals(engine) == {"unauthorized": 1, "invalid": 1, "queue_full": 1}


async def test_refusals_while_it_cannot_serve(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_ready = False
    for path in ("/ready", "/v1/models"):  # ask for no work
        await client.get(path)
    await post_edit(client)
    await client.post("/v1/templates", files=[IMAGE])
    assert refusals(engine) == {"not_ready": 2}
    engine.is_closing = True
    await post_edit(client)
    assert refusals(engine) == {"not_ready": 2, "shutting_down": 1}
