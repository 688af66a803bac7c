"""Attention of FLUX's shape by each way that there is: which one `gpu_operators.py` should take is to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.report import Figures
from model_executor.gpu_operators import Attend, attend_each, varlen_attend
from model_executor.ragged import Span, spans

NAME = "attention"
HEADS, HEAD_DIM = 24, 128
"""Of FLUX.1-dev."""
BATCH = 4


@torch.inference_mode()
def run(bench: Bench) -> None:
    """Of an exact step, of edits by mask ratio alone, and of several together."""
    size, figures = bench.size.flux, dict[str, Figures]()
    keys = size.image_tokens + size.text_tokens
    for ratio in sorted(size.ratios, reverse=True):
        queries = round(ratio * size.image_tokens) + size.text_tokens
        for batch in (1, BATCH) if ratio < 1 else (1,):
            name = f"{ratio:g}" if batch == 1 else f"{batch} of {ratio:g}"
            figures[name] = _figures(bench, [queries] * batch, keys)
            bench.report.put(NAME, heads=HEADS, head_dim=HEAD_DIM, keys=keys, shapes=figures)


def _figures(bench: Bench, queries: list[int], keys: int) -> Figures:
    """Milliseconds of each way, and what its first call took with one query more: some prepare for every shape."""
    calls = {name: _call(bench, attend, queries, keys) for name, attend in _ways(bench).items()}
    more = [count + 1 for count in queries]
    return {
        "tflop": 4 * sum(queries) * keys * HEADS * HEAD_DIM / 1e12,
        "ms": {name: 1e3 * seconds for name, seconds in bench.medians(calls).items()},
        "new_shape_ms": {
            name: 1e3 * bench.seconds(_call(bench, attend, more, keys)) for name, attend in _ways(bench).items()
        },
    }


def _ways(bench: Bench) -> dict[str, Attend]:
    if bench.device.type != "cuda":
        return {"each request": attend_each}
    return {"together": varlen_attend, "each request": attend_each, "each request, cuDNN": _by_cudnn}


def _by_cudnn(query: Tensor, key: Tensor, value: Tensor, where: Sequence[Span], keys: Sequence[Span]) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attend_each(query, key, value, where, keys)


def _call(bench: Bench, attend: Attend, queries: list[int], keys: int) -> Callable[[], Tensor]:
    qkv = bench.draw(sum(queries), 3, HEADS, HEAD_DIM)
    joint = bench.draw(len(queries) * keys, 2, HEADS, HEAD_DIM)
    rows = spans(queries), spans([keys] * len(queries))
    return partial(attend, qkv[:, 0], joint[:, 0], joint[:, 1], *rows)
