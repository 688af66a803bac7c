"""Disks that fail under a real server: edits give the same pictures, and a disk is used again once it works."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from pictures import alpha_mask, encode, photo
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, fork

from model_executor.page_cache.page_files import RETRY_SECONDS

KEY = {"authorization": "Bearer sk-local"}  # of the shared server
MASK = alpha_mask()


def picture_of(server: ServerProcess, seed: int) -> str:
    """The base64 text of an edit of picture number `seed`."""
    answer = httpx.post(
        f"{server.base_url}/images/edits",
        data={"prompt": "a red hat", "seed": "7"},
        files={"image": encode(photo(seed=seed)), "mask": MASK},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    picture: str = answer.json()["data"][0]["b64_json"]
    return picture


def metric(server: ServerProcess, name: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    return sum(sample.value for f in families for sample in f.samples if sample.name == f"stencil:{name}")


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "below" / "pages"


@pytest.fixture(scope="module")
def cached(
    server_flags: tuple[str, ...], cache_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    flags = ("--cache-disk-bytes", "64M", "--cache-dir", str(cache_folder))
    server = fork(tmp_path_factory.mktemp("server") / "scratch", *server_flags, *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


def use_until_kept(server: ServerProcess, folder: Path, seed: int, number: int, expected: str) -> None:
    """Edit the same picture until all its pages are on the disk, which is tried again after a while."""

    def is_kept() -> bool:
        assert picture_of(server, seed) == expected
        return len(list(folder.glob("*.page"))) == number

    until(is_kept, RETRY_SECONDS + 20)


def test_a_folder_that_cannot_be_made_is_logged_once_and_used_once_it_can(
    cached: ServerProcess, cache_folder: Path
) -> None:
    cache_folder.parent.write_text("in the way")  # works against root, too
    pictures = {picture_of(cached, seed=0) for _ in range(4)}
    until(lambda: metric(cached, "cache_failed_stores_total") >= 5)
    assert len(pictures) == 1
    assert cached.log.read_text().count("no pages are written") == 1
    assert httpx.get(f"{cached.url}/health").json()["status"] == "ok"
    cache_folder.parent.unlink()
    use_until_kept(cached, cache_folder, 0, 5, pictures.pop())
    assert cached.log.read_text().count("are written to") == 2, "that it is over is said, too"


@pytest.fixture
def worker(cached: ServerProcess) -> psutil.Process:
    (found,) = [child for child in cached.children() if any("stencil-worker" in word for word in child.cmdline())]
    return found


def test_a_write_that_fails_in_the_middle_leaves_nothing(
    cached: ServerProcess, cache_folder: Path, worker: psutil.Process
) -> None:
    """A limit on the size of the worker's files makes a write fail as on a full disk."""
    kept = set(cache_folder.glob("*.page"))
    limit = sorted(path.stat().st_size for path in kept)[-1] - 1000
    os.truncate(cached.log, 0)  # the worker has to write it, too
    soft, hard = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
    failed = metric(cached, "cache_failed_stores_total")
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (limit, hard))
    try:
        pictures = {picture_of(cached, seed=1) for _ in range(4)}
        until(lambda: metric(cached, "cache_failed_stores_total") > failed)
        until(lambda: not list(cache_folder.glob("*.tmp")))
        assert kept <= set(cache_folder.glob("*.page"))
    finally:
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert len(pictures) == 1
    use_until_kept(cached, cache_folder, 1, 10, pictures.pop())


def test_uploads_are_refused_while_the_temporary_folder_is_full(server: ServerProcess) -> None:
    def send() -> httpx.Response:
        return httpx.post(
            f"{server.base_url}/images/edits", data={"prompt": "p"}, files={"image": large}, headers=KEY, timeout=60
        )

    large = encode(photo(1500, 1200)) + bytes(2_000_000)
    pid = server.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1_500_000, hard))
    try:
        refused = send()
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
    assert refused.headers["retry-after"] == "10"
    assert not list(server.scratch.rglob("tmp*"))
    assert send().status_code == 200
