"""Behaviour of all requests: headers, error envelope, limits, streaming, keys, disconnects."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from api_calls import IMAGE, assert_refused, post_edit, post_json
from fake_engine import MODEL, FakeEngine

from core.config import CacheConfig, EngineConfig, ModelConfig, StencilConfig
from core.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidImageError,
    ModelUnavailableError,
    OutOfMemoryError,
    OverloadedError,
    RunError,
)
from core.ipc.logs import TextFormatter
from engine.client import async_engine
from engine.client.async_engine import AsyncEngine
from entrypoints.openai.answer import edit_response
from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.openai.body import chunks
from entrypoints.openai.body.uploads import SpooledUpload

MAX_UPLOAD_BYTES = 2 * 1024 * 1024  # as in conftest
MULTIPART = {"content-type": "multipart/form-data; boundary=b"}


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidImageError("bad", param="image", code="invalid_image_file"), 400, "image_generation_user_error", None),
        (InvalidImageError("big", param="image", code="image_too_large"), 400, "invalid_request_error", None),
        (OverloadedError("full", retry_after=3.2), 503, "service_unavailable_error", "server_is_overloaded"),
        (DeadlineExceededError("late"), 504, "server_error", "deadline_exceeded"),
        (EngineDeadError("/secret/path"), 500, "server_error", "engine_died"),
        (
            ModelUnavailableError("/secret/path", cause="load", retry_after=3.2),
            503,
            "server_error",
            "model_unavailable",
        ),
        (OutOfMemoryError("/secret/path"), 500, "server_error", "out_of_memory"),
        (RunError("/secret/path"), 422, "invalid_request_error", "workflow_failed"),
        (RuntimeError("/secret/path"), 500, "server_error", "internal_error"),
    ],
)
@pytest.mark.parametrize("moment", ["entering", "failing"])
async def test_engine_errors(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    error: Exception,
    status: int,
    kind: str,
    code: str | None,
    moment: str,
) -> None:
    """At admission, and while running as long as no byte was sent."""
    setattr(engine, moment, error)
    response = await post_edit(client)
    body = response.json()["error"]
    assert (response.status_code, body["type"]) == (status, kind)
    assert body["code"] == (code or error.code)
    assert "/secret/path" not in response.text
    assert response.headers["x-request-id"].startswith("req_")
    assert int(response.headers["openai-processing-ms"]) >= 0
    assert response.headers.get("retry-after") == ("4" if status == 503 else None)
    assert response.headers.get("x-should-retry") == ("false" if status == 504 else None)
    assert engine.num_open == 0


async def test_the_text_of_internal_errors_is_only_in_the_log(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets the request id, the log the reason; errors that are not the server's fault are not logged as its
    errors.
    """
    caplog.handler.setFormatter(TextFormatter())
    for error, is_internal in (
        (EngineDeadError("/secret/path"), True),
        (OverloadedError("full", retry_after=1), False),
    ):
        caplog.clear()
        engine.entering = error
        response = await post_edit(client)
        logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(logged) == is_internal
        for record in logged:
            assert f"[{response.headers['x-request-id']}] failed: " in caplog.text
            assert "/secret/path" in record.getMessage()
            assert record.exc_info is not None


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("load", "could not load this model's weights"),
        ("deaths", "Requests of this model have ended worker processes"),
        ("owner_deaths", "Your requests of this model have ended worker processes"),
    ],
)
async def test_a_refused_model_is_refused_with_its_cause(
    client: httpx.AsyncClient, engine: FakeEngine, cause: str, text: str
) -> None:
    engine.failing = ModelUnavailableError("/secret/path", cause=cause, retry_after=640.0)
    response = await post_edit(client)
    assert text in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "120", "more is ignored by clients"


async def test_unknown_path_and_method(client: httpx.AsyncClient) -> None:
    assert_refused(await client.get("/v1/nothing"), 404, "unknown_url", None)
    assert_refused(await client.post("/v1/images/variations", files=[IMAGE]), 404, "unknown_url", None)
    assert_refused(await client.post("/v1/images/edits/"), 404, "unknown_url", None)
    response = await client.get("/v1/images/edits")
    assert_refused(response, 405, "method_not_allowed", None)
    assert response.headers["allow"] == "POST"


