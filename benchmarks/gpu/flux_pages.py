"""Edits of FLUX whose pages lie in host memory and come up under computation, against pages on the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.flux_runs import HostedRun, ResidentRun
from benchmarks.gpu.overlap import Span, device_spans, hidden_share, merged
from benchmarks.gpu.report import Figures

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
        resident = ResidentRun(flux, ratio, entries)
        with closing(HostedRun(flux, ratio, entries, bench)) as hosted:
            for figures in (_times(bench, resident, hosted), _overlap(bench, hosted)):
                ratios.setdefault(f"{ratio:g}", {}).update(figures)
                bench.report.put(NAME, ratios=ratios)


def _times(bench: Bench, resident: ResidentRun, hosted: HostedRun) -> Figures:
    seconds = bench.medians({"device": resident.run, "host": hosted.run}, ROUNDS)
    return {f"{where}_step_ms": 1e3 * taken / hosted.num_steps for where, taken in seconds.items()}


def _overlap(bench: Bench, hosted: HostedRun) -> Figures:
    """Nothing where no copy was seen, as by a profiler that does not work."""
    copies, compute = _trace(bench, hosted)
    copy_ms = 1e3 * sum(end - start for start, end in merged(copies))
    return {"hidden_share": hidden_share(copies, compute), "copy_ms": copy_ms} if copies else {}


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
