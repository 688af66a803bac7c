"""The playground's files: policy, caching, size, and that they load nothing from other servers."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_calls import assert_refused
from fake_engine import FakeEngine

from core.control import MAX_CONTROL_SCALE
from core.costs.load_report import EngineStats, StepSample
from core.sampling_params import MAX_IMAGES, MAX_INFERENCE_STEPS, MAX_MASK_MARGIN
from core.scheduling.reports.reporter import MAX_RECENT_STEPS
from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.playground.pages import MEDIA_TYPES, PAGES, PREFIX, STATIC, read_static
from entrypoints.serve_args import parse_options

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 300 * 1024
FILES = read_static()
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**({"api_keys": (), "max_upload_bytes": 1000, "playground": True} | changes))


def connect(engine: FakeEngine, settings: ServerSettings) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(engine, settings))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def pages(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(engine, settings()) as client:
        yield client


def urls() -> list[str]:
    return [*PAGES, *(PREFIX + name for name in FILES if name not in PAGES.values())]


async def test_every_file_comes_with_its_type_and_policy(pages: httpx.AsyncClient) -> None:
    for url in urls():
        answer = await pages.get(url)
        name = PAGES.get(url, url.removeprefix(PREFIX))
        assert answer.status_code == 200, url
        assert answer.content == (STATIC / name).read_bytes()
        assert answer.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await pages.head(url)).headers["content-length"] == str(len(answer.content))


async def test_the_policy_lets_a_browser_contact_only_this_server(pages: httpx.AsyncClient) -> None:
    policy = (await pages.get("/")).headers["content-security-policy"]
    allowed = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert allowed["default-src"] == "'none'"
    assert {source for sources in allowed.values() for source in sources.split()} == {"'none'", "'self'", "blob:"}
    assert "blob:" not in allowed["script-src"]


async def test_a_file_with_a_matching_etag_is_not_sent_again(pages: httpx.AsyncClient) -> None:
    etag = (await pages.get("/")).headers["etag"]
    for known in (etag, f'W/{etag}, "other"', "*"):
        answer = await pages.get("/", headers={"if-none-match": known})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag)
    assert (await pages.get("/", headers={"if-none-match": '"other"'})).status_code == 200
    assert (await pages.get("/status")).headers["etag"] != etag


NO_FILES = ("nothing.js", "../pages.py", "%2e%2e/pages.py", "", "js", "index.html", "/etc/passwd", "style.css%0A")


@pytest.mark.parametrize("path", [*(PREFIX + name for name in NO_FILES), "/%0A", "/status%0A"])
async def test_nothing_else_is_served(pages: httpx.AsyncClient, path: str) -> None:
    assert_refused(await pages.get(path), 404, "unknown_url", None)


@pytest.mark.parametrize("host", ["a/b", "a?b", "a#b", "[", ""])
async def test_an_unknown_host_header_changes_nothing(pages: httpx.AsyncClient, host: str) -> None:
    for url in PAGES:
        assert (await pages.get(url, headers={"host": host})).status_code == 200


async def test_pages_are_read_only(pages: httpx.AsyncClient) -> None:
    assert_refused(await pages.post("/"), 405, "method_not_allowed", None)


async def test_the_pages_are_open_where_the_api_asks_for_a_key(engine: FakeEngine) -> None:
    async with connect(engine, settings(api_keys=("k",))) as client:
        for url in urls():
            assert (await client.get(url)).status_code == 200
        assert_refused(await client.get("/v1/engine/stats"), 401, "invalid_api_key", None)


async def test_no_playground(engine: FakeEngine) -> None:
    async with connect(engine, settings(playground=False)) as client:
        for url in ("/", "/status", PREFIX + "style.css"):
            assert_refused(await client.get(url), 404, "unknown_url", None)
    assert parse_options([]).playground
    assert not parse_options(["--no-playground"]).playground


def test_all_files_together_are_small() -> None:
    assert sum(len(file.content) for file in FILES.values()) <= MAX_BYTES


def test_every_file_in_the_folder_is_served_and_goes_into_the_wheel() -> None:
    found = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()}
    assert found == set(FILES)
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["entrypoints"]
    packed = {path.relative_to(STATIC).as_posix() for rule in data for path in (ROOT / "entrypoints").glob(rule)}
    assert found <= packed


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".png")])
def test_nothing_is_loaded_from_other_servers_and_nothing_is_inline(name: str) -> None:
    text = FILES[name].content.decode()
    assert set(re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]+[^\s\"'`]*", text)) <= {SVG_NAMESPACE}
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", text)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".js", ".html", ".css"))])
def test_files_that_other_files_name_exist(name: str) -> None:
    text, folder = FILES[name].content.decode(), Path(name).parent
    for module in re.findall(r'(?:from |import |new URL\()"(\.[^"]+\.js)"', text):
        assert (folder / module).as_posix() in FILES
    for url in re.findall(r'(?:src|href)="(playground/[^"]+)"', text):
        assert url.removeprefix("playground/") in FILES


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("steps", 1, MAX_INFERENCE_STEPS),
        ("images", 1, MAX_IMAGES),
        ("margin", 0, MAX_MASK_MARGIN),
        ("control-scale", 0, MAX_CONTROL_SCALE),
    ],
)
def test_a_number_has_the_limits_of_the_servers_field(field: str, least: float, most: float) -> None:
    (attributes,) = re.findall(f'<input id="{field}"([^>]*)>', FILES["index.html"].content.decode())
    limits = {name: float(value) for name, value in re.findall(r'(min|max)="([\d.]+)"', attributes)}
    assert limits == {"min": least, "max": most}


def test_the_examples_are_listed_with_masks_and_prompts() -> None:
    examples = json.loads(FILES["examples/examples.json"].content)["examples"]
    assert len(examples) >= 5
    for example in examples:
        assert example["title"]
        assert f"examples/{example['image']}" in FILES
        for garment in example["garments"]:
            assert f"examples/{garment['mask']}" in FILES
            assert all(garment["kind"] in prompt for prompt in garment["prompts"])
    assert FILES["examples/person.png"].content == (ROOT / "examples/person.png").read_bytes()


STATS = EngineStats(
    op_seconds={},
    ranks=(),
    r_squared={},
    steps=2,
    batch_tokens=0,
    batch_requests=0,
    tokens_skipped=0,
    prime_chunks=0,
    busy_seconds={},
)


async def test_the_last_steps_on_demand(pages: httpx.AsyncClient, engine: FakeEngine) -> None:
    samples = tuple(StepSample(2, 70, 0.01, 0.01, 0.0, float(i), (f"a-{i}", "b")) for i in range(3))
    engine.stats, engine.recent_steps = (STATS, None), (samples, ())
    first, second = (await pages.get("/v1/engine/stats?steps=2")).json()["engines"]
    assert second["recent_steps"] == []
    assert [step["requests"] for step in first["recent_steps"]] == [["a-1", "b"], ["a-2", "b"]]
    older, newer = first["recent_steps"]
    assert (newer["ms"], newer["tokens"]) == (10.0, 70)
    assert older["ms_ago"] - newer["ms_ago"] == pytest.approx(1000.0)
    assert "recent_steps" not in (await pages.get("/v1/engine/stats")).json()["engines"][0]
    for steps in (-1, MAX_RECENT_STEPS + 1, "many"):
        assert (await pages.get(f"/v1/engine/stats?steps={steps}")).status_code == 400
