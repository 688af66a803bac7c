"""What loading a model's component does to the steps beside it: on the rank that loads, and on another one.

Steps of one exact edit by the embedded model run in this process as in a worker, while a transformer of 500 MB is
loaded through the keeper of weights: by this process's own loader, in its thread, or by another process. After each
load as many steps run alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.command import command
from benchmarks.report import Value, print_report
from core.config import EMBEDDED_MODEL, EMBEDDED_NAME, ModelConfig
from core.ipc.limits import memory_limit
from core.ipc.local_sockets import address_of, listen
from core.ipc.process import spawn
from core.memory_budget import Room
from core.messages.worker import ModelFailed, ModelLoaded
from model_executor.checkpoint.libraries import quiet_libraries
from model_executor.weights.taking import TakenWeights
from model_executor.worker.loading.component_loader import ComponentLoader
from model_executor.worker.loading.loader_thread import LoaderThread
from model_executor.worker.loading.resident import ResidentModels, set_threads
from model_executor.worker.loading.weights_room import WeightsRoom
from model_executor.worker.probes.cost_probe import Batches
from tools.random_checkpoints import make_flux

LARGE = "large"
HEADS = 32
"""Of the transformer that is loaded, of 32 numbers each: 127 million weights. In float32 they are 509 MB."""

ALLOWED_SECONDS, ALLOWED_RATIO = 0.020, 1.3
"""The longest gap between two steps may be the larger of these, the second times a step's usual time."""

OTHER_RANK = "--as-other-rank"


PAUSE_SECONDS = 0.2
"""After a load, in which what it has left to do is done."""


class Measured(NamedTuple):
    """Seconds of each step and load."""

    alone: list[float]
    beside: list[float]
    loads: list[float]


