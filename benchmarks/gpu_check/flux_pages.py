"""Edits of FLUX whose pages lie in host memory and come up under computation, against pages on the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.flux import FluxBench
from benchmarks.gpu_check.flux_runs import HostedRun, ResidentRun
from benchmarks.gpu_check.overlap import Span, device_spans, hidden_share, merged
from benchmarks.gpu_check.report import Figures

NAME = "flux_host_pages"
RATIOS = (0.2, 0.1)
ROUNDS = 3
"""Of whole runs, which are many steps each."""


@torch.inference_mode()
def run(bench: Bench, flux: FluxBench, entries: Sequence[Tensor]) -> None:
    """A run of all steps by mask ratio, each way in turn, and the share of the copies' time that lies under kernels."""
    ratios: dict[str, Figures] = {}
    bench.report.put(
        NAME,
        steps=flux.size.steps,
        copied_gb=len(entries) * flux.entry_bytes / 1e9,
        seen_by="profiler" if bench.device.type == "cuda" else "host clock",
    )
    for ratio in RATIOS:
        ratios[f"{ratio:g}"] = _compare(bench, flux, entries, ratio)
        bench.report.put(NAME, ratios=ratios)


def _compare(bench: Bench, flux: FluxBench, entries: Sequence[Tensor], ratio: float) -> Figures:
    resident = ResidentRun(flux, ratio, entries)
    with closing(HostedRun(flux, ratio, entries, bench)) as hosted:
        seconds = bench.medians({"device": resident.run, "host": hosted.run}, ROUNDS)
        copies, compute = _trace(bench, hosted)
    return {
        "device_step_ms": 1e3 * seconds["device"] / flux.size.steps,
        "host_step_ms": 1e3 * seconds["host"] / flux.size.steps,
        "hidden_share": hidden_share(copies, compute),
        "copy_ms": 1e3 * sum(end - start for start, end in merged(copies)),
    }


def _trace(bench: Bench, hosted: HostedRun) -> tuple[list[Span], list[Span]]:
    """Spans of copies and of computation of one run."""
    if bench.device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            hosted.run()
        return device_spans(trace)
    hosted.copies.clear()
    hosted.compute.clear()
    hosted.run()
    return hosted.copies, hosted.compute
