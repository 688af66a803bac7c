"""Keys that change while the server runs: all of them change, or none."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from api_calls import IMAGE, assert_refused, post_edit
from fake_engine import FakeEngine

from entrypoints.api_keys import KeySource
from entrypoints.key_reload import KeyReload
from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.openai.guards.key_ring import KeyRing


@dataclass
class Rig:
    """A server whose keys come from a flag and two files."""

    files: list[Path]
    client: httpx.AsyncClient
    reload: KeyReload
    log: pytest.LogCaptureFixture

    def write(self, index: int, text: str) -> None:
        self.files[index].write_text(text)

    async def read_again(self) -> str:
        """Reload the keys; returns the log line."""
        before = len(self.log.messages)
        self.reload.ask()
        async with asyncio.timeout(10):
            while len(self.log.messages) == before:
                await asyncio.sleep(0.005)
        return self.log.messages[-1]

    async def opens(self, *keys: str) -> list[bool]:
        answers = [await self.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}) for key in keys]
        return [answer.status_code == 200 for answer in answers]


@pytest_asyncio.fixture
async def rig(engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Rig]:
    caplog.set_level(logging.INFO, "stencil.api")
    files = [tmp_path / "ours", tmp_path / "theirs"]
    for file, key in zip(files, ("ours-1", "theirs-1"), strict=True):
        file.write_text(key)
        file.chmod(0o600)
    source = KeySource(("flag",), tuple(map(str, files)), {})
    app = create_app(engine, ServerSettings(api_keys=source.read(), max_upload_bytes=1000))  # type: ignore[arg-type]
    reload = KeyReload(source, app.state.keys)
    task = asyncio.create_task(reload.run())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield Rig(files, client, reload, caplog)
    task.cancel()


async def test_new_keys_are_accepted_and_removed_ones_are_not(rig: Rig) -> None:
    assert await rig.opens("flag", "ours-1", "theirs-1", "ours-2") == [True, True, True, False]
    rig.write(0, "# new\nours-2\n")
    assert await rig.opens("ours-1", "ours-2") == [True, False], "no reload was requested yet"
    assert await rig.read_again() == f"{rig.files[0]}, {rig.files[1]}: read again, 3 keys"
    assert await rig.opens("flag", "ours-1", "theirs-1", "ours-2") == [True, False, True, True]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("", "holds no key"),
        ("# all gone\n", "holds no key"),
        ("ours-2\nours\0-3", "line 2 of the key file"),
        (None, "No such file"),
    ],
)
async def test_a_bad_file_leaves_all_keys_as_they_are(rig: Rig, damage: str | None, why: str) -> None:
    rig.write(0, "ours-2")
    if damage is None:
        rig.files[1].unlink()
    else:
        rig.write(1, damage)
    assert why in await rig.read_again()
    record = rig.log.records[-1]
    assert record.levelno == logging.ERROR
    assert "stay as they are (3)" in record.getMessage()
    assert "ours-" not in record.getMessage()
    assert await rig.opens("flag", "ours-1", "theirs-1", "ours-2") == [True, True, True, False]
    rig.files[1].write_text("theirs-2")
    rig.files[1].chmod(0o600)
    await rig.read_again()
    assert await rig.opens("ours-2", "theirs-2", "ours-1") == [True, True, False], "it goes on after a failure"


async def test_a_file_that_has_become_readable_by_others_is_refused(rig: Rig) -> None:
    rig.write(0, "ours-2")
    rig.files[0].chmod(0o644)
    assert "chmod 600" in await rig.read_again()
    assert await rig.opens("ours-1", "ours-2") == [True, False]


async def test_a_pipe_is_not_waited_for(rig: Rig) -> None:
    rig.files[0].unlink()
    os.mkfifo(rig.files[0], 0o600)
    assert "is a pipe" in await rig.read_again()
    assert await rig.opens("ours-1") == [True]


async def test_a_key_keeps_what_it_owns(rig: Rig, engine: FakeEngine) -> None:
    rig.client.headers["authorization"] = "Bearer ours-1"
    path = f"/v1/templates/{(await rig.client.post('/v1/templates', files=[IMAGE])).json()['id']}"
    assert (await post_edit(rig.client)).status_code == 200
    rig.write(0, "ours-0\nours-1")
    await rig.read_again()
    assert (await rig.client.get(path)).status_code == 200
    assert (await post_edit(rig.client)).status_code == 200
    rig.write(0, "ours-0")
    await rig.read_again()
    assert_refused(await rig.client.get(path), 401, "invalid_api_key", None)
    rig.write(0, "ours-1")
    await rig.read_again()
    assert (await rig.client.get(path)).status_code == 200
    assert len({edit.owner for edit in engine.edits}) == 1


def test_owners_are_the_same_after_a_restart() -> None:
    ring, later = KeyRing(["a", "b"]), KeyRing(["b"])
    assert ring.owner_of(b"b") == later.owner_of(b"b") is not None
    assert later.owner_of(b"a") is None
    assert later.owner_of(b"") is None
    assert len(ring) == 2