BeginLoad = Callable[[], Callable[[], bool]]
"""Begins a load; returns a function that says whether it is over."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, dtype="float32", threads=1, rounds=6)
    parser.add_argument(OTHER_RANK, nargs=2, metavar=("ADDRESS", "CHECKPOINT"), help="only load it, a line each")
    args = parser.parse_args(argv)
    set_threads(args.threads)
    quiet_libraries()
    if args.as_other_rank:
        address, path = args.as_other_rank
        _load_for_each_line(address, path, args.dtype)
        return
    with tempfile.TemporaryDirectory() as folder, _keeper() as address:
        checkpoint = _make_checkpoint(Path(folder) / LARGE)
        models = _open(checkpoint, args.dtype)
        models.load_all([EMBEDDED_NAME])
        gc.freeze()  # as a worker does after its imports
        step = _step(models)
        same = _in_turns(step, _Loading(models, address), args.rounds)
        with closing(_OtherRank(address, checkpoint, args.dtype)) as rank:
            other = _in_turns(step, rank, args.rounds)
        _report(args, {"same rank": same, "other rank": other})


class _Loading:
    """Loads and drops the large transformer as a worker does. Called: begin a load; returns whether it is over."""

    def __init__(self, models: ResidentModels, address: str) -> None:
        self._models, self._key = models, models.keys[LARGE]["transformer"]
        self._answers: list[ModelLoaded | ModelFailed] = []
        room, thread = WeightsRoom(models, Room.of_host(memory_limit())), LoaderThread(models.device)
        self._loader = ComponentLoader(0, models, room, self._answers.append, thread, TakenWeights(address))

    def __call__(self) -> Callable[[], bool]:
        if self._models.find(self._key) is not None:
            self._loader.unload(self._key)
        self._answers.clear()
        self._loader.load(self._key)
        return lambda: bool(self._answers)


class _OtherRank:
    """The same in another process."""

    def __init__(self, address: str, checkpoint: Path, dtype: str) -> None:
        command = [sys.executable, "-m", __spec__.name, "--dtype", dtype, OTHER_RANK, address, str(checkpoint)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._read()

    def __call__(self) -> Callable[[], bool]:
        assert self._process.stdin is not None
        self._process.stdin.write("load\n")
        waiting = threading.Thread(target=self._read)
        waiting.start()
        return lambda: not waiting.is_alive()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()


def _load_for_each_line(address: str, checkpoint: str, dtype: str) -> None:
    load = _Loading(_open(Path(checkpoint), dtype), address)
    print("ready", flush=True)
    for _ in sys.stdin:
        _wait(load())
        print("loaded", flush=True)


@contextmanager
def _keeper() -> Iterator[str]:
    with listen() as listener:
        keeper = spawn("model_executor.weights.process:main", b"", [os.dup(listener.fileno())], "stencil-weights")
        yield address_of(listener)
        keeper.kill()
        asyncio.run(keeper.wait())


def _make_checkpoint(path: Path) -> Path:
    """A small FLUX checkpoint with a large transformer."""
    from diffusers import FluxTransformer2DModel

    make_flux(path)
    config = dict(FluxTransformer2DModel.load_config(path, subfolder="transformer"))
    sizes = {"num_attention_heads": HEADS, "num_layers": 2, "num_single_layers": 3}
    FluxTransformer2DModel.from_config(config | sizes).save_pretrained(path / "transformer")
    return path


def _open(checkpoint: Path, dtype: str) -> ResidentModels:
    paths = {EMBEDDED_NAME: EMBEDDED_MODEL, LARGE: str(checkpoint)}
    return ResidentModels.open(
        [ModelConfig(model=path, served_model_name=name, dtype=dtype, device="cpu") for name, path in paths.items()]
    )


def _step(models: ResidentModels) -> Callable[[], object]:
    family = models.families[EMBEDDED_NAME]
    return Batches(family, family.info(EMBEDDED_NAME)).denoise((1.0,))[2]


@torch.inference_mode()
def _in_turns(step: Callable[[], object], load: BeginLoad, rounds: int) -> Measured:
    measured = Measured([], [], [])
    _wait(load())  # the keeper's and the libraries' first one
    for _ in range(rounds):
        started = time.monotonic()
        gaps = _steps_until(step, load())
        measured.loads.append(time.monotonic() - started)
        measured.beside.extend(gaps)
        time.sleep(PAUSE_SECONDS)
        left = iter(gaps)
        measured.alone.extend(_steps_until(step, lambda left=left: next(left, None) is None))  # type: ignore[misc]
    return measured


def _wait(is_over: Callable[[], bool]) -> None:
    while not is_over():
        time.sleep(0.001)


def _steps_until(step: Callable[[], object], is_over: Callable[[], bool]) -> list[float]:
    """Seconds from each step's beginning to the next one's."""
    times = [time.monotonic()]
    while not is_over():
        step()
        times.append(time.monotonic())
    return [after - before for before, after in pairwise(times)]


def _report(args: argparse.Namespace, measured: dict[str, Measured]) -> None:
    result: dict[str, Value] = {"benchmark": "model_load", "dtype": args.dtype}
    rows = []
    for name, its in measured.items():
        usual, longest, seconds = statistics.median(its.alone), max(its.beside), statistics.median(its.loads)
        slower, allowed = statistics.median(its.beside) / usual, max(ALLOWED_SECONDS, ALLOWED_RATIO * usual)
        rows.append(
            (
                name,
                f"step {usual * 1e3:.1f} ms, beside a load x {slower:.3f}, longest {longest * 1e3:.1f} ms "
                f"(alone {max(its.alone) * 1e3:.1f}, allowed {allowed * 1e3:.1f}); a load {seconds:.2f} s",
            )
        )
        slug = name.replace(" ", "_")
        result |= {
            f"{slug}_step_ms": usual * 1e3,
            f"{slug}_ratio": slower,
            f"{slug}_longest_ms": longest * 1e3,
            f"{slug}_longest_alone_ms": max(its.alone) * 1e3,
            f"{slug}_allowed_ms": allowed * 1e3,
            f"{slug}_load_seconds": seconds,
        }
    print_report("steps while a component of 127 million weights is loaded", rows, result, args.output)


if __name__ == "__main__":
    main()
