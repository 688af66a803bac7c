"""The sections about FLUX's transformer. They share its weights, and `entries`: its pages at every keyframe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.autoencoder import Autoencoder
from benchmarks.gpu.bench import COMPILE_SECONDS, Bench, Call
from benchmarks.gpu.flux import PIXELS, FluxBench
from benchmarks.gpu.flux_runs import HostedRun, exact_run, resident_run
from benchmarks.gpu.overlap import Span, device_spans, hidden_share, merged
from benchmarks.gpu.report import Figures
from model_executor.kernels.gpu_attention import Attend, attend_alike, attend_each, best_attend, varlen_attend

AGREEMENT_RATIO = 0.2  # mask ratio of the step whose result is compared with an exact one's
STEP_RATIO = 0.1
"""Mask ratio of the steps whose launches and attention are timed, and of the first edit of a picture."""
WARM_RATIO = 0.2
"""Mask ratio of a later edit of it."""
HOST_RATIOS = (0.2,)
ROUNDS = 3  # of whole runs and edits, which are many steps each
HEAD_DIM = 128  # of FLUX.1-dev
BATCH = 4  # requests that share attention


# --------------------------------------------------------------------------------------------------------------- steps


@torch.inference_mode()
def steps(bench: Bench, flux: FluxBench) -> None:
    """A step by mask ratio and batch, ours and eager diffusers in turns; then diffusers compiled, since compiling takes
    most of the time."""
    put = partial(bench.report.put, "flux_steps")
    near, far = flux.entry(), flux.entry()
    flux.prime([near, far, *(flux.entry() for _ in range(flux.size.keyframes - 2))])()
    from_diffusers, from_exact = flux.agreement(AGREEMENT_RATIO)
    put(
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
        batches[str(batch)] = _step_figures(bench, flux, batch, near, far)
        put(batches=batches)
        bench.clear()
    flux.compile()
    for batch in flux.size.batches:
        if bench.seconds_left < COMPILE_SECONDS:
            break
        batches[str(batch)] |= _compiled_figures(bench, flux.diffusers(batch))
        put(batches=batches)
    batches["1"]["graph_ms"] = bench.graph_ms(flux.edits(STEP_RATIO, [(near, far)]))
    put(batches=batches)


def _step_figures(bench: Bench, flux: FluxBench, batch: int, near: Tensor, far: Tensor) -> Figures:
    """ratios: by mask ratio, milliseconds, and how much faster a step can be by operations."""
    entries = [(near.clone(), far.clone()) for _ in range(batch)]  # every edit is of another template
    calls: dict[str, Call] = {"diffusers": flux.diffusers(batch), "exact": flux.exact(batch)}
    masked = {f"{ratio:g}": flux.edits(ratio, entries) for ratio in flux.size.ratios if ratio < 1}
    if batch == len(flux.size.mixed):
        calls["mixed"] = flux.mixed(flux.size.mixed, entries)
    seconds = bench.medians(calls | masked)
    mixed = {"ms": 1e3 * seconds["mixed"], "bound": flux.bound(*flux.size.mixed)} if "mixed" in calls else None
    return {
        "diffusers_ms": 1e3 * seconds["diffusers"],
        "exact_ms": 1e3 * seconds["exact"],
        "exact_tflops": batch * flux.flop / 1e12 / seconds["exact"],
        "ratios": {ratio: {"ms": 1e3 * seconds[ratio], "bound": flux.bound(float(ratio))} for ratio in masked},
        "launch_ms": bench.launch_ms(masked[f"{STEP_RATIO:g}"]),
        "mixed": mixed,
    }


def _compiled_figures(bench: Bench, call: Call) -> Figures:
    compile_s = bench.seconds(call)
    return {"compile_s": compile_s, "diffusers_compiled_ms": 1e3 * bench.median(call)}


# ----------------------------------------------------------------------------------------------------------- attention


@torch.inference_mode()
def attention(bench: Bench, flux: FluxBench, entries: Sequence[Tensor]) -> None:
    """Which way of attention is fastest in whole steps, of one edit and of several."""
    put, ways = partial(bench.report.put, "attention"), ways_of(bench.device)
    best = best_attend(bench.draw(1), HEAD_DIM)
    put(chosen=next((name for name, way in ways.items() if way is best), ""), ratio=STEP_RATIO)
    steps = {str(batch): _steps_by_way(bench, flux, [(entries[0], entries[1])] * batch) for batch in (1, BATCH)}
    put(cudnn=torch.backends.cudnn.version() or 0, steps=steps)


def ways_of(device: torch.device) -> dict[str, Attend]:
    """By name: all requests together, those alike together, and each by itself."""
    together: dict[str, Attend] = {"together": varlen_attend} if device.type != "cpu" else {}
    return together | {"alike": attend_alike, "each": attend_each}


def _steps_by_way(bench: Bench, flux: FluxBench, edits: Sequence[tuple[Tensor, Tensor]]) -> Figures:
    """Milliseconds of a step; empty on a CPU, whose operators have attention of their own."""
    twins = flux.attending(ways_of(bench.device))
    seconds = bench.medians({name: twin.edits(STEP_RATIO, edits) for name, twin in twins.items()})
    return {name: 1e3 * taken for name, taken in seconds.items()}


# ---------------------------------------------------------------------------------------------------------- first edit


@torch.inference_mode()
def cold(bench: Bench, flux: FluxBench, entries: Sequence[Tensor]) -> None:
    """Priming, and the first and a later edit of a picture against an exact edit. Text encoders are left out: they take
    the same time in every edit."""
    size, prime, put = flux.size, flux.prime(entries), partial(bench.report.put, "flux_cold")
    seconds = bench.medians({"prime": prime, "exact": flux.exact()})
    put(keyframes=size.keyframes, prime_ms=1e3 * seconds["prime"], exact_step_ms=1e3 * seconds["exact"])
    vae = Autoencoder(bench, size.autoencoder, size.side * PIXELS)
    decode_box, decode_warm = (vae.decode_box(flux.box(ratio), size.side) for ratio in (STEP_RATIO, WARM_RATIO))
    resident, warm = (resident_run(flux, ratio, entries) for ratio in (STEP_RATIO, WARM_RATIO))
    exact = exact_run(flux)

    def cold_edit() -> None:
        vae.encode()  # the template's clean latents
        prime()
        vae.encode()  # what sampling starts from
        resident()
        decode_box()

    def warm_edit() -> None:
        vae.encode()
        warm()
        decode_warm()

    def exact_edit() -> None:
        vae.encode()
        exact()
        vae.decode()

    edits = bench.medians({"cold": cold_edit, "warm": warm_edit, "exact": exact_edit}, ROUNDS)
    bound = (size.keyframes + size.steps / flux.bound(STEP_RATIO)) / size.steps
    put(ratio=STEP_RATIO, steps=size.steps, cold_edit_s=edits["cold"], exact_edit_s=edits["exact"], cold_bound=bound)
    put(warm_ratio=WARM_RATIO, warm_edit_s=edits["warm"])


# ---------------------------------------------------------------------------------------------------------- host pages


@torch.inference_mode()
def host_pages(bench: Bench, flux: FluxBench, entries: Sequence[Tensor]) -> None:
    """Runs of all steps with pages on the device and from host memory, in turns, and the share of the copies' time
    during which kernels run."""
    ratios, put = dict[str, Figures](), partial(bench.report.put, "flux_host_pages")
    seen_by = "profiler" if bench.device.type == "cuda" else "host clock"
    put(steps=flux.size.steps, copied_gb=len(entries) * flux.entry_bytes / 1e9, seen_by=seen_by)
    for ratio in HOST_RATIOS:
        resident = resident_run(flux, ratio, entries)
        with closing(HostedRun(flux, ratio, entries, bench)) as hosted:
            seconds = bench.medians({"device": resident, "host": hosted.run}, ROUNDS)
            ratios[f"{ratio:g}"] = {
                f"{where}_step_ms": 1e3 * taken / hosted.num_steps for where, taken in seconds.items()
            }
            put(ratios=ratios)
            ratios[f"{ratio:g}"] |= _overlap(bench, hosted)
            put(ratios=ratios)


def _overlap(bench: Bench, hosted: HostedRun) -> Figures:
    """Empty where no copy was seen, as with a profiler that does not work."""
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
