"""What a step consists of on a GPU: its launches, and the time of each kernel, eagerly and as a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from benchmarks.gpu.bench import Bench, Call
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.flux_sections import STEP_RATIO
from benchmarks.gpu.graphs import GraphSwitch
from benchmarks.gpu.report import Figures
from benchmarks.gpu.sdxl import Sdxl
from benchmarks.gpu.trace import busy_ms, by_kernel, traced

FILL = "Memset"
"""How the profiler names a fill: cuBLAS and cuDNN make them, and the budgets of launches, which are counted without a
GPU, know none."""

KERNELS = 15
"""Kernels that are listed of a step, those that take most of the time."""


@torch.inference_mode()
def run(bench: Bench, flux: FluxBench, entries: tuple[torch.Tensor, torch.Tensor], sdxl: Sdxl) -> None:
    """Steps of FLUX at mask ratio 0.1, alone and in the largest batch, and guided ones of SDXL. entries: pages of two
    keyframes, which all requests of a batch read here."""
    largest = flux.size.batches[-1]
    flux_calls = {"exact": flux.exact(), "masked": flux.edits(STEP_RATIO, [entries])}
    batch = {f"masked, batch of {largest}": flux.edits(STEP_RATIO, [entries] * largest)}
    put = partial(bench.report.put, "kernel_times")
    put(flux=_steps(bench, flux_calls | batch, flux.switch))
    put(sdxl=_steps(bench, {"exact": sdxl.exact(), "masked": sdxl.masked()}, sdxl.switch))


def _steps(bench: Bench, calls: Mapping[str, Call], switch: GraphSwitch) -> Figures:
    """Figures of each step: its launches, without fills that libraries make for their own kernels; milliseconds of the
    device; and the kernels that take most of them."""
    figures: Figures = {}
    for name, call in calls.items():
        switch.set(False)
        call()  # what is chosen and compiled at first use is no part of a step
        works = traced(bench, call)
        fills = sum(work.name.startswith(FILL) for work in works)
        counts = {"launches": len(works) - fills, "fills": fills, "device_ms": busy_ms(works)}
        figures[name] = {**counts, "kernels": by_kernel(works, KERNELS)}
    return figures
