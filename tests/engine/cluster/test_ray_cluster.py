"""What is asked of a Ray cluster, and which clusters are refused."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import NoReturn

import pytest

from core.config import EngineConfig, ModelConfig
from core.errors import ConfigError, EngineError, InvalidRequestError
from core.ipc.shared_array import Arena
from engine.client import services
from engine.cluster import ray_backend
from engine.cluster.engine_bundle import at_machine, bundle_of
from engine.cluster.ray_cluster import check_authentication, join
from engine.router.local_backend import LocalBackend
from model_executor.devices import pick_device


@pytest.mark.parametrize(
    ("device", "threads", "workers", "has_gpus", "bundle"),
    [
        ("cpu", 0, 1, True, {"CPU": 1}),
        ("cpu", 4, 2, False, {"CPU": 8}),
        ("auto", 0, 2, False, {"CPU": 2}),
        ("auto", 0, 2, True, {"CPU": 1, "GPU": 2}),
        ("cuda", 0, 1, False, {"CPU": 1, "GPU": 1}),
    ],
)
def test_what_an_engine_asks_of_a_machine(
    device: str, threads: int, workers: int, has_gpus: bool, bundle: dict[str, float]
) -> None:
    config = EngineConfig(models=(ModelConfig(device=device, threads=threads),), workers_per_engine=workers)
    assert bundle_of(config, has_gpus=has_gpus) == bundle


def test_an_engine_at_a_machine() -> None:
    """Four engines of two workers share the cores; on a machine of four GPUs, each engine sees its own two alone."""
    config = EngineConfig(workers_per_engine=2, data_parallel_size=8, data_parallel_rank=5, keeper="k", launcher="l")
    here = at_machine(config, {"CPU": 2}, {"CPU": 8.0})
    assert (here.num_workers, here.keeper, here.launcher) == (8, "", "")
    there = at_machine(config, {"CPU": 1, "GPU": 2}, {"CPU": 8.0, "GPU": 4.0})
    devices = [pick_device("auto", there.device_index(rank), there.num_workers, 2, "2,3") for rank in range(2)]
    assert devices == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("address", ["local", "ray://10.0.0.1:10001", "10.0.0.1", ""])
def test_an_address_that_is_no_clusters(address: str) -> None:
    """Of these, `ray.init` would start a cluster of its own, or take another way."""
    with pytest.raises(InvalidRequestError, match="auto or HOST:PORT"):
        EngineConfig(ray_address=address)


def test_a_cluster_without_a_token_is_refused_beyond_loopback() -> None:
    check_authentication(["127.0.0.1", "127.0.0.1"], lambda: True)
    check_authentication(["10.0.0.1", "127.0.0.1"], lambda: False)
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        check_authentication(["10.0.0.1", "127.0.0.1"], lambda: True)


def test_without_ray_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine.cluster.ray_backend", None)
    with closing(Arena.create(0, 4096)) as arena:
        with pytest.raises(ConfigError, match=r"pip install 'stencil-serve\[ray\]'"):
            services._backend(EngineConfig(data_parallel_backend="ray"), arena)
        assert isinstance(services._backend(EngineConfig(), arena), LocalBackend)


@pytest.mark.parametrize("error", [OSError("no connection"), ValueError("no such table"), RuntimeError("not ready")])
async def test_a_cluster_that_says_nothing_ends_no_server(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Ray raises when it is asked for the machines; the next second they are asked for again."""

    def fail() -> NoReturn:
        raise error

    monkeypatch.setattr(ray_backend, "nodes_of_cluster", fail)
    monkeypatch.setattr(ray_backend, "join", lambda address: None)
    with closing(Arena.create(0, 4096)) as arena:
        backend = ray_backend.RayBackend(EngineConfig(data_parallel_backend="ray"), arena)
        with pytest.raises(EngineError, match=str(error)):
            await backend.machines()


async def test_handlers_of_signals_are_restored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the main thread, which alone can, and not at each look at the cluster: others may set theirs meanwhile."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(ray_backend, "join", lambda address: None)
    monkeypatch.setattr(ray_backend, "nodes_of_cluster", list)
    monkeypatch.setattr(ray_backend, "draining_nodes", set)
    monkeypatch.setattr(ray_backend, "restore_signal_handlers", lambda: threads.append(threading.current_thread()))
    with closing(Arena.create(0, 4096)) as arena:
        backend = ray_backend.RayBackend(EngineConfig(data_parallel_backend="ray"), arena)
        for _ in range(3):
            assert await backend.machines() == {}
    assert threads == [threading.main_thread()]


def test_an_address_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address} .*refused.*: start one with"):
        join(address)
    assert time.monotonic() - began < 5.0


SILENT = """
import socket
from core.errors import ConfigError
from engine.cluster import ray_cluster

ray_cluster.JOIN_SECONDS = 1.0
server = socket.create_server(("127.0.0.1", 0))
try:
    ray_cluster.join(f"127.0.0.1:{server.getsockname()[1]}")
except ConfigError as error:
    print(error)
"""


def test_an_address_where_something_else_listens() -> None:
    """Ray would wait for minutes, and with it the process that is to end."""
    ran = subprocess.run([sys.executable, "-c", SILENT], check=True, capture_output=True, text=True, timeout=60)
    assert "no answer in 1 s" in ran.stdout
