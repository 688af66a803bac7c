"""A step of FLUX's transformer by mask ratio and batch, against diffusers' own forward, eager and compiled."""

from __future__ import annotations

import torch

from benchmarks.gpu.bench import COMPILE_SECONDS, Bench
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.report import Figures

NAME = "flux_steps"
AGREEMENT_RATIO = 0.2
"""Mask ratio of the step whose result is held against an exact one's."""
LAUNCH_RATIO = 0.1
"""Of the step for which the host's time is told: what it launches does not depend on it."""


@torch.inference_mode()
def run(bench: Bench, flux: FluxBench) -> None:
    """Every batch size in turn; within it ours and eager diffusers take turns. Then diffusers compiled, which takes
    most of the time, so that it comes last."""
    near, far = flux.entry(), flux.entry()
    flux.prime([near, far, *(flux.entry() for _ in range(flux.size.keyframes - 2))])()
    from_diffusers, from_exact = flux.agreement(AGREEMENT_RATIO)
    bench.report.put(
        NAME,
        billion_parameters=sum(parameter.numel() for parameter in flux.module.parameters()) / 1e9,
        image_tokens=flux.size.image_tokens,
        text_tokens=flux.size.text_tokens,
        exact_tflop=flux.flop / 1e12,
        entry_gb=flux.entry_bytes / 1e9,
        operators=flux.operators or "no kernels of its own",
        exact_from_diffusers=from_diffusers,
        masked_from_exact=from_exact,
        batches={},
    )
    batches: dict[str, Figures] = {}
    for batch in flux.size.batches:
        entries = [(near.clone(), far.clone()) for _ in range(batch)]  # every edit is of another template
        calls = {"diffusers": flux.diffusers(batch), "exact": flux.exact(batch)}
        calls |= {f"{ratio:g}": flux.edits(ratio, entries) for ratio in flux.size.ratios if ratio < 1}
        batches[str(batch)] = _figures(bench.medians(calls), batch, flux)
        batches[str(batch)]["launch_ms"] = bench.launch_ms(calls[f"{LAUNCH_RATIO:g}"])
        bench.report.put(NAME, batches=batches)
        entries.clear()
        calls.clear()
        bench.clear()
    flux.compile()
    for batch in flux.size.batches:
        if bench.seconds_left < COMPILE_SECONDS:
            break
        started = bench.report.seconds
        flux.diffusers(batch)()
        batches[str(batch)]["compile_s"] = bench.report.seconds - started
        batches[str(batch)]["diffusers_compiled_ms"] = 1e3 * bench.median(flux.diffusers(batch))
        bench.report.put(NAME, batches=batches)


def _figures(seconds: dict[str, float], batch: int, flux: FluxBench) -> Figures:
    """ratios: by mask ratio, milliseconds, and how much faster a step can be by FLOPs."""
    exact = seconds["exact"]
    return {
        "diffusers_ms": 1e3 * seconds.pop("diffusers"),
        "exact_ms": 1e3 * seconds.pop("exact"),
        "exact_tflops": batch * flux.flop / 1e12 / exact,
        "ratios": {ratio: {"ms": 1e3 * taken, "bound": flux.bound(float(ratio))} for ratio, taken in seconds.items()},
    }
