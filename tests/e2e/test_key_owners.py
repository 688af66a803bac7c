"""API keys on a real server with two engines and pages on disk: no key can detect what another key has sent."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pictures import Pixels, alpha_mask, decode, encode, photo
from server_process import ROOT, ServerProcess, fork

A, B, LATER = "sk-a-1f2e", "sk-b-3d4c", "sk-later-5b6a"


def photo_of(seed: int) -> bytes:
    """A picture; each test uses its own."""
    return encode(photo(seed=seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("owners")
    keys = folder / "keys"
    keys.write_text(f"\ufeff{A}\n{B}\n")
    keys.chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def flags(server_flags: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    pages = ("--cache-disk-bytes", "64M", "--cache-dir", str(folder / "pages"))
    return (*server_flags, "--api-key-file", str(folder / "keys"), "--data-parallel-size", "2", *pages)


@pytest.fixture(scope="module")
def two(flags: tuple[str, ...], folder: Path) -> Iterator[ServerProcess]:
    server = fork(folder / "scratch", *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


def post(server: ServerProcess, key: str, seed: int | None, **data: str) -> httpx.Response:
    files = {"mask": ("mask.png", alpha_mask())}
    if seed is not None:
        files["image"] = ("photo.png", photo_of(seed))
    return httpx.post(
        f"{server.base_url}/images/edits",
        data={"prompt": "a red hat", "seed": "3", "num_inference_steps": "4"} | data,
        files=files,
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    )


def edit(server: ServerProcess, key: str, seed: int | None, **data: str) -> tuple[Pixels, dict[str, Any]]:
    """Run an edit; returns the picture and the answer's `stencil` object."""
    answer = post(server, key, seed, **data)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return decode(base64.b64decode(body["data"][0]["b64_json"])), body["stencil"]


def seen(facts: dict[str, Any]) -> tuple[str, bool]:
    """Whether pages were found: `cache`, and `primed`, which must agree with the time spent on priming."""
    assert (facts["ms"]["prime"] > 0) == facts["primed"]
    return facts["cache"], facts["primed"]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_picture_that_another_key_has_edited_is_new(two: ServerProcess) -> None:
    first, facts = edit(two, A, 0)
    assert seen(facts) == ("miss", True)
    for _ in range(2):
        again, facts = edit(two, A, 0)
        assert seen(facts) == ("hit", False)
        assert np.array_equal(again, first)
    others, facts = edit(two, B, 0)
    assert seen(facts) == ("miss", True)
    assert np.array_equal(others, first), "the picture does not depend on the key"
    assert seen(edit(two, B, 0)[1]) == ("hit", False)
    assert seen(edit(two, A, 0)[1]) == ("hit", False)


def test_a_template_that_another_key_has_registered_is_new(two: ServerProcess) -> None:
    def register(key: str) -> dict[str, Any]:
        answer = httpx.post(f"{two.base_url}/templates", files={"image": photo_of(1)}, headers=bearer(key), timeout=60)
        return dict(answer.json())

    mine = register(A)
    assert seen(edit(two, A, None, template_id=mine["id"])[1]) == ("hit", False)
    assert seen(edit(two, B, 1)[1]) == ("miss", True)
    theirs = register(B)
    assert httpx.delete(f"{two.base_url}/templates/{theirs['id']}", headers=bearer(B)).status_code == 200
    assert seen(edit(two, B, 1)[1]) == ("miss", True), "their pages have gone"
    assert seen(edit(two, A, None, template_id=mine["id"])[1]) == ("hit", False), "mine have not"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_an_edit_of_another_keys_result_is_a_miss(two: ServerProcess) -> None:
    painted, facts = edit(two, A, 2, mask_aware="false")
    template = facts["template_id"]
    url = f"{two.base_url}/templates/{template}"
    until(lambda: httpx.get(url, headers=bearer(A)).json()["primed"])
    upload = ("painted.png", encode(painted))

    def edit_painted(key: str) -> tuple[str, bool]:
        answer = httpx.post(
            f"{two.base_url}/images/edits",
            data={"prompt": "a blue hat", "seed": "3", "num_inference_steps": "4"},
            files={"image": upload, "mask": ("mask.png", alpha_mask())},
            headers=bearer(key),
            timeout=60,
        )
        return seen(answer.json()["stencil"])

    assert edit_painted(B) == ("miss", True)
    assert edit_painted(A) == ("hit", False)
    assert post(two, B, None, template_id=template).status_code == 404


