"""What loading a model's component does to the steps beside it: on the rank that loads, and on another one.

Steps of the embedded model run in this process as in a worker, while a transformer is loaded through the keeper of
weights: by this process's own loader, in its thread, or by another process. Before each load as many steps run alone.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.command import command
from benchmarks.report import Value, print_report
from core.config import EMBEDDED_MODEL, EMBEDDED_NAME, ModelConfig
from core.ipc.local_sockets import address_of, listen
from core.ipc.process import spawn
from core.messages.worker import ModelFailed, ModelLoaded
from model_executor.checkpoint.libraries import quiet_libraries
from model_executor.weights.taking import TakenWeights
from model_executor.worker.component_loader import ComponentLoader
from model_executor.worker.cost_probe import Batches
from model_executor.worker.loader_thread import LoaderThread
from model_executor.worker.resident import ResidentModels, set_threads
from tools.random_checkpoints import make_flux

LARGE = "large"
HEADS = 32
"""Of the transformer that is loaded, of 32 numbers each: 127 million weights."""

ALLOWED_SECONDS, ALLOWED_RATIO = 0.020, 1.3
"""The longest gap between two steps may be the larger of these, the second times a step's usual time."""

OTHER_RANK = "--as-other-rank"


BeginLoad = Callable[[], Callable[[], bool]]
"""Begins a load; returns a function that says whether it is over."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, dtype="float32", threads=1, rounds=6)
    parser.add_argument("--edits", type=int, default=1, help="exact edits that share each step")
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
        step = _step(models, args.edits)
        loads: dict[str, BeginLoad] = {
            "same rank": _Loading(models, address),
            "other rank": _OtherRank(address, checkpoint, args.dtype),
        }
        _report(args.dtype, {name: _in_turns(step, load, args.rounds) for name, load in loads.items()})


class _Loading:
    """Loads and drops the large transformer as a worker does. Called: begin a load; returns whether it is over."""

    def __init__(self, models: ResidentModels, address: str) -> None:
        self._models, self._key = models, models.keys[LARGE]["transformer"]
        self._answers: list[ModelLoaded | ModelFailed] = []
        self._loader = ComponentLoader(0, models, self._answers.append, LoaderThread(), TakenWeights(address))

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

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()


def _load_for_each_line(address: str, checkpoint: str, dtype: str) -> None:
    load = _Loading(_open(Path(checkpoint), dtype), address)
    print("ready", flush=True)
    for _ in sys.stdin:
        is_over = load()
        while not is_over():
            time.sleep(0.001)
        print("loaded", flush=True)


@contextmanager
def _keeper() -> Iterator[str]:
    with listen() as listener:
        keeper = spawn("model_executor.weights.process:main", b"", [os.dup(listener.fileno())], "stencil-weights")
        yield address_of(listener)
        keeper.kill()


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


def _step(models: ResidentModels, num_edits: int) -> Callable[[], object]:
    family = models.families[EMBEDDED_NAME]
    return Batches(family, family.info(EMBEDDED_NAME)).denoise((1.0,) * num_edits)[2]


@torch.inference_mode()
def _in_turns(step: Callable[[], object], load: BeginLoad, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """(seconds of steps alone, of steps beside loads, of loads)."""
    alone, beside, loads = list[float](), list[float](), list[float]()
    for number in range(rounds + 1):
        started = time.monotonic()
        gaps = _steps_until(step, load())
        if number == 0:  # the keeper's and the libraries' first load
            continue
        loads.append(time.monotonic() - started)
        beside += gaps
        time.sleep(0.2)
        left = iter(range(len(gaps)))
        alone += _steps_until(step, lambda left=left: next(left, None) is None)  # type: ignore[misc]
    return alone, beside, loads


def _steps_until(step: Callable[[], object], is_over: Callable[[], bool]) -> list[float]:
    """Seconds from each step's beginning to the next one's."""
    times = [time.monotonic()]
    while not is_over():
        step()
        times.append(time.monotonic())
    return [after - before for before, after in pairwise(times)]


def _report(dtype: str, measured: dict[str, tuple[list[float], list[float], list[float]]]) -> None:
    result: dict[str, Value] = {"benchmark": "model_load", "dtype": dtype}
    rows = []
    for name, (alone, beside, loads) in measured.items():
        usual, longest = statistics.median(alone), max(beside)
        slower, allowed = statistics.median(beside) / usual, max(ALLOWED_SECONDS, ALLOWED_RATIO * usual)
        rows.append(
            (
                name,
                f"step {usual * 1e3:.1f} ms, beside a load x {slower:.3f}, longest {longest * 1e3:.1f} ms "
                f"(alone {max(alone) * 1e3:.1f}, allowed {allowed * 1e3:.1f}); a load {statistics.median(loads):.2f} s",
            )
        )
        slug = name.replace(" ", "_")
        result |= {
            f"{slug}_step_ms": usual * 1e3,
            f"{slug}_ratio": slower,
            f"{slug}_longest_ms": longest * 1e3,
            f"{slug}_longest_alone_ms": max(alone) * 1e3,
            f"{slug}_load_seconds": statistics.median(loads),
        }
    print_report("steps while a component of 127 million weights is loaded", rows, result, None)


if __name__ == "__main__":
    main()
