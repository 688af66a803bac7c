"""The keeper as a real process: what it shares, what it frees, what is told when it cannot."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
import queue
import resource
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import torch
from forked_processes import fork
from torch import nn

from core.config import ModelConfig
from core.errors import ConfigError, EngineError
from core.handles import ModelKey
from core.ipc import local_sockets
from core.ipc.process import ChildProcess
from core.memory_budget import Room
from core.messages.weights import TakeWeights, WeightsFailed
from core.messages.worker import ModelFailed, ModelLoaded
from model_executor.checkpoint.loader import CONTROLNET_PART, ModelCheckpoint
from model_executor.kernels.cpu_kernels import best_kernels
from model_executor.kernels.cpu_layers import FastConv
from model_executor.kernels.linear import has_onednn
from model_executor.models.controlnet.registry import make_controlnet
from model_executor.models.registry import make_family
from model_executor.weights import keeper as keeper_module
from model_executor.weights import taking
from model_executor.weights.taking import TakenWeights
from model_executor.worker.loading.component_loader import ComponentLoader
from model_executor.worker.loading.loader_thread import LoaderThread
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.loading.weights_room import WeightsRoom
from tools.random_checkpoints import make_flux
from tools.random_controlnets import make_flux_controlnet, make_sd_controlnet
from tools.random_unet_checkpoints import make_sd

VAE, TRANSFORMER = ModelKey("0f", "vae"), ModelKey("1e", "transformer")
PATIENCE = 60.0


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with local_sockets.listen() as listener:
        yield listener


def test_descriptors_that_a_peer_attaches_do_not_stay_open(keeper: ChildProcess, listener: socket.socket) -> None:
    def num_open() -> int:
        return len(os.listdir(f"/proc/{keeper.pid}/fd"))

    with local_sockets.connect(local_sockets.address_of(listener)) as connection:
        local_sockets.send(connection, b"no message")
        local_sockets.receive(connection)
        before = num_open()
        for _ in range(10):
            local_sockets.send(connection, b"no message", [0, 1, 2])
            local_sockets.receive(connection)
        assert num_open() == before


def test_what_cannot_be_kept_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no memory for it twice; a module that refers to itself lives on until it is searched for."""
    loaded = [nn.Linear(1, 1)]
    loaded[0].__dict__["itself"] = loaded[0]
    module = weakref.ref(loaded[0])

    def fails(module: nn.Module) -> NoReturn:
        raise OSError(errno.ENOSPC, "no memory")

    monkeypatch.setattr(keeper_module.logger, "disabled", True)  # pytest keeps what is logged, and so the frames
    monkeypatch.setattr(keeper_module, "_load", lambda wanted: loaded.pop())
    monkeypatch.setattr(keeper_module, "write_image", fails)
    with local_sockets.listen() as own, socket.socket() as user:
        answer, fd = keeper_module.Keeper(own)._take(user, TakeWeights(VAE, ModelConfig(), "vae", 0))
    assert (type(answer), fd) == (WeightsFailed, None)
    assert module() is None


def started(launcher: str, listener: socket.socket) -> ChildProcess:
    return fork(launcher, "brief_keeper:main", b"", [os.dup(listener.fileno())], "stencil-weights")


@pytest.fixture(scope="module")
def keeper(launcher: str, listener: socket.socket) -> Iterator[ChildProcess]:
    child = started(launcher, listener)
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


def test_a_keeper_that_can_open_no_more_goes_on(keeper: ChildProcess, listener: socket.socket) -> None:
    with local_sockets.connect(local_sockets.address_of(listener)) as first:
        local_sockets.send(first, b"no message")
        assert local_sockets.receive(first)[0], "it was let in"
        soft, hard = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (0, hard))  # of new ones; others stay open
        try:
            with local_sockets.connect(local_sockets.address_of(listener)) as second:
                second.settimeout(PATIENCE)
                local_sockets.send(second, b"no message")
                local_sockets.send(first, b"no message")
                assert local_sockets.receive(first)[0], "others are served meanwhile"
                resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (soft, hard))
                assert local_sockets.receive(second)[0]
        finally:
            resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (soft, hard))


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
    (mine, nbytes), (theirs, same) = worker.take(VAE, config, "vae"), other.take(VAE, config, "vae")
    assert nbytes == same >= sum(parameter.nbytes for parameter in mine.parameters())
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
    vae: nn.Module | None
    vae, _ = worker.take(VAE, config, "vae")
    transformer = worker.take(TRANSFORMER, config, "transformer")
    worker.drop_unused()
    assert kept(keeper) == 2
    vae = None
    gc.collect()
    worker.drop_unused()
    until(lambda: kept(keeper) == 1)
    assert vae is None
    assert transformer is not None


