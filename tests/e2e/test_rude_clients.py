"""Many clients that disconnect in various ways, beside well-behaved ones: on two engines, over real sockets."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from pictures import alpha_mask, encode, photo
from server_process import ServerProcess, fork, start

IMAGE, MASK = encode(photo()), alpha_mask()
BOUNDARY = "b0undary"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


def form(**fields: str) -> bytes:
    parts = [f'Content-Disposition: form-data; name="{name}"\r\n\r\n{text}'.encode() for name, text in fields.items()]
    for name, data in (("image", IMAGE), ("mask", MASK)):
        parts.append(f'Content-Disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'.encode() + data)
    joined = b"".join(b"--%s\r\n%s\r\n" % (BOUNDARY.encode(), part) for part in parts)
    return joined + b"--%s--\r\n" % BOUNDARY.encode()


def connect(server: ServerProcess, body: bytes, length: int | None = None) -> socket.socket:
    """A client that has sent `body` of a request of `length` bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=30)
    head = (
        f"POST /v1/images/edits HTTP/1.1\r\nhost: {host}\r\ncontent-length: {length or len(body)}\r\n"
        f"content-type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    return client


LONG = form(prompt="p", num_inference_steps="200", n="2")
STREAMED = form(prompt="p", num_inference_steps="200", stream="true", partial_images="3")


def in_the_middle_of_its_body(server: ServerProcess) -> socket.socket:
    return connect(server, LONG[: len(LONG) // 2], len(LONG))


def while_it_waits(server: ServerProcess) -> socket.socket:
    client = connect(server, LONG)
    time.sleep(0.3)
    return client


def in_the_middle_of_its_stream(server: ServerProcess) -> socket.socket:
    client = connect(server, STREAMED)
    assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
    said = b""
    while b"partial_image" not in said:  # comments come while nothing else does
        piece = client.recv(4096)
        assert piece
        said += piece
    return client


def at_its_very_first_byte(server: ServerProcess) -> socket.socket:
    return connect(server, b"", len(LONG))


LEAVING = (in_the_middle_of_its_body, while_it_waits, in_the_middle_of_its_stream, at_its_very_first_byte)


def leave(server: ServerProcess, how: Callable[[ServerProcess], socket.socket], is_reset: bool) -> None:
    with how(server) as client:
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@pytest.fixture(scope="module")
def pair(server_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two engines."""
    scratch = tmp_path_factory.mktemp("server") / "scratch"
    server = fork(scratch, *server_flags, "--data-parallel-size", "2", "--max-queue", "64")
    yield server
    if server.process.poll() is None:
        assert server.stop() == 0, server.log.read_text()


def good_edit(server: ServerProcess, seed: int) -> str:
    answer = httpx.post(
        f"{server.base_url}/images/edits",
        data={"prompt": "a red hat", "seed": str(seed)},
        files={"image": IMAGE, "mask": MASK},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    picture: str = answer.json()["data"][0]["b64_json"]
    return picture


def stats(server: ServerProcess) -> dict[str, float]:
    answer = httpx.get(f"{server.base_url}/engine/stats").json()
    return {"steps": answer["totals"]["steps"]} | answer["queue"]


def wait_until_idle(server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while any(stats(server)[name] for name in ("running", "waiting", "admitted")):
        assert time.monotonic() < deadline, stats(server)
        time.sleep(0.05)


def arena_bytes(server: ServerProcess) -> int:
    """Memory of the arena that requests lie in."""
    maps = psutil.Process(server.process.pid).memory_maps(grouped=True)
    return sum(area.rss for area in maps if area.path.startswith("/memfd:stencil-arena-0"))


def test_clients_that_leave_at_once_are_aborted_and_affect_no_other(pair: ServerProcess) -> None:
    expected = {seed: good_edit(pair, seed) for seed in range(6)}
    wait_until_idle(pair)
    before = stats(pair)["steps"]
    ways = [(how, is_reset) for how in LEAVING for is_reset in (False, True) for _ in range(3)]
    with ThreadPoolExecutor(len(ways) + len(expected)) as threads:
        rude = [threads.submit(leave, pair, *way) for way in ways]
        good = {seed: threads.submit(good_edit, pair, seed) for seed in expected}
        for leaver in rude:
            leaver.result()
        wait_until_idle(pair)
        pictures = {seed: edit.result() for seed, edit in good.items()}
    assert len(pictures) == len(expected)
    assert sum(pictures[seed] == expected[seed] for seed in expected) >= len(expected) - 1  # see test_faults
    asked = 200 * (2 * 6 + 6)  # steps of those who waited and of those who streamed
    assert stats(pair)["steps"] - before < asked / 4, "their edits went on"
    assert arena_bytes(pair) == 0
    log = pair.log.read_text()
    assert "Traceback" not in log
    assert log.count("cancelled") >= len(ways) / 2


def test_an_edit_is_aborted_within_a_few_steps(pair: ServerProcess) -> None:
    before = stats(pair)["steps"]
    leave(pair, in_the_middle_of_its_stream, is_reset=True)
    wait_until_idle(pair)
    at_rest = stats(pair)["steps"]
    time.sleep(0.5)
    assert stats(pair)["steps"] == at_rest
    assert at_rest - before < 200
    assert arena_bytes(pair) == 0


def test_sigterm_under_load_finishes_running_edits(pair: ServerProcess) -> None:
    """On two engines, while other clients disconnect."""
    results: list[int] = []

    def edit() -> None:
        fields = {"prompt": "p", "num_inference_steps": "50"}
        files = {"image": IMAGE, "mask": MASK}
        results.append(httpx.post(f"{pair.base_url}/images/edits", data=fields, files=files, timeout=60).status_code)

    threads = [threading.Thread(target=edit) for _ in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while stats(pair)["admitted"] < len(threads):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with while_it_waits(pair), in_the_middle_of_its_body(pair):
        children = pair.children()
        pair.process.terminate()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    assert results == [200] * len(threads)
    assert pair.wait(children) == 0, pair.log.read_text()
    assert "Traceback" not in pair.log.read_text()


def test_kill_9_of_the_server_under_load_leaves_nothing(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    """No process of two engines, no file, and no shared memory, which has no name."""
    server = start(tmp_path / "scratch", *server_flags, "--data-parallel-size", "2")
    clients = [connect(server, LONG) for _ in range(4)]
    deadline = time.monotonic() + 60
    while stats(server)["running"] < 2:  # engines
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = server.children()
    assert len(children) >= 6  # engines, workers, image processors
    assert not [area.path for child in children for area in child.memory_maps() if area.path.startswith("/dev/shm")]
    server.process.kill()
    assert server.process.wait() == -9
    assert server.process.stdout is not None
    server.process.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    for client in clients:
        client.close()
    assert not list((tmp_path / "scratch").iterdir())
