"""Weights are never in memory twice: the memory of a process that loads a checkpoint, against the checkpoint's size."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel

from core.config import ModelConfig
from core.handles import ModelKey
from core.ipc import local_sockets
from core.ipc.launched_process import launch
from engine.client.processes.keeper_process import MAIN as KEEPER
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.registry import make_family
from model_executor.weights.taking import TakenWeights


@pytest.fixture(scope="module")
def large(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A checkpoint in which only the denoiser is large, and the denoiser's number of parameters."""
    path = Path(shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("large") / "model"))
    config = FluxTransformer2DModel.load_config(path, subfolder="transformer")
    sizes = {"num_attention_heads": 32, "num_layers": 1, "num_single_layers": 1}  # 1024 wide
    with torch.random.fork_rng():
        module = FluxTransformer2DModel.from_config(dict(config) | sizes)
    module.save_pretrained(path / "transformer")
    return path, sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_in_memory_once(launcher: str, tiny_checkpoint: Path, large: tuple[Path, int], dtype: str) -> None:
    """The file is float32. The peak is private memory; the memory afterwards includes the file's mapped pages."""
    path, number = large
    found, weights = load(launcher, tiny_checkpoint, path, dtype=dtype), number * getattr(torch, dtype).itemsize
    assert weights > 90e6
    assert found["peak"] < 1.5 * weights, "the weights and the largest layers, which are rearranged one by one"
    assert 0.8 * weights < found["held"] < 1.25 * weights


def test_quantised_weights_are_never_all_in_memory_unquantised(
    launcher: str, tiny_checkpoint: Path, large: tuple[Path, int]
) -> None:
    pytest.importorskip("torchao")
    path, weights = large  # a byte each
    found = load(launcher, tiny_checkpoint, path, quantization="torchao-int8")
    assert found["peak"] < 2.5 * weights, "the weights and the largest layer as it was and is made, of four bytes each"
    assert 0.8 * weights < found["held"] < 1.25 * weights


def test_models_take_the_memory_of_their_distinct_components(
    launcher: str, tiny_checkpoint: Path, large: tuple[Path, int], tmp_path: Path
) -> None:
    """Three models: two with equal transformers in different folders, and one whose transformer differs in a bit."""
    path, number = large
    equal, other = (Path(shutil.copytree(path, tmp_path / name)) for name in ("equal", "other"))
    (weights,) = (other / "transformer").glob("*.safetensors")
    with weights.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\1")
    found = load(launcher, tiny_checkpoint, path, equal, other, dtype="bfloat16")
    assert found["told"] == pytest.approx(2 * 2 * number, rel=0.02), "two transformers, of two bytes a weight"
    assert 0.9 * found["told"] < found["held"] < 1.1 * found["told"]


@pytest.fixture(scope="module")
def keeper(launcher: str) -> Iterator[tuple[str, int]]:
    """The address of a keeper of weights, and the process."""
    with local_sockets.listen() as listener:
        process = launch(launcher, KEEPER, b"", [os.dup(listener.fileno())], "stencil-weights")
        while not process.pid:
            assert process.returncode is None
        yield local_sockets.address_of(listener), process.pid
        process.kill()
        asyncio.run(process.wait())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_the_keeper_are_in_memory_once_for_all_workers(
    keeper: tuple[str, int], large: tuple[Path, int], dtype: str
) -> None:
    """Packed as they are on a CPU, they are no worker's own memory, nor the keeper's beside what it shares."""
    config, (address, pid) = ModelConfig(model=str(large[0]), dtype=dtype, device="cpu"), keeper
    with closing(TakenWeights(address)) as taken:
        taken.take(ModelKey(dtype, "vae"), config, "vae", torch.get_num_threads())  # what comes with the first one
        denoisers, before = [], [private(os.getpid()), private(pid)]
        for _ in range(2):
            key = ModelKey(dtype, "transformer")
            module, nbytes = taken.take(key, config, "transformer", torch.get_num_threads())
            denoisers.append(make_family(ModelCheckpoint.open(config)).prepare("transformer", module))
        after = [private(os.getpid()), private(pid)]
    assert nbytes == pytest.approx(large[1] * getattr(torch, dtype).itemsize, rel=0.02)
    for less, more in zip(before, after, strict=True):
        assert more - less < 0.1 * nbytes


def private(pid: int) -> int:
    """Private memory of a process, in bytes."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def load(
    launcher: str, small: Path, *large: Path, dtype: str = "float32", quantization: str = "none"
) -> dict[str, int]:
    """Private memory in bytes while the `large` ones are loaded together, at its peak, all memory used for them
    afterwards, and the bytes that are told of their components."""
    config = json.dumps([dtype, quantization, *map(str, (small, *large))]).encode()
    reader, writer = os.pipe()
    with open(reader, "rb") as answer:
        with open(writer, "wb"):
            process = launch(launcher, "memory_of_a_load:main", config, [writer], "load")
        found: dict[str, int] = json.loads(answer.read())
    asyncio.run(process.wait())
    return found
