"""The section about `--offload host`: whether pictures keep their bits, what an edit costs then, and what it saves.

Bits are compared on small checkpoints of all families. Times and memory are of edits at FLUX.1-dev's shape, with T5 as
deep as there, each with a prompt that is not embedded yet.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.correctness import edit_pictures, small_checkpoint, soft_picture
from benchmarks.gpu.flux import PIXELS
from benchmarks.gpu.local_engine import LocalEngine, Pixels
from benchmarks.gpu.random_flux import RandomFlux
from benchmarks.gpu.report import Figures
from core.config import CacheConfig, Offload
from core.sampling_params import SamplingParams
from model_executor.host_weights import Weights

STEPS = 8
ROUNDS = 3
GUIDANCE = 3.5
HOST_BYTES = 2**26
"""Of an arena for pages, which exact edits have none of."""


def run(bench: Bench) -> None:
    put = partial(bench.report.put, "offload")
    with tempfile.TemporaryDirectory() as folder:
        families: dict[str, int] = {}
        for name in bench.size.checkpoints:
            families[name] = _differing_of(bench, small_checkpoint(name, Path(folder)))
            put(families=families)
        parts = RandomFlux(bench, has_whole_t5=True)
        checkpoint = parts.save(Path(folder) / "whole")
        expected, plain = _measured(bench, checkpoint, parts, "none")
        put(steps=STEPS, **plain)
        painted, offloaded = _measured(bench, checkpoint, parts, "host")
    differing = sum(families.values()) + differing_values(painted, expected)
    put(differing=differing, **{f"offload_{name}": figure for name, figure in offloaded.items()})


def differing_values(painted: list[Pixels], expected: list[Pixels]) -> int:
    """Pixel values that are not equal."""
    return sum(int(np.count_nonzero(ours != theirs)) for ours, theirs in zip(painted, expected, strict=True))


def _differing_of(bench: Bench, checkpoint: Path) -> int:
    """Pixel values of a checkpoint's edits that `--offload host` changes."""
    dtype = str(bench.dtype).removeprefix("torch.")
    edit = partial(edit_pictures, checkpoint, str(bench.device), dtype, 1, bench.graphs)
    expected, painted = edit(), edit(offload="host")
    bench.clear()
    return sum(differing_values(painted[way], expected[way]) for way in expected)


def _measured(bench: Bench, checkpoint: Path, parts: RandomFlux, offload: Offload) -> tuple[list[Pixels], Figures]:
    """(pictures, seconds of an edit, its peak memory on a GPU, and what each use of weights in host memory copies)."""
    bench.clear()
    size, numbers = bench.size.flux, count()
    dtype, cache = str(bench.dtype).removeprefix("torch."), CacheConfig(device_bytes=0, host_bytes=HOST_BYTES)
    engine = LocalEngine(
        checkpoint, str(bench.device), dtype, cache, make=parts.make, graphs=bench.graphs, offload=offload
    )
    sampling = SamplingParams(num_inference_steps=STEPS, guidance_scale=GUIDANCE, seed=7, mask_aware=False)
    painted: list[Pixels] = []

    def edit() -> None:
        engine.prompt = f"a red striped shirt, number {next(numbers)}"
        painted.extend(engine.edit([soft_picture(size.side * PIXELS, 0)], sampling))

    with closing(engine):
        edit()  # compiles kernels
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
        figures: Figures = {"edit_s": bench.median(edit, ROUNDS)}
        if bench.device.type == "cuda":
            figures["peak_gb"] = torch.cuda.max_memory_allocated(bench.device) / 1e9
        for component in ("text_encoder", "vae"):
            if (weights := engine.family.weights(component)).nbytes:
                figures[f"{component}_gb"] = weights.nbytes / 1e9
                figures[f"{component}_ms"] = 1e3 * bench.median(partial(_use, weights))
    return painted, figures


def _use(weights: Weights) -> None:
    with weights.on_device():
        pass