def test_keys_are_reloaded_while_edits_run_and_their_pages_stay(two: ServerProcess, folder: Path) -> None:
    expected, _ = edit(two, A, 3)
    keys = folder / "keys"
    keys.write_text(f"{LATER}\n{A}\n")
    assert post(two, LATER, 3).status_code == 401
    two.process.send_signal(signal.SIGHUP)
    until(lambda: post(two, LATER, 3).status_code == 200)
    assert post(two, B, 3).status_code == 401
    again, facts = edit(two, A, 3)
    assert seen(facts) == ("hit", False)
    assert np.array_equal(again, expected)
    keys.write_text("")
    two.process.send_signal(signal.SIGHUP)
    until(lambda: "holds no key" in two.log.read_text())
    assert post(two, A, 3).status_code == 200
    assert post(two, "none", 3).status_code == 401
    keys.write_text(f"{A}\n{B}\n")
    two.process.send_signal(signal.SIGHUP)
    until(lambda: post(two, B, 3).status_code == 200)
    log = two.log.read_text()
    assert not any(key in log for key in (A, B, LATER))


def test_files_of_pages_belong_to_their_owner_across_restarts(
    flags: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    """Uses another folder of pages, so as not to wait for what `two` still writes."""
    own = (*flags[:-2], "--cache-dir", str(tmp_path / "pages"), "--data-parallel-size", "1")
    server = fork(tmp_path / "first", *own)
    try:
        expected, _ = edit(server, A, 4)
        edit(server, A, 4)
        until(lambda: len(list((tmp_path / "pages").glob("*.page"))) >= 5)
    finally:
        assert server.stop() == 0
    server = fork(tmp_path / "second", *own)
    try:
        others, facts = edit(server, B, 4)
        assert seen(facts) == ("miss", True)
        again, facts = edit(server, A, 4)
        assert (*seen(facts), facts["tier"]) == ("hit", False, "disk")
        assert np.array_equal(again, expected)
        assert np.array_equal(others, expected)
    finally:
        assert server.stop() == 0


def test_pages_may_be_shared_by_all_keys(flags: tuple[str, ...], tmp_path: Path) -> None:
    server = fork(tmp_path / "scratch", *flags, "--cache-scope", "server", "--data-parallel-size", "1")
    try:
        assert seen(edit(server, A, 5)[1]) == ("miss", True)
        assert seen(edit(server, B, 5)[1]) == ("hit", False)
    finally:
        assert server.stop() == 0


def test_a_hangup_without_key_files_is_an_orderly_end(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    server = fork(tmp_path / "scratch", *server_flags)
    assert server.stop(signal.SIGHUP) == 0, server.log.read_text()


@pytest.mark.parametrize(("name", "text"), [("STENCIL_API_KEYS", ""), ("STENCIL_API_KEY", " ")])
def test_a_blank_variable_starts_no_server(name: str, text: str) -> None:
    done = _serve({name: text}, "--host", "0.0.0.0", "--port", "0", cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"{name} is set and holds no key" in done.stderr


def test_a_cache_dir_that_is_a_file_starts_no_server(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = ("--cache-disk-bytes", "1M", "--cache-dir", str(tmp_path / "file"), "--port", "0")
    done = _serve({}, *server_flags, *flags, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"{tmp_path / 'file'} is no folder; give another --cache-dir" in done.stderr


def _serve(environment: dict[str, str], *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "entrypoints.serve", *flags]
    return subprocess.run(
        command, check=False, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
