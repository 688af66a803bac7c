"""The sections about FLUX's transformer. They share its weights, and `entries`: its pages at every keyframe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.autoencoder import Autoencoder
from benchmarks.gpu.bench import COMPILE_SECONDS, Bench, Call, rotating
from benchmarks.gpu.flux import PIXELS, FluxBench
from benchmarks.gpu.flux_runs import HostedRun, exact_run, resident_run
from benchmarks.gpu.graphs import as_graph
from benchmarks.gpu.overlap import Span, device_spans, hidden_share, merged
from benchmarks.gpu.report import Figures
from benchmarks.gpu.trace import traced
from model_executor.kernels.gpu_attention import Attend, attend_alike, attend_each, best_attend, varlen_attend

AGREEMENT_RATIO = 0.2  # mask ratio of the step whose result is compared with an exact one's
STEP_RATIO = 0.1
"""Mask ratio of the steps whose launches and attention are timed, and of the first edit of a picture."""
WARM_RATIO = 0.2
"""Mask ratio of a later edit of it, and of one whose pages come from host memory."""
ROUNDS = 3  # of whole runs and edits, and of batches, which take long
PLACES = ROUNDS + 1
"""Edits in turn, each with a mask in another place."""
HEAD_DIM = 128  # of FLUX.1-dev
BATCH = 4  # requests that share attention
ROOM = 16 * 10**9
"""Bytes of the device that the largest batch takes beside weights and pages."""


# --------------------------------------------------------------------------------------------------------------- steps


@torch.inference_mode()
def steps(bench: Bench, flux: FluxBench) -> None:
    """A step by mask ratio and batch: ours eagerly and as a CUDA graph, and eager diffusers, in turns; then diffusers
    compiled, since compiling takes most of the time."""
    put = partial(bench.report.put, "flux_steps")
    near, far = flux.entry(), flux.entry()
    flux.prime([near, far, *(flux.entry() for _ in range(flux.size.keyframes - 2))])()
    bench.clear()
    flux.switch.set(False)
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
    sizes = _batches(bench, flux)
    for batch in sizes:
        batches[str(batch)] = _step_figures(bench, flux, batch, near, far)
        put(batches=batches, graphs=flux.switch.figures())
        bench.clear()
    flux.compile()
    for batch in sizes:
        if bench.seconds_left < COMPILE_SECONDS:
            break
        batches[str(batch)] |= _compiled_figures(bench, flux.diffusers(batch))
        put(batches=batches)


def _batches(bench: Bench, flux: FluxBench) -> tuple[int, ...]:
    """Requests that share a step; with little memory the largest batch is halved."""
    *smaller, largest = flux.size.batches
    room = 2 * largest * flux.entry_bytes + (ROOM if bench.device.type == "cuda" else 0)
    return (*smaller, largest if room <= bench.free_bytes else largest // 2)


def _step_figures(bench: Bench, flux: FluxBench, batch: int, near: Tensor, far: Tensor) -> Figures:
    """ratios: by mask ratio, milliseconds, and how much faster a step can be by operations. A step of one request is
    timed as a graph too: of several requests, steps run eagerly."""
    entries = [(near.clone(), far.clone()) for _ in range(batch)]  # every edit is of another template
    eager: dict[str, Call] = {"exact": flux.exact(batch)}
    eager |= {f"{ratio:g}": flux.edits(ratio, entries) for ratio in flux.size.ratios if ratio < 1}
    if batch == len(flux.size.mixed):
        eager["mixed"] = flux.mixed(flux.size.mixed, entries)
    calls: dict[str, Call] = {"diffusers": flux.diffusers(batch)}
    calls |= flux.switch.both(eager, eager if batch == 1 else ())
    seconds = bench.medians(calls, ROUNDS if batch > 1 else None)
    masked = [name for name in eager if name not in ("exact", "mixed")]
    mixed = {"ms": 1e3 * seconds["mixed"], "bound": flux.bound(*flux.size.mixed)} if "mixed" in eager else None
    timed = f"{STEP_RATIO:g}"
    figures: Figures = {
        "diffusers_ms": 1e3 * seconds["diffusers"],
        "exact_ms": 1e3 * seconds["exact"],
        "exact_tflops": batch * flux.flop / 1e12 / seconds["exact"],
        "ratios": {ratio: {"ms": 1e3 * seconds[ratio], "bound": flux.bound(float(ratio))} for ratio in masked},
        "launch_ms": bench.launch_ms(calls[timed]),
        "mixed": mixed,
    }
    if as_graph(timed) in calls:
        figures["graph_launch_ms"] = bench.launch_ms(calls[as_graph(timed)])
        figures["exact_graph_ms"] = 1e3 * seconds[as_graph("exact")]
        for ratio in masked:
            figures["ratios"][ratio]["graph_ms"] = 1e3 * seconds[as_graph(ratio)]
    return figures


def _compiled_figures(bench: Bench, call: Call) -> Figures:
    compile_s = bench.seconds(call)
    return {"compile_s": compile_s, "diffusers_compiled_ms": 1e3 * bench.median(call, ROUNDS)}


# ----------------------------------------------------------------------------------------------------------- attention


@torch.inference_mode()
def attention(bench: Bench, flux: FluxBench, entries: Sequence[Tensor]) -> None:
    """Times each way of attention in whole steps, of one edit and of several."""
    put, ways = partial(bench.report.put, "attention"), ways_of(bench.device)
    best = best_attend(bench.draw(1), HEAD_DIM)
    put(chosen=next((name for name, way in ways.items() if way is best), ""), ratio=STEP_RATIO)
    flux.switch.set(False)
    steps = {str(batch): _steps_by_way(bench, flux, [(entries[0], entries[1])] * batch) for batch in (1, BATCH)}
    put(cudnn=torch.backends.cudnn.version() or 0, steps=steps)


def ways_of(device: torch.device) -> dict[str, Attend]:
    """Ways of attention by name: all requests together, requests of equal size together, each request by itself."""
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
    """Priming, and the first and a later edit of a picture against an exact edit, with graphs where steps have them.
    Text encoders are left out: they take the same time in every edit."""
    size, prime, put = flux.size, flux.prime(entries), partial(bench.report.put, "flux_cold")
    flux.switch.set(True)
    seconds = bench.medians({"prime": prime, "exact": flux.exact()})
    put(keyframes=size.keyframes, prime_ms=1e3 * seconds["prime"], exact_step_ms=1e3 * seconds["exact"])
    vae = Autoencoder(bench, size.autoencoder, size.side * PIXELS)
    run_exact = exact_run(flux)

    def cold_edit(run: Call, decode: Call) -> Call:
        # Encoded once: the template's clean latents and what sampling starts from are of one posterior.
        return lambda: [vae.encode(), prime(), run(), decode()]

    def warm_edit(run: Call, decode: Call) -> Call:
        return lambda: [vae.encode(), run(), decode()]

    def edits(kind: Callable[[Call, Call], Call], ratio: float) -> Call:
        boxes = [flux.box(ratio, place) for place in range(PLACES)]
        return rotating([kind(resident_run(flux, box, entries), vae.decode_box(box, size.side)) for box in boxes])

    calls = {
        "cold": edits(cold_edit, STEP_RATIO),
        "warm": edits(warm_edit, WARM_RATIO),
        "exact": warm_edit(run_exact, vae.decode),
    }
    taken = bench.medians(calls, ROUNDS)
    bound = (size.keyframes + size.steps / flux.bound(STEP_RATIO)) / size.steps
    put(ratio=STEP_RATIO, steps=size.steps, cold_edit_s=taken["cold"], exact_edit_s=taken["exact"], cold_bound=bound)
    put(warm_ratio=WARM_RATIO, warm_edit_s=taken["warm"])


# ---------------------------------------------------------------------------------------------------------- host pages


@torch.inference_mode()
def host_pages(bench: Bench, flux: FluxBench, entries: Sequence[Tensor]) -> None:
    """Encoding and all steps with pages on the device and from host memory, in turns, and the share of the copies' time
    during which kernels run."""
    put, size = partial(bench.report.put, "flux_host_pages"), flux.size
    seen_by = "profiler" if bench.device.type == "cuda" else "host clock"
    put(steps=size.steps, ratio=WARM_RATIO, copied_gb=len(entries) * flux.entry_bytes / 1e9, seen_by=seen_by)
    flux.switch.set(True)
    vae = Autoencoder(bench, size.autoencoder, size.side * PIXELS)
    boxes = [flux.box(WARM_RATIO, place) for place in range(PLACES)]
    runs = [resident_run(flux, box, entries) for box in boxes]
    with closing(HostedRun(flux, entries, bench, vae.encode)) as hosted:
        calls = {
            "device": rotating([partial(_encode_and_run, vae.encode, run) for run in runs]),
            "host": rotating([partial(hosted.run, box) for box in boxes]),
        }
        put(**{f"{where}_edit_s": taken for where, taken in bench.medians(calls, ROUNDS).items()})
        put(**_overlap(bench, hosted, partial(hosted.run, boxes[0])))


def _encode_and_run(encode: Call, run: Call) -> None:
    encode()
    run()


def _overlap(bench: Bench, hosted: HostedRun, run: Call) -> Figures:
    """The share of the copies' time that is overlapped; empty if no copy was seen, as with a profiler that does not
    work."""
    copies, compute = _spans(bench, hosted, run)
    copy_ms = 1e3 * sum(end - start for start, end in merged(copies))
    return {"hidden_share": hidden_share(copies, compute), "copy_ms": copy_ms} if copies else {}


def _spans(bench: Bench, hosted: HostedRun, run: Call) -> tuple[list[Span], list[Span]]:
    """Spans of copies and of computation of one run."""
    if bench.device.type == "cuda":
        return device_spans(traced(bench, run))
    hosted.copies.clear()
    hosted.compute.clear()
    run()
    return hosted.copies, hosted.compute
