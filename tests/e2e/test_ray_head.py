"""A Ray cluster whose head dies, which nothing can be placed in any more, or whose process on the server's machine
does, through which the server asks for all that is placed. `make test-ray`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from fault_kit import until
from pictures import alpha_mask, encode, photo
from ray_server import serve

from benchmarks.load.ray_machines import is_there, machines

pytestmark = pytest.mark.ray


async def test_a_server_outlives_the_head_of_its_cluster(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the engine of its own machine; and it ends when it is told to."""
    folder = tmp_path_factory.mktemp("h")  # short, since sockets are in it
    log = folder / "log"
    with machines(folder, RAY_gcs_rpc_server_reconnect_timeout_s="5") as found:
        size = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
        server = await serve(tiny_checkpoint, found, log, *size)
        try:
            await until(lambda: "ready on" in log.read_text())
            url = next(word for word in log.read_text().split() if word.startswith("http://"))
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                found.head.kill()
                async with asyncio.timeout(60):
                    while [each["state"] for each in (await health(client))] != ["serving", "restarting"]:
                        await asyncio.sleep(0.1)
                await until(lambda: "the Ray cluster's head does not answer" in log.read_text())
                files = {"image": encode(photo()), "mask": alpha_mask()}
                answer = await client.post("/v1/images/edits", data={"prompt": "a hat"}, files=files)
                assert answer.status_code == 200, answer.text
            server.terminate()
            await asyncio.wait_for(server.wait(), 30)
        finally:
            with suppress(ProcessLookupError):
                server.kill()
    assert server.returncode == 0, log.read_text()


async def test_a_server_ends_without_the_process_of_ray_through_which_it_asks(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ray ends its engines on all machines, and would start none again for it. It says so."""
    folder = tmp_path_factory.mktemp("d")
    log = folder / "log"
    with machines(folder) as found:
        server = await serve(tiny_checkpoint, found, log, "--data-parallel-size", "2")
        try:
            await until(lambda: "ready on" in log.read_text())
            found.head_raylet.kill()
            await asyncio.wait_for(server.wait(), 60)
        finally:
            with suppress(ProcessLookupError):
                server.kill()
        assert not [host for host in found.hosts if is_there(host)]
    assert server.returncode == 1
    assert "Ray's process on this machine has died: start it again" in log.read_text().splitlines()[-1], log.read_text()


async def health(client: httpx.AsyncClient) -> list[dict[str, str]]:
    engines: list[dict[str, str]] = (await client.get("/health")).json()["engines"]
    return engines
