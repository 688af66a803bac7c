"""A temporary folder that takes no uploads: requests are refused for a retry, and succeed once there is room."""

from __future__ import annotations

import base64
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
from api_calls import IMAGE, assert_refused, post_edit, post_json
from disks import fill, mounted_tmpfs
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families

LARGE = bytes(1_900_000)  # more than is kept in memory, less than the server accepts
TEXT = base64.b64encode(LARGE).decode()

Fault = Callable[[Path], AbstractContextManager[None]]


@contextmanager
def gone(folder: Path) -> Iterator[None]:
    shutil.rmtree(folder)
    yield
    folder.mkdir()


@contextmanager
def limited(folder: Path) -> Iterator[None]:
    """Simulates a quota: only the first bytes of a file can be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def full(folder: Path) -> Iterator[None]:
    folder.rmdir()
    before = tempfile.tempdir
    with mounted_tmpfs(folder, 4_000_000):
        fill(folder / "ballast")
        yield
        (folder / "ballast").unlink()
    assert tempfile.tempdir == before


@pytest.fixture(params=[gone, limited, full])
def fault(request: pytest.FixtureRequest) -> Fault:
    chosen: Fault = request.param
    return chosen


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "uploads"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


async def send_all(client: httpx.AsyncClient) -> list[httpx.Response]:
    """Send a large file in every form that requests allow."""
    source = {"image_url": f"data:image/png;base64,{TEXT}"}
    file = ("image", ("a.png", LARGE, "image/png"))
    return [
        await post_edit(client, files=[file]),
        await post_edit(client, files=[IMAGE, ("mask", ("m.png", LARGE, "image/png"))]),
        await post_edit(client, files=[IMAGE, ("mask_image", (None, TEXT))]),
        await post_json(client, {"prompt": "p", "images": [source]}),
        await client.post("/v1/templates", files=[file]),
    ]


async def test_uploads_that_the_disk_does_not_take_are_refused_until_there_is_room(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    folder: Path,
    fault: Fault,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.templates.budget = 10_000_000
    with fault(folder):
        answers = await send_all(client)
        for answer in answers:
            assert_refused(answer, 503, "server_is_overloaded", None)
            assert answer.headers["retry-after"] == "10"
        assert (await post_edit(client)).status_code == 200, "small ones need no disk"
    assert len(engine.edits) == 1
    assert rejects(engine, "no_disk") == len(answers)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(answers)
    assert all("TMPDIR" in warning for warning in warnings)
    assert not [record for record in caplog.records if record.exc_info]
    assert os.listdir(folder) == []
    assert [answer.status_code for answer in await send_all(client)] == [200] * len(answers)


def rejects(engine: FakeEngine, reason: str) -> float:
    families = text_string_to_metric_families(engine.metrics.exposition().decode())
    (family,) = [family for family in families if family.name == "stencil:request_rejects"]
    return next(
        sample.value
        for sample in family.samples
        if sample.labels["reason"] == reason and sample.name.endswith("_total")
    )
