"""Attention of FLUX's shape by each way that there is: which one `gpu_attention.py` should take is to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.report import Figures
from model_executor.gpu_attention import ROWS, Attend, attend_alike, attend_each, best_attend, varlen_attend
from model_executor.ragged import spans

NAME = "attention"
HEADS, HEAD_DIM = 24, 128
"""Of FLUX.1-dev."""
BATCH = 4
STEP_RATIO = 0.1
"""Mask ratio of whole steps."""
REPEATS = 20
"""Calls that are timed as one: a single one takes the host as long as the GPU."""


@torch.inference_mode()
def run(bench: Bench, flux: FluxBench, entries: Sequence[Tensor]) -> None:
    """Whole steps, alone and of several edits; then attention by itself, of an exact step and of edits by mask ratio.
    entries: of two keyframes at least."""
    size, figures = bench.size.flux, dict[str, Figures]()
    keys, ways = size.image_tokens + size.text_tokens, ways_of(bench.device)
    bench.report.put(NAME, heads=HEADS, head_dim=HEAD_DIM, keys=keys, chosen=_chosen(bench), ratio=STEP_RATIO)
    steps = {str(batch): _steps(bench, flux, entries, batch) for batch in (1, BATCH)}
    bench.report.put(NAME, cudnn=torch.backends.cudnn.version() or 0, steps=steps)
    for ratio in sorted(size.ratios, reverse=True):
        queries = round(ratio * size.image_tokens) + size.text_tokens
        for batch in (1, BATCH) if ratio < 1 else (1,):
            name = f"{ratio:g}" if batch == 1 else f"{batch} of {ratio:g}"
            figures[name] = _figures(bench, ways, [queries] * batch, keys)
            bench.report.put(NAME, shapes=figures)


def ways_of(device: torch.device) -> dict[str, Attend]:
    """By name: all requests together, those alike together, and each by itself."""
    together: dict[str, Attend] = {"together": varlen_attend} if device.type != "cpu" else {}
    return together | {"alike": attend_alike, "each": attend_each}


def _chosen(bench: Bench) -> str:
    """The way that steps take."""
    best = best_attend(bench.draw(1), HEAD_DIM)
    return next((name for name, way in ways_of(bench.device).items() if way is best), "")


def _steps(bench: Bench, flux: FluxBench, entries: Sequence[Tensor], batch: int) -> Figures:
    """Milliseconds of a step by each way; nothing where operators are a CPU's, which have their own."""
    edits = [(entries[0], entries[1])] * batch
    steps = {name: twin.edits(STEP_RATIO, edits) for name, twin in flux.attending(ways_of(bench.device)).items()}
    return {name: 1e3 * seconds for name, seconds in bench.medians(steps).items()}


def _figures(bench: Bench, ways: dict[str, Attend], queries: list[int], keys: int) -> Figures:
    """Milliseconds of each way, and what its first call took with more queries: some prepare for every number."""
    calls = {name: _repeated(_call(bench, attend, queries, keys)) for name, attend in ways.items()}
    more = [count + ROWS for count in queries]
    return {
        "tflop": 4 * sum(queries) * keys * HEADS * HEAD_DIM / 1e12,
        "ms": {name: 1e3 * seconds / REPEATS for name, seconds in bench.medians(calls).items()},
        "new_shape_ms": {name: 1e3 * bench.seconds(_call(bench, attend, more, keys)) for name, attend in ways.items()},
    }


def _repeated(call: Callable[[], Tensor]) -> Call:
    def calls() -> None:
        for _ in range(REPEATS):
            call()

    return calls


def _call(bench: Bench, attend: Attend, queries: list[int], keys: int) -> Callable[[], Tensor]:
    qkv = bench.draw(sum(queries), 3, HEADS, HEAD_DIM)
    joint = bench.draw(len(queries) * keys, 2, HEADS, HEAD_DIM)
    rows = spans(queries), spans([keys] * len(queries))
    return partial(attend, qkv[:, 0], joint[:, 0], joint[:, 1], *rows)