async def test_health_says_which_engines_serve(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/health")).json()["status"] == "ok"
    engine.alive, engine.replicas = (True, False), (("serving", 0), ("restarting", 2))
    engine.engines, engine.num_ranks = (0, 4), (1, 0)
    response = await client.get("/health")
    assert response.status_code == 200
    engines = [
        {"index": 0, "alive": True, "state": "serving", "restarts": 0, "workers": 1},
        {"index": 4, "alive": False, "state": "restarting", "restarts": 2, "workers": 0},
    ]
    assert response.json() == {"status": "degraded", "engines": engines}
    engine.engines, engine.replicas, engine.num_ranks = (), (), ()
    assert (await client.get("/health")).json() == {"status": "degraded", "engines": []}
    engine.models = {}
    assert (await client.get("/health")).json()["status"] == "loading"


async def test_health_is_degraded_while_a_worker_is_dead(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    config = msgspec.structs.replace(engine.config.engine, workers_per_engine=2)
    engine.config = msgspec.structs.replace(engine.config, engine=config)
    for workers, status in (((2, 2), "ok"), ((2, 1), "degraded")):
        engine.num_ranks = workers
        told = (await client.get("/health")).json()
        assert (told["status"], [each["workers"] for each in told["engines"]]) == (status, list(workers))


async def test_not_ready(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_ready = False
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/metrics")).status_code == 200
    for response in (await client.get("/ready"), await client.get("/v1/models"), await post_edit(client)):
        assert_refused(response, 503, "server_is_overloaded", None)
        assert response.headers["retry-after"] == "2"


async def test_it_loads_while_the_folder_of_cached_pages_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP is served from the first moment on, and a file system may take long to answer."""
    answered = threading.Event()

    def check_slowly(cache: CacheConfig) -> None:
        answered.wait()
        raise ConfigError("it is no folder")

    monkeypatch.setattr(async_engine, "check_page_folder", check_slowly)
    model = ModelConfig(model="m", device="cuda")  # whose workers no launcher forks
    engine = AsyncEngine(StencilConfig(engine=EngineConfig(models=(model,))))
    app = create_app(engine, ServerSettings(api_keys=(), max_upload_bytes=1000, comfy_api=True))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            state = {"index": 0, "alive": False, "state": "loading", "restarts": 0, "workers": 0}
            assert (await client.get("/health")).json() == {"status": "loading", "engines": [state]}
            assert (await client.get("/v1/engine/stats")).json()["engines"][0]["state"] == "loading"
            assert (await client.post("/upload/image", files=[IMAGE])).status_code == 400  # it is no picture
    finally:
        answered.set()
    with pytest.raises(ConfigError, match="no folder"):
        await starting


async def test_ready_models_and_metrics(client: httpx.AsyncClient) -> None:
    assert (await client.get("/ready")).json() == {"status": "ready"}
    listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["tiny/fill"]
    for path in ("tiny/fill", "tiny%2Ffill"):
        assert (await client.get(f"/v1/models/{path}")).json() == listed["data"][0]
    assert_refused(await client.get("/v1/models/tiny"), 404, "model_not_found", "model")
    assert "stencil:request_success_total" in (await client.get("/metrics")).text


async def test_models_tell_the_dtype_that_they_compute_in(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.models["half"] = msgspec.structs.replace(MODEL, name="half", dtype="bfloat16")
    data = (await client.get("/v1/models")).json()["data"]
    assert [model["dtype"] for model in data] == ["float32", "bfloat16"]


async def test_models_tell_how_masks_are_asked_for(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.models["sam"] = msgspec.structs.replace(MODEL, name="sam", selects_by=("points", "box"))
    data = (await client.get("/v1/models")).json()["data"]
    assert [model["selects_by"] for model in data] == [[], ["points", "box"]]


async def test_probes_may_use_head_requests(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert ((await client.head(path)).status_code, (await client.get(path)).status_code) == (200, 200)
    engine.is_ready = False
    assert (await client.head("/ready")).status_code == 503


async def test_a_bad_query_has_a_readable_error(client: httpx.AsyncClient) -> None:
    for steps, wrong in (("513", "should be less than or equal to 512"), ("x", "should be a valid integer")):
        response = await client.get(f"/v1/engine/stats?steps={steps}")
        message = assert_refused(response, 400, "invalid_value", "steps")
        assert message.startswith(f"Invalid 'steps': Input {wrong}")


async def test_openapi_document(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert document["info"]["title"] == "Stencil"
    content = document["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]
    properties = content["multipart/form-data"]["schema"]["properties"]
    assert properties["n"] == {"type": "integer", "description": "Images to make.", "minimum": 1, "maximum": 10}
    assert {"image", "mask", "mask_image", "prompt", "seed"} <= set(properties)


async def test_the_reference_page_loads_nothing_and_names_every_field(client: httpx.AsyncClient) -> None:
    """Neither scripts nor pictures, of another host or this one: without internet it is not blank."""
    answer = await client.get("/docs")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for word in ("<script", "<link", "src=", "http://", "https://", "url(", "@import"):
        assert word not in answer.text
    document = (await client.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            assert f"{method.upper()} {path}</h2>" in answer.text
            for body in told.get("requestBody", {}).get("content", {}).values():
                for name in body["schema"].get("properties", {}):
                    assert f"<code>{name}</code>" in answer.text
    assert (await client.get("/redoc")).status_code == 404


async def test_adapters_are_named_in_metrics_to_those_who_may_list_them(
    client: httpx.AsyncClient, guarded: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """With keys, only to those who have one; how many there are is no secret."""
    engine.metrics.name_adapters(["hat", "shirt"])
    named = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="hat,shirt"'
    assert named in (await client.get("/metrics")).text
    assert named in (await guarded.get("/metrics", headers={"authorization": "Bearer sésame".encode()})).text
    for headers in ({}, {"authorization": "Bearer wrong"}):
        told = (await guarded.get("/metrics", headers=headers)).text
        assert 'max_lora="2",running_lora_adapters=""' in told
        assert "shirt" not in told


# --------------------------------------------------------------------------------------------------------- API key


@pytest.fixture
async def guarded(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerSettings(api_keys=("sésame",), max_upload_bytes=MAX_UPLOAD_BYTES))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("header", [None, "", "Bearer ", "Bearer wrong", "Basic sésame", "sésame", "Bearer sésame2"])
async def test_wrong_key(guarded: httpx.AsyncClient, engine: FakeEngine, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    response = await guarded.post("/v1/images/edits", headers=headers, files=[IMAGE])
    assert_refused(response, 401, "invalid_api_key", None)
    assert response.headers["www-authenticate"] == "Bearer"
    assert "sésame" not in response.text
    assert engine.edits == []


async def test_right_key_and_open_paths(guarded: httpx.AsyncClient) -> None:
    headers = {"authorization": "bearer sésame".encode()}
    assert (await guarded.get("/v1/models", headers=headers)).status_code == 200
    assert (await guarded.get("/v1/nothing", headers=headers)).status_code == 404
    for path in ("/health", "/ready", "/metrics"):
        assert (await guarded.get(path)).status_code == 200


# --------------------------------------------------------------------------------------------------------- limits


def part(name: bytes, filename: bytes = b"") -> bytes:
    file = b'; filename="%s"' % filename if filename else b""
    return b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n' % (name, file)


async def endless(head: bytes, sent: list[int]) -> AsyncIterator[bytes]:
    """A body that never ends, so that a server which reads all of it hangs. `sent` counts chunks of 64 KiB."""
    yield head
    while True:
        sent.append(1)
        yield b"x" * 65536
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("name", "filename", "limit", "param"),
    [
        (b"image", b"a.png", MAX_UPLOAD_BYTES, "image"),
        (b"image[]", b"a.png", MAX_UPLOAD_BYTES, "image"),
        (b"mask", b"a.png", MAX_UPLOAD_BYTES, "mask"),
        (b"unknown", b"a.png", MAX_UPLOAD_BYTES, "unknown"),
        (b"mask_image", b"", MAX_UPLOAD_BYTES * 3 // 2, "mask_image"),
        (b"prompt", b"", 1024 * 1024, "prompt"),
    ],
)
async def test_too_large_part_is_refused_while_it_streams(
    client: httpx.AsyncClient, name: bytes, filename: bytes, limit: int, param: str
) -> None:
    sent: list[int] = []
    body = endless(part(name, filename), sent)
    async with asyncio.timeout(10):
        response = await client.post("/v1/images/edits", content=body, headers=MULTIPART)
    assert_refused(response, 413, "request_too_large", param)
    assert limit <= len(sent) * 65536 <= limit + 2 * 65536


async def test_too_large_json_is_refused_while_it_streams(client: httpx.AsyncClient) -> None:
    for path, limit in (("edits", MAX_UPLOAD_BYTES * 3), ("generations", 1024 * 1024)):
        sent: list[int] = []
        async with asyncio.timeout(10):
            response = await client.post(
                f"/v1/images/{path}", content=endless(b'{"p":"', sent), headers={"content-type": "application/json"}
            )
        assert_refused(response, 413, "request_too_large", None)
        assert len(sent) * 65536 <= limit + 1024 * 1024 + 2 * 65536


async def test_small_pictures_of_a_json_body_are_no_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Together they may have more bytes than its text may, which is as short as ever."""
    content = bytes(300 * 1024)
    picture = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    body: dict[str, object] = {"prompt": "p", "images": [{"image_url": picture}], "mask": {"image_url": picture}}
    answer = await client.post("/v1/images/edits", json=body | {"reference_images": [picture]})
    assert answer.status_code == 200, answer.text
    assert engine.files["image"] == engine.files["mask"] == content
    for further in ({f"field-{number}": "x" * 10_000 for number in range(200)}, {"unknown": [picture] * 6}):
        assert_refused(await client.post("/v1/images/edits", json=body | further), 413, "request_too_large", None)


async def test_declared_length_is_refused_unread(client: httpx.AsyncClient) -> None:
    sent: list[int] = []
    headers = MULTIPART | {"content-length": str(10**12)}
    response = await client.post("/v1/images/edits", content=endless(b"", sent), headers=headers)
    assert_refused(response, 413, "request_too_large", None)
    assert sent == []


@pytest.mark.parametrize(
    ("digits", "status"), [("0" * 5000 + "2", 200), ("0" * 5000 + "9" * 12, 413), ("9" * 5000, 413)]
)
async def test_a_declared_length_of_many_digits(client: httpx.AsyncClient, digits: str, status: int) -> None:
    body = {"prompt": "p"}
    response = await client.post("/v1/images/generations", json=body, headers={"content-length": digits})
    assert response.status_code == status, response.text


async def test_images_beyond_the_first_are_not_stored(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    big = b"y" * (MAX_UPLOAD_BYTES - 1)
    images = [("image[]", ("a.png", big))] * 16
    assert (await post_edit(client, images)).status_code == 200
    assert engine.files["image"] == big


@pytest.fixture
def spooled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every write to an upload."""
    written: list[int] = []
    write = SpooledUpload.write

    async def count(upload: SpooledUpload, data: bytes) -> None:
        written.append(len(data))
        await write(upload, data)

    monkeypatch.setattr(SpooledUpload, "write", count)
    return written


async def test_parts_that_are_not_used_are_not_stored(client: httpx.AsyncClient, spooled: list[int]) -> None:
    big = b"y" * 100_000
    files = [(f"image[{i}]", ("a.png", big)) for i in range(16)]
    files += [("unknown", ("a.png", big)), ("markup[]", ("a.png", big)), ("image[]", ("", b""))]
    texts = [(f"unknown{i}", (None, big)) for i in range(10)]
    response = await post_edit(client, [*files, *texts])
    assert response.status_code == 400  # markup
    assert sum(spooled) == len(big) + len("a red hat")


async def test_all_text_parts_together_have_a_limit(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    texts = [(f"unknown{i}", (None, b"y" * 100_000)) for i in range(11)]
    assert (await post_edit(client, [IMAGE, *texts[:10]])).status_code == 200
    assert_refused(await post_edit(client, [IMAGE, *texts]), 413, "request_too_large", "unknown10")


async def test_file_input_left_empty_before_one_that_is_not(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = part(b"image").replace(b'"image"', b'"image"; filename=""') + b"\r\n" + form()
    assert (await client.post("/v1/images/edits", content=body, headers=MULTIPART)).status_code == 200
    assert engine.files["image"] == b"bytes"


async def test_no_more_bodies_are_read_than_may_wait(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Each may take 200 MB of disk; a request beyond the limit is refused before its body is read."""
    go_on, sent = asyncio.Event(), []

    async def slow() -> AsyncIterator[bytes]:
        sent.append(1)
        await go_on.wait()
        yield form()

    def post() -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(client.post("/v1/images/edits", content=slow(), headers=MULTIPART))

    async with asyncio.timeout(10):
        readers = [post() for _ in range(engine.config.max_queue)]
        while len(sent) < engine.config.max_queue:
            await asyncio.sleep(0)
        for path in ("edits", "generations"):
            refused = await client.post(f"/v1/images/{path}", content=slow(), headers=MULTIPART)
            assert_refused(refused, 503, "server_is_overloaded", None)
            assert refused.headers["retry-after"] == "3"
        assert len(sent) == engine.config.max_queue
        go_on.set()
        assert [(await reader).status_code for reader in readers] == [200] * len(readers)
        assert (await post()).status_code == 200


async def test_a_body_that_stops_arriving_is_refused(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "STALL_SECONDS", 0.05)

    async def stalled() -> AsyncIterator[bytes]:
        yield form()[:20]
        await asyncio.Event().wait()

    for content_type in (MULTIPART, {"content-type": "application/json"}):
        async with asyncio.timeout(10):
            response = await client.post("/v1/images/edits", content=stalled(), headers=content_type)
        assert_refused(response, 408, "request_timeout", None)
        assert response.headers["connection"] == "close"


async def test_mask_image_over_the_limit_as_text(client: httpx.AsyncClient) -> None:
    """Within the limit as text, since line breaks are allowed, but too large when decoded: at the last piece, or
    earlier.
    """
    for size in (MAX_UPLOAD_BYTES + 1, MAX_UPLOAD_BYTES * 9 // 8):
        text = base64.b64encode(bytes(size)).decode()
        refused = await post_edit(client, mask_image=text)
        assert_refused(refused, 413, "request_too_large", "mask_image")
        refused = await post_json(client, {"prompt": "p", "mask_image": text})
        assert_refused(refused, 413, "request_too_large", "mask_image")


async def test_json_image_over_the_limit(client: httpx.AsyncClient) -> None:
    url = "data:image/png;base64," + "AAAA" * (MAX_UPLOAD_BYTES // 3 + 2)
    response = await post_json(client, {"prompt": "p", "images": [{"image_url": url}]})
    assert_refused(response, 413, "request_too_large", "image")


# --------------------------------------------------------------------------------------------------------- streams


async def test_events_byte_for_byte(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await post_edit(client, stream="true", partial_images="1", quality="low")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"].startswith("req_")
    first, last, rest = response.content.split(b"\n\n")
    assert rest == b""
    created = json.loads(first.split(b"data: ")[1])["created_at"]
    b64 = b"iVBORyBub3QgcmVhbGx5"
    assert first == (
        b'event: image_edit.partial_image\ndata: {"type":"image_edit.partial_image","b64_json":"%s","created_at":%d,'
        b'"size":"48x32","quality":"low","background":"auto","output_format":"png","image_index":0,'
        b'"partial_image_index":0}'
    ) % (b64, created)
    assert last.startswith(
        b'event: image_edit.completed\ndata: {"type":"image_edit.completed","b64_json":"%s","created_at":' % b64
    )
    data = json.loads(last.split(b"data: ")[1])
    assert data["usage"]["total_tokens"] == data["usage"]["input_tokens"] + data["usage"]["output_tokens"]
    assert data["stencil"]["ignored"] == []


async def test_stream_of_several_generations(client: httpx.AsyncClient) -> None:
    response = await post_json(client, {"prompt": "p", "n": 3, "stream": True, "seed": 5}, "generations")
    events = [json.loads(event.split("data: ")[1]) for event in response.text.split("\n\n")[:-1]]
    assert {event["type"] for event in events} == {"image_generation.completed"}
    assert sorted((event["image_index"], event["stencil"]["seed"]) for event in events) == [(0, 5), (1, 6), (2, 7)]


async def test_partial_images_of_several_say_whose_they_are(client: httpx.AsyncClient) -> None:
    response = await post_json(client, {"prompt": "p", "n": 2, "stream": True, "partial_images": 1}, "generations")
    events = [json.loads(event.split("data: ")[1]) for event in response.text.split("\n\n")[:-1]]
    kinds = sorted((event["image_index"], event["type"].split(".")[1]) for event in events)
    assert kinds == [(0, "completed"), (0, "partial_image"), (1, "completed"), (1, "partial_image")]


@pytest.mark.parametrize("error", [DeadlineExceededError("late"), RuntimeError("/secret/path")])
async def test_failure_after_the_headers_is_the_last_event(
    client: httpx.AsyncClient, engine: FakeEngine, error: Exception
) -> None:
    engine.failing = error
    response = await post_edit(client, stream="true", partial_images="1")
    assert response.status_code == 200
    partial, failure, rest = response.text.split("\n\n")
    assert partial.startswith("event: image_edit.partial_image\n")
    assert rest == ""
    head, data = failure.split("\n")
    assert head == "event: error"
    body = json.loads(data.removeprefix("data: "))
    assert body["type"] == "error"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "server_error"
    assert "/secret/path" not in response.text


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_the_engine_learns_that_an_edit_has_failed(
    client: httpx.AsyncClient, engine: FakeEngine, stream: str
) -> None:
    """Otherwise it would count the images as given up by the client, see RunningSessions.track."""
    engine.failing = DeadlineExceededError("late")
    await post_edit(client, stream=stream)
    assert engine.failed_with is engine.failing
    assert engine.num_open == 0


async def test_errors_before_the_stream_are_plain_answers(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert_refused(await post_edit(client, stream="true", n="11"), 400, "integer_above_max_value", "n")
    engine.entering = OverloadedError("full", retry_after=1)
    assert_refused(await post_edit(client, stream="true"), 503, "server_is_overloaded", None)


async def test_keep_alive_comments(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_response, "KEEP_ALIVE_SECONDS", 0.02)
    engine.gate.clear()
    asyncio.get_running_loop().call_later(0.1, engine.gate.set)
    response = await post_edit(client, stream="true")
    *comments, last = response.text.split("\n\n")[:-1]
    assert len(comments) >= 2
    assert set(comments) == {": keep-alive"}
    assert last.startswith("event: image_edit.completed\n")


# --------------------------------------------------------------------------------------------------------- raw ASGI


class Exchange:
    """One request to an app by hand: its messages, and a client that can disconnect."""

    def __init__(self, app: Any, body: bytes, headers: dict[str, str]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.started = asyncio.Event()
        self._app, self._body, self._headers = app, body, headers
        self._is_body_sent = False

    async def run(self) -> None:
        raw = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        scope = {"type": "http", "method": "POST", "path": "/v1/images/edits", "headers": raw, "query_string": b""}
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._is_body_sent:
            self._is_body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.started.set()


def form(**fields: str) -> bytes:
    parts = [part(name.encode()) + value.encode() + b"\r\n" for name, value in ({"prompt": "p"} | fields).items()]
    return b"".join([*parts, part(b"image", b"a.png"), b"bytes\r\n--b--\r\n"])


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_disconnect_leaves_the_edit(engine: FakeEngine, stream: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stencil.access")
    caplog.handler.setFormatter(TextFormatter())
    engine.gate.clear()
    app = create_app(engine, ServerSettings(api_keys=(), max_upload_bytes=MAX_UPLOAD_BYTES))
    exchange = Exchange(app, form(stream=stream, partial_images="1"), MULTIPART)
    task = asyncio.create_task(exchange.run())
    async with asyncio.timeout(5):
        while not engine.num_open:
            await asyncio.sleep(0.01)
        exchange.gone.set()
        await task
    assert engine.num_open == 0
    assert "cancelled" in caplog.text
    assert "status=499" in caplog.text


async def test_big_answers_leave_in_pieces(engine: FakeEngine) -> None:
    engine.payload = bytes(range(256)) * 8192  # 2 MiB, 2.7 MB of base64
    app = create_app(engine, ServerSettings(api_keys=(), max_upload_bytes=MAX_UPLOAD_BYTES))
    for stream in ("true", "false"):
        exchange = Exchange(app, form(stream=stream), MULTIPART)
        await exchange.run()
        pieces = [message["body"] for message in exchange.sent[1:]]
        assert max(map(len, pieces)) <= 256 * 1024
        assert all(isinstance(piece, bytes) for piece in pieces)
        assert sum(map(len, pieces)) > 2_700_000


async def test_access_log_holds_no_content(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.handler.setFormatter(TextFormatter())
    response = await post_edit(client, prompt="a secret wish", user="somebody")
    lines = [line for line in caplog.text.splitlines() if " stencil.access " in line]
    assert len(lines) == 1
    assert f"[{response.headers['x-request-id']}] finished" in lines[0]
    assert "method=POST path=/v1/images/edits status=200" in lines[0]
    assert "secret" not in caplog.text
    assert "somebody" not in caplog.text
