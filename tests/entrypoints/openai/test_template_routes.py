"""Templates, the `stencil` object of mask-aware edits, and the engine's statistics, over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from api_calls import IMAGE, MASK, assert_refused, post_edit, post_json
from fake_engine import FakeEngine

from core.costs.load_report import CacheStats, EngineStats, LoadReport, QuarantinedModel, RankModel, RankStats
from core.handles import LoadedComponent, ModelKey
from engine.client.resolve.mask_aware import ExactReason
from engine.router.engine_backend import MachineLink
from entrypoints.openai.app import ServerSettings, create_app

KEY = {"authorization": "Bearer k"}


async def register(client: httpx.AsyncClient, **headers: str) -> dict[str, Any]:
    response = await client.post("/v1/templates", files=[IMAGE], headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json())


# --------------------------------------------------------------------------------------------------------- templates


async def test_register_retrieve_delete(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    template = await register(client)
    assert template == {
        "id": template["id"],
        "object": "template",
        "bytes": len(b"image bytes"),
        "image_tokens": 6,
        "page_bytes": 4096,
        "primed": True,
        "created": 1700000000,
    }
    path = f"/v1/templates/{template['id']}"
    assert (await client.get(path)).json() == template
    deleted = await client.delete(path)
    assert deleted.json() == {"id": template["id"], "object": "template.deleted", "deleted": True}
    assert len(engine.templates) == 0
    for response in (await client.get(path), await client.delete(path)):
        assert_refused(response, 404, "template_not_found", None)


async def test_the_model_field(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [("model", (None, "tiny/fill")), IMAGE]
    template = (await client.post("/v1/templates", files=parts)).json()
    assert engine.templates.get(template["id"], "").model == "tiny/fill"
    response = await client.post("/v1/templates", files=[("model", (None, "other")), IMAGE])
    assert_refused(response, 404, "model_not_found", "model")


async def test_bodies_that_hold_no_single_image(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    no_image = await client.post("/v1/templates", files=[("model", (None, ""))])
    assert_refused(no_image, 400, "missing_required_parameter", "image")
    assert_refused(await client.post("/v1/templates", files=[IMAGE, IMAGE]), 400, "array_above_max_length", "image")
    text = await client.post("/v1/templates", files=[("image", (None, "aGVsbG8="))])
    assert_refused(text, 400, "invalid_type", "image")
    as_json = await client.post("/v1/templates", json={"image": "aGVsbG8="})
    assert_refused(as_json, 415, "unsupported_content_type", None)
    large = ("image", ("a.png", b"x" * 1001))
    message = assert_refused(await client.post("/v1/templates", files=[large]), 400, "image_too_large", "image")
    assert "--template-bytes" in message
    assert len(engine.templates) == 0


async def test_fields_that_templates_do_not_have_are_ignored(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    mask_image = ("mask_image", (None, "not base64!"))
    response = await client.post("/v1/templates", files=[IMAGE, MASK, mask_image, ("n", (None, "99"))])
    assert response.status_code == 200


async def test_a_full_queue_and_a_loading_model(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_open = engine.config.max_queue
    response = await client.post("/v1/templates", files=[IMAGE])
    assert_refused(response, 503, "server_is_overloaded", None)
    engine.num_open, engine.is_ready = 0, False
    assert_refused(await client.post("/v1/templates", files=[IMAGE]), 503, "server_is_overloaded", None)


async def test_a_template_belongs_to_its_key(engine: FakeEngine) -> None:
    """One engine behind two applications with a key each, and one without keys."""

    def door(api_key: str | None) -> httpx.AsyncClient:
        app = create_app(engine, ServerSettings(api_keys=(api_key,) if api_key else (), max_upload_bytes=1000))
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers)

    async with door("mine") as mine, door("yours") as yours, door(None) as open_door:
        path = f"/v1/templates/{(await register(mine))['id']}"
        for stranger in (yours, open_door):
            assert_refused(await stranger.get(path), 404, "template_not_found", None)
            assert_refused(await stranger.delete(path), 404, "template_not_found", None)
        assert (await mine.get(path)).status_code == 200
        await post_edit(mine)
        await post_edit(open_door)
        assert len(engine.edits[0].owner) == 64
        assert "mine" not in engine.edits[0].owner
        assert engine.edits[1].owner == ""


async def test_a_client_that_goes_away_ends_the_registration(engine: FakeEngine) -> None:
    engine.gate.clear()
    app = create_app(engine, ServerSettings(api_keys=(), max_upload_bytes=1000))
    body = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\ni\r\n--b--\r\n'
    messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/templates",
        "query_string": b"",
        "headers": [(b"content-type", b"multipart/form-data; boundary=b")],
    }
    async with asyncio.timeout(10):
        await app(scope, receive, send)
    assert sent[0]["status"] == 499
    engine.gate.set()
    await asyncio.sleep(0)
    assert len(engine.templates) == 0


# --------------------------------------------------------------------------------------------------------- edits


async def test_an_edit_by_template_id(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for response in (
        await post_edit(client, [MASK], template_id="tmpl_1"),
        await post_json(client, {"prompt": "p", "template_id": "tmpl_1"}),
    ):
        assert response.status_code == 200
        assert response.json()["stencil"]["ignored"] == []
        assert (engine.last.template_id, engine.last.image) == ("tmpl_1", None)
    await post_edit(client, template_id="")  # empty is omitted
    assert engine.last.template_id is None
    assert engine.last.image is not None


async def test_an_edit_without_an_image_has_openais_error_message(client: httpx.AsyncClient) -> None:
    for response in (await post_edit(client, [MASK]), await post_edit(client, [MASK], template_id="")):
        message = assert_refused(response, 400, "missing_required_parameter", "image")
        assert message == "Missing required parameter: 'image'."


async def test_a_generation_has_no_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await post_json(client, {"prompt": "p", "template_id": "tmpl_1"}, "generations")
    assert response.json()["stencil"]["ignored"] == ["template_id"]
    assert engine.last.template_id is None


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("disabled", "--no-mask-aware"),
        ("unsafe", "calibration"),
        ("mask_covers_all", "covers the whole image"),
        ("too_large", "--cache-host-bytes"),
        ("full_steps", "full_steps"),
    ],
)
async def test_why_an_edit_was_exact(
    client: httpx.AsyncClient, engine: FakeEngine, reason: ExactReason, word: str
) -> None:
    engine.report = replace(engine.report, exact_reason=reason)
    fields = {"full_steps": "1", "mask_aware": "true", "mask_margin": "0"}
    stencil = (await post_edit(client, **fields)).json()["stencil"]
    assert len(stencil["notes"]) == 1
    assert word in stencil["notes"][0]
    assert sorted(stencil["ignored"]) == ["full_steps", "mask_margin"]
    engine.report = replace(engine.report, unmasked=True)
    (note,) = (await post_edit(client)).json()["stencil"]["notes"]
    assert "No mask was given" in note
    stencil = (await post_json(client, {"prompt": "p"}, "generations")).json()["stencil"]
    assert stencil["notes"] == []


async def test_an_edit_that_asked_for_exact_has_no_note(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.report = replace(engine.report, exact_reason="asked")
    stencil = (await post_edit(client, mask_aware="false", mask_margin="4")).json()["stencil"]
    assert (stencil["notes"], stencil["ignored"]) == ([], ["mask_margin"])


async def test_mask_aware_fields_have_an_effect(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await post_edit(client, mask_aware="true", mask_margin="3", full_steps="2")
    assert response.json()["stencil"]["ignored"] == []
    sampling = engine.last.sampling
    assert (sampling.mask_aware, sampling.mask_margin, sampling.full_steps) == (True, 3, 2)


async def test_cache_facts(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.report = replace(engine.report, cache="miss", tier="host", primed=True, full_steps=1, full_blocks=3)
    engine.report.ms["prime"] = 7.5
    stencil = (await post_edit(client)).json()["stencil"]
    engine.report.ms["prime"] = 0.0
    assert (stencil["cache"], stencil["tier"], stencil["primed"]) == ("miss", "host", True)
    assert (stencil["full_steps"], stencil["full_blocks"]) == (1, 3)
    assert stencil["ms"]["prime"] == 7.5
    assert stencil["template_id"] is None


async def test_results_name_the_templates_they_became(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.report = replace(engine.report, template_id="tmpl")
    assert (await post_edit(client)).json()["stencil"]["template_id"] == "tmpl-0"
    stencil = (await post_edit(client, n="3")).json()["stencil"]
    assert stencil["template_ids"] == ["tmpl-0", "tmpl-1", "tmpl-2"]
    assert "template_id" not in stencil
    events = (await post_edit(client, n="2", stream="true")).text.split("\n\n")
    assert ['"template_id":"tmpl-1"' in event for event in events] == [True, False, False]


# --------------------------------------------------------------------------------------------------------- the engine


LOAD = LoadReport(num_received=5, num_running=2, num_waiting=1, drain_seconds=1.5)
CACHE = CacheStats(
    hits={"host": 6, "disk": 3},
    misses=1,
    primed=5,
    evictions={},
    loads={"disk": 3},
    failed_loads=0,
    failed_stores=0,
    entries={"host": 6},
    used_bytes={"host": 100},
    budget_bytes={"host": 200},
    load_seconds=0.25,
)
STATS = EngineStats(
    op_seconds={"denoise": 1.25},
    ranks=(),
    models={"tiny/fill": "loaded"},
    r_squared={"denoise": 0.98, "prime": float("nan")},
    steps=4,
    batch_tokens=100,
    batch_requests=8,
    tokens_skipped=900,
    prime_chunks=5,
    busy_seconds={"denoise": 0.5},
    cache=CACHE,
)


async def test_engine_stats(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.loads, engine.alive = (LOAD, None), (True, False)
    engine.stats = (STATS, None)
    engine.engines, engine.links = (0, 7), (None, MachineLink("10.0.0.2", 0.1734, 1e-9))
    engine.replicas = (("serving", 0), ("draining", 0))
    stats = (await client.get("/v1/engine/stats")).json()
    assert stats["object"] == "engine.stats"
    assert stats["queue"] == {"running": 2, "waiting": 1, "admitted": 0, "limit": 4}
    first, second = stats["engines"]
    assert (first["index"], first["alive"], first["load"]["drain_seconds"]) == (0, True, 1.5)
    assert first["stage_seconds"] == {"denoise": 1.25}
    assert first["models"] == {"tiny/fill": "loaded"}
    assert first["cost_model"]["r_squared"] == {"denoise": 0.98, "prime": None}
    assert first["cache"]["hit_ratio"] == 0.9
    assert first["totals"]["tokens_skipped"] == 900
    parts = (
        "load",
        "stage_seconds",
        "models",
        "resident_models",
        "ranks",
        "quarantine",
        "totals",
        "cost_model",
        "cache",
    )
    nothing = dict.fromkeys(parts)
    place = {"state": "draining", "machine": "10.0.0.2", "silent_seconds": 0.2}
    assert second == {"index": 7, "alive": False} | place | nothing
    assert (first["state"], first["machine"], first["silent_seconds"]) == ("serving", None, None)
    assert stats["templates"] == {"count": 0, "used_bytes": 0, "budget_bytes": 1000}
    assert stats["models"][0]["id"] == "tiny/fill"
    assert stats["models"][0]["page_scheme"] is None


async def test_an_engine_that_only_does_what_it_has_is_shown_at_work(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.loads, engine.stats = (LOAD, LOAD), (STATS, STATS)
    engine.alive, engine.replicas = (False, False), (("draining", 0), ("restarting", 1))
    draining, dead = (await client.get("/v1/engine/stats")).json()["engines"]
    assert (draining["alive"], draining["state"], draining["load"]["num_running"]) == (False, "draining", 2)
    assert draining["stage_seconds"] == {"denoise": 1.25}
    assert (dead["load"], dead["stage_seconds"]) == (None, {})


async def test_components_are_listed_with_the_models_that_share_them(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    vae, unused = ModelKey("0f", "vae"), ModelKey("1e", "vae")
    (name, model), *_ = engine.models.items()
    model = msgspec.structs.replace(model, components=(vae,))
    twin = msgspec.structs.replace(model, name="twin")
    engine.models = {name: model, "twin": twin, "shirt": msgspec.structs.replace(model, name="shirt", parent=name)}
    rank = RankStats((LoadedComponent(vae, 1000), LoadedComponent(unused, 10)), 0.5, deaths=3, is_up=False)
    engine.stats = (msgspec.structs.replace(STATS, ranks=(rank, rank)), None)
    first, _ = (await client.get("/v1/engine/stats")).json()["engines"]
    assert first["resident_models"] == [
        {"component": "vae", "content": "0f", "bytes": 1000, "models": [name, "twin"]},
        {"component": "vae", "content": "1e", "bytes": 10, "models": []},
    ]
    told = {"alive": False, "deaths": 3, "resident_models": first["resident_models"], "models": []}
    assert first["ranks"] == [told | {"busy_seconds": 0.5}] * 2


async def test_each_rank_lists_its_models(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    used = RankModel("a", "resident", 3, 1, 1000, time.monotonic() - 5.0)
    new = RankModel("b", "loading", 0, 0, 0, 0.0)
    engine.stats = (msgspec.structs.replace(STATS, ranks=(RankStats((), 0.5, models=(used, new)),)), None)
    (rank,) = (await client.get("/v1/engine/stats")).json()["engines"][0]["ranks"]
    first, second = rank["models"]
    assert 5.0 <= first.pop("idle_seconds") < 10.0
    assert first == {"model": "a", "state": "resident", "hits": 3, "loads": 1, "bytes": 1000}
    assert second == {"model": "b", "state": "loading", "hits": 0, "loads": 0, "bytes": 0, "idle_seconds": None}


async def test_refused_models_are_listed(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    now = time.monotonic()
    again = QuarantinedModel("m", "load", 1, 0.0, 10.0, ("edges",))
    refused = (QuarantinedModel("m", "deaths", 2, now - 5.0, now + 15.0), again)
    engine.stats = (msgspec.structs.replace(STATS, quarantine=refused), None)
    first, _ = (await client.get("/v1/engine/stats")).json()["engines"]
    soon, now_again = first["quarantine"]
    assert {key: soon[key] for key in ("model", "cause", "times")} == {"model": "m", "cause": "deaths", "times": 2}
    assert (5.0 <= soon["seconds"] < 10.0, 10.0 < soon["seconds_left"] <= 15.0) == (True, True)
    assert (now_again["cause"], now_again["seconds_left"]) == ("load", 0.0), "with the next request"
    assert (soon["controlnets"], now_again["controlnets"]) == ([], ["edges"])


async def test_totals_are_summed_over_engines(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    other = msgspec.structs.replace(CACHE, hits={"host": 1}, misses=9, used_bytes={"host": 50, "disk": 7})
    engine.stats = (
        STATS,
        msgspec.structs.replace(STATS, steps=6, busy_seconds={"denoise": 1.0, "prime": 0.2}, cache=other),
    )
    stats = (await client.get("/v1/engine/stats")).json()
    totals, cache = stats["totals"], stats["cache"]
    assert (totals["steps"], totals["tokens_skipped"], totals["busy_seconds"]) == (
        10,
        1800,
        {"denoise": 1.5, "prime": 0.2},
    )
    assert (cache["hit_ratio"], cache["hits"]) == (0.5, {"host": 7, "disk": 3})
    assert cache["used_bytes"] == {"host": 150, "disk": 7}
    engine.alive, engine.loads = (True, False), (LOAD, LOAD)
    after = (await client.get("/v1/engine/stats")).json()
    assert (after["totals"], after["cache"]["hits"]) == (totals, cache["hits"]), "what the dead one did stays done"
    assert after["cache"]["used_bytes"] == {"host": 100}, "it holds nothing"
    assert after["engines"][1]["load"] is None
    engine.stats = (msgspec.structs.replace(STATS, cache=None), None)
    assert (await client.get("/v1/engine/stats")).json()["cache"] is None


async def test_engine_stats_before_anything_is_known(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.models = {}
    stats = (await client.get("/v1/engine/stats")).json()
    assert [each["load"] for each in stats["engines"]] == [None, None]
    assert (stats["cache"], stats["totals"]["steps"], stats["models"]) == (None, 0, [])
    nothing_asked = msgspec.structs.replace(CACHE, hits={}, misses=0)
    engine.stats = (msgspec.structs.replace(STATS, cache=nothing_asked), None)
    assert (await client.get("/v1/engine/stats")).json()["cache"]["hit_ratio"] is None


@pytest.fixture
async def guarded(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerSettings(api_keys=("k",), max_upload_bytes=1000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def test_all_routes_need_the_key(guarded: httpx.AsyncClient) -> None:
    for method, path in (
        ("POST", "/v1/templates"),
        ("GET", "/v1/templates/t"),
        ("DELETE", "/v1/templates/t"),
        ("GET", "/v1/engine/stats"),
    ):
        assert_refused(await guarded.request(method, path), 401, "invalid_api_key", None)
        assert (await guarded.request(method, path, headers=KEY)).status_code != 401


async def test_openapi_names_the_routes(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"/v1/templates", "/v1/templates/{template_id}", "/v1/engine/stats"} <= set(paths)
    form = paths["/v1/templates"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert (set(form["properties"]), form["required"]) == ({"image", "model", "lora"}, ["image"])
