"""The keeper as a real process: what it shares, what it frees, what is told when it cannot."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from core.config import ModelConfig
from core.errors import ConfigError, EngineError
from core.handles import ModelKey
from core.ipc import local_sockets
from core.ipc.process import ChildProcess, spawn
from model_executor.weights.taking import TakenWeights
from tools.random_checkpoints import make_flux

VAE, TRANSFORMER = ModelKey("0f", "vae"), ModelKey("1e", "transformer")
PATIENCE = 60.0


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with local_sockets.listen() as listener:
        yield listener


def started(listener: socket.socket) -> ChildProcess:
    return spawn("model_executor.weights.process:main", b"", [os.dup(listener.fileno())], "stencil-weights")


@pytest.fixture(scope="module")
def keeper(listener: socket.socket) -> Iterator[ChildProcess]:
    child = started(listener)
    yield child
    child.kill()
    asyncio.run(child.wait())


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(model=str(make_flux(tmp_path_factory.mktemp("flux") / "flux")), dtype="float32")


@pytest.fixture
def worker(listener: socket.socket, keeper: ChildProcess) -> Iterator[TakenWeights]:
    taken = TakenWeights(local_sockets.address_of(listener))
    yield taken
    taken.close()
    until(lambda: kept(keeper) == 0)


def kept(keeper: ChildProcess) -> int:
    """Number of memfds that the keeper has open."""
    links = []
    for name in os.listdir(f"/proc/{keeper.pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{keeper.pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return sum("memfd:stencil-weights" in link for link in links)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_workers_share_what_one_has_loaded(
    listener: socket.socket, keeper: ChildProcess, worker: TakenWeights, config: ModelConfig
) -> None:
    other = TakenWeights(local_sockets.address_of(listener))
    mine, theirs = worker.take(VAE, config, "vae"), other.take(VAE, config, "vae")
    assert kept(keeper) == 1
    for one, another in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, another)
    worker.close()
    del mine
    gc.collect()
    assert all(torch.isfinite(parameter).all() for parameter in theirs.parameters())
    assert kept(keeper) == 1, "the other one uses it still"
    other.close()
    until(lambda: kept(keeper) == 0)


def test_what_is_not_mapped_any_more_is_freed(keeper: ChildProcess, worker: TakenWeights, config: ModelConfig) -> None:
    vae: nn.Module | None = worker.take(VAE, config, "vae")
    transformer = worker.take(TRANSFORMER, config, "transformer")
    worker.drop_unused()
    assert kept(keeper) == 2
    vae = None
    gc.collect()
    worker.drop_unused()
    until(lambda: kept(keeper) == 1)
    assert vae is None
    assert transformer is not None


def test_a_worker_that_is_gone_uses_nothing(listener: socket.socket, keeper: ChildProcess, config: ModelConfig) -> None:
    gone = TakenWeights(local_sockets.address_of(listener))
    module = gone.take(VAE, config, "vae")
    assert kept(keeper) == 1
    gone._connection.close()  # type: ignore[union-attr]
    until(lambda: kept(keeper) == 0)
    assert module is not None


def test_weights_that_cannot_be_loaded_are_told_with_their_cause(
    keeper: ChildProcess, worker: TakenWeights, config: ModelConfig, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(config.model, tmp_path / "damaged"))
    (weights,) = (damaged / "vae").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"cannot load vae of .*damaged.*cut short"):
        worker.take(VAE, ModelConfig(model=str(damaged), dtype="float32"), "vae")
    assert kept(keeper) == 0
    assert worker.take(VAE, config, "vae") is not None, "it serves on"


def test_a_keeper_started_anew_serves_on(listener: socket.socket, config: ModelConfig) -> None:
    """The last test: it ends the shared one. Workers keep what they have, under the same address."""
    with local_sockets.listen() as own:
        first = started(own)
        worker = TakenWeights(local_sockets.address_of(own))
        vae = worker.take(VAE, config, "vae")
        first.kill()
        asyncio.run(first.wait())
        second = started(own)
        assert torch.isfinite(next(vae.parameters())).all()
        worker.take(TRANSFORMER, config, "transformer")
        second.kill()
        asyncio.run(second.wait())
    with pytest.raises(EngineError, match="the process that loads weights has died"):
        worker.take(VAE, config, "vae")