@pytest.mark.parametrize("fails", ["read_image", "install"])
def test_a_load_that_fails_after_the_keepers_leaves_nothing_there(
    keeper: ChildProcess, worker: TakenWeights, config: ModelConfig, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Whether the memory cannot be mapped, or what is made over it finds no room."""

    def fail(*_: object) -> None:
        assert kept(keeper) == 1
        raise MemoryError

    models = ResidentModels.open([msgspec.structs.replace(config, served_model_name="m")])
    answers = queue.SimpleQueue[ModelLoaded | ModelFailed]()
    room, thread = WeightsRoom(models, Room(1 << 40, "a test")), LoaderThread(models.device)
    loader = ComponentLoader(0, models, room, answers.put, thread, worker)
    monkeypatch.setattr(taking if fails == "read_image" else models, fails, fail)
    loader.load(next(key for key in models.needs("m") if key.component == "vae"))
    failed = answers.get(timeout=PATIENCE)
    assert isinstance(failed, ModelFailed)
    assert failed.failure.kind == "out_of_memory"
    until(lambda: kept(keeper) == 0)


def test_a_worker_that_is_restarted_finds_what_it_had(
    listener: socket.socket, keeper: ChildProcess, config: ModelConfig, tmp_path: Path
) -> None:
    """No file is read again. What nobody comes back for is freed."""
    moved = Path(shutil.copytree(config.model, tmp_path / "moved"))
    model = ModelConfig(model=str(moved), dtype="float32")
    gone, anew = (TakenWeights(local_sockets.address_of(listener)) for _ in range(2))
    before, _ = gone.take(VAE, model, "vae", cpu_threads=1)
    shutil.rmtree(moved)
    gone.close()
    after, _ = anew.take(VAE, model, "vae", cpu_threads=1)
    for one, another in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(one, another)
    anew.close()
    until(lambda: kept(keeper) == 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", ["transformer", "unet"])
def test_workers_share_packed_weights(
    worker: TakenWeights, config: ModelConfig, tmp_path: Path, part: str, dtype: str
) -> None:
    path = config.model if part == "transformer" else str(make_sd(tmp_path / "sd"))
    model = ModelConfig(model=path, dtype=dtype, device="cpu")
    family = make_family(ModelCheckpoint.open(model))
    check_shared(worker, model, part, lambda module: family.prepare(part, module))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["flux", "sd"])
def test_workers_share_packed_controlnets(worker: TakenWeights, tmp_path: Path, kind: str, dtype: str) -> None:
    make, make_net = (make_flux, make_flux_controlnet) if kind == "flux" else (make_sd, make_sd_controlnet)
    steered = make_family(ModelCheckpoint.open(ModelConfig(model=str(make(tmp_path / "base"))))).steered
    model = ModelConfig(model=str(make_net(tmp_path / "net")), dtype=dtype, device="cpu")
    net = make_controlnet(ModelCheckpoint.open(model), steered, ())
    check_shared(worker, model, CONTROLNET_PART, net.put)


def check_shared(worker: TakenWeights, model: ModelConfig, part: str, use: Callable[[nn.Module], object]) -> None:
    """What a worker computes with is the shared memory itself. use: puts the module in use."""
    if not has_onednn(torch.empty(1, dtype=getattr(torch, model.dtype))):
        pytest.skip("this processor's products read weights as they are")
    module, nbytes = worker.take(ModelKey(model.dtype, part), model, part, torch.get_num_threads())
    modules: list[Any] = list(module.modules())
    use(module)
    (memory,) = (mapping() for mapping in worker._mappings.values())
    start = ctypes.addressof(memory)
    packed = [layer.packed.weight for layer in modules if hasattr(layer, "packed")]
    packed += [layer._packed for layer in modules if isinstance(layer, FastConv)]
    assert len(packed) > 5
    for weight in packed:
        address = torch.ops.mkldnn.data_ptr(weight) if weight.is_mkldnn else weight.data_ptr()
        assert start <= address < start + nbytes
    for parameter in module.parameters():
        assert parameter.is_meta or start <= parameter.data_ptr() < start + nbytes


def test_weights_packed_for_others_are_refused(worker: TakenWeights, config: ModelConfig) -> None:
    """Computing with them would give no picture, but noise."""
    if best_kernels() is None:
        pytest.skip("the order does not depend on the number of threads here")
    module, _ = worker.take(TRANSFORMER, config, "transformer", cpu_threads=2)
    with pytest.raises(RuntimeError, match="packed in the order of oneDNN"):
        make_family(ModelCheckpoint.open(config)).prepare("transformer", module)


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


def test_a_worker_without_a_descriptor_for_weights_says_so(
    worker: TakenWeights, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops those that a process has no room for. The keeper is told that they are not used."""
    with monkeypatch.context() as patch:
        patch.setattr(taking, "receive", lambda connection: (connection.recv(local_sockets.MESSAGE_BYTES), None))
        with pytest.raises(EngineError, match="may open no more files"):
            worker.take(VAE, config, "vae")
    worker.drop_unused()
    vae, _ = worker.take(VAE, config, "vae")
    assert isinstance(vae, nn.Module)


def test_a_keeper_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> None:
    monkeypatch.setattr(taking, "PATIENCE_SECONDS", 0.1)
    with local_sockets.listen() as listener:  # nobody accepts
        worker = TakenWeights(local_sockets.address_of(listener))
        with pytest.raises(EngineError, match="the process that loads weights does not answer"):
            worker.take(VAE, config, "vae")


def test_a_keeper_that_was_restarted_serves_on(launcher: str, config: ModelConfig) -> None:
    """The last test: it ends the shared one. Workers keep what they have, under the same address."""
    with local_sockets.listen() as own:
        first = started(launcher, own)
        worker = TakenWeights(local_sockets.address_of(own))
        vae, _ = worker.take(VAE, config, "vae")
        first.kill()
        asyncio.run(first.wait())
        second = started(launcher, own)
        assert torch.isfinite(next(vae.parameters())).all()
        worker.take(TRANSFORMER, config, "transformer")
        second.kill()
        asyncio.run(second.wait())
    with pytest.raises(EngineError, match="the process that loads weights has died"):
        worker.take(VAE, config, "vae")
