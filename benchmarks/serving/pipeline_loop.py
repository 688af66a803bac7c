"""The reference: diffusers' own FluxFillPipeline in a process of its own, which runs edits when its parent says so.

It gets decoded pictures and its results are not encoded, so file formats cost it nothing.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from PIL import Image, ImageOps

from benchmarks.baselines.fill_pipeline import FillEdit, FillPipeline
from benchmarks.command import DTYPES
from benchmarks.load.dataset import EditCall

__all__ = ["DTYPES", "count_flop", "peak_flops", "pipeline_process", "run_edits"]

_pipelines: list[FillPipeline] = []  # of the child: the one that it loaded


@contextmanager
def pipeline_process(
    model: str, dtype: str, threads: int, first_block_cache: float | None = None
) -> Iterator[Executor]:
    """Runs the functions below, in a process that loads the pipeline before the first one."""
    settings = (model, dtype, threads, first_block_cache)
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_load, initargs=settings) as process:
        yield process


def _load(model: str, dtype: str, threads: int, first_block_cache: float | None) -> None:
    _pipelines.append(FillPipeline(model, dtype, threads, first_block_cache))


def run_edits(calls: Sequence[EditCall], batch_size: int = 1) -> float:
    """Seconds of these edits, those of one step count in batches."""
    edits = [_fill_edit(call) for call in calls]
    start = time.perf_counter()
    for steps in dict.fromkeys(edit.steps for edit in edits):
        alike = [edit for edit in edits if edit.steps == steps]
        for first in range(0, len(alike), batch_size):
            _pipelines[0](alike[first : first + batch_size])
    return time.perf_counter() - start


def count_flop(call: EditCall) -> float:
    """Floating-point operations of an edit that computes every token; a multiply-add counts two."""
    from torch.utils.flop_counter import FlopCounterMode  # the parent needs no torch

    with FlopCounterMode(display=False) as counter:
        run_edits([call])
    return float(counter.get_total_flops())


def peak_flops(dtype_name: str, side: int = 2048, seconds: float = 1.0) -> float:
    """Operations per second of a large product, by the faster of PyTorch's two: on some processors MKL reaches half of
    what oneDNN does."""
    import torch

    dtype = getattr(torch, dtype_name)
    a, b = (torch.randn(side, side).to(dtype) for _ in range(2))
    products: list[Callable[[], object]] = [lambda: torch.mm(a, b)]
    if torch.backends.mkldnn.is_available() and dtype is not torch.float16:
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    return 2.0 * side**3 * max(_rate(product, seconds) for product in products)


def _rate(call: Callable[[], object], seconds: float) -> float:
    """Calls per second, after a first one."""
    call()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        calls += 1
    return calls / (time.perf_counter() - start)


def _fill_edit(call: EditCall) -> FillEdit:
    with Image.open(io.BytesIO(call.image)) as image, Image.open(io.BytesIO(call.mask or b"")) as mask:
        return FillEdit(call.prompt, image.convert("RGB"), ImageOps.invert(mask.getchannel("A")), call.steps, call.seed)
