"""No request makes the server open a file, look up a host or connect to anything, whatever names it contains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from api_calls import MASK, assert_refused, post_edit, post_json
from fake_engine import FakeEngine

NAMES = ("../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "..\\..\\x", "tmpl_\x00", "~/x", "%2e%2e/x")
URLS = (
    "http://127.0.0.1:9/a.png",
    "https://example.com/a.png",
    "file:///etc/passwd",
    "ftp://h/a",
    "//h/a",
    "/etc/passwd",
)
TOUCHING = ("open", "os.", "socket.", "subprocess.", "glob.", "shutil.", "tempfile.", "pathlib.", "urllib.")

_watches: list[list[str]] = []


def _on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(TOUCHING):
        for seen in _watches:
            seen.append(f"{event} {arguments}")


sys.addaudithook(_on_audit_event)  # can never be removed, so it hears all the time, but listens in `watched` only


@contextmanager
def watched() -> Iterator[list[str]]:
    """Record the interpreter's audit events for files, sockets and processes in this context."""
    seen: list[str] = []
    _watches.append(seen)
    try:
        yield seen
    finally:
        _watches.remove(seen)


def test_the_watch_sees_files() -> None:
    with watched() as seen, open("/dev/null"):
        pass
    assert any("/dev/null" in event for event in seen)


async def send_names(client: httpx.AsyncClient, name: str) -> list[int]:
    quoted = "".join(f"%{byte:02x}" for byte in name.encode())
    answers = [
        await post_edit(client, files=[MASK], template_id=name),
        await post_edit(client, model=name),
        await client.post("/v1/templates", files=[("image", (name, b"i", "image/png")), ("model", (None, name))]),
        await client.get(f"/v1/templates/{quoted}"),
        await client.delete(f"/v1/templates/{quoted}"),
        await client.get(f"/v1/models/{quoted}"),
        await client.get(f"/{quoted}"),
    ]
    return [answer.status_code for answer in answers]


@pytest.mark.parametrize("name", NAMES)
async def test_names_that_look_like_paths(client: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    await send_names(client, "warm")  # what is imported late is imported now
    with watched() as seen:
        statuses = await send_names(client, name)
    assert seen == []
    assert all(status in (400, 404, 405) for status in statuses[1:]), statuses
    assert all(edit.template_id == name for edit in engine.edits[1:])  # left to the engine's store of templates


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("field", ["images", "mask"])
async def test_urls_are_refused_unfetched(client: httpx.AsyncClient, engine: FakeEngine, url: str, field: str) -> None:
    source = {"image_url": url}
    image = {"image_url": "data:image/png;base64,aW1n"}
    body = (
        {"prompt": "p", "images": [source]} if field == "images" else {"prompt": "p", "images": [image], "mask": source}
    )
    await post_json(client, body)
    with watched() as seen:
        answer = await post_json(client, body)
    message = assert_refused(answer, 400, "unsupported_value", "image" if field == "images" else "mask")
    assert "send the picture itself, as a data: URL" in message
    assert seen == []
    assert engine.edits == []
