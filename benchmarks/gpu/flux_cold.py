"""Priming, and the first edit of a picture never seen: pages primed, all steps mask-aware, against an exact edit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gpu.autoencoder import Autoencoder
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.flux import PIXELS, FluxBench
from benchmarks.gpu.flux_runs import ExactRun, ResidentRun

NAME = "flux_cold"
RATIO = 0.1
ROUNDS = 3
"""Of whole edits."""


@torch.inference_mode()
def run(bench: Bench, flux: FluxBench, entries: Sequence[Tensor]) -> None:
    """Text encoders are left out: they take the same time in every edit."""
    size, prime = flux.size, flux.prime(entries)
    seconds = bench.medians({"prime": prime, "exact": flux.exact()})
    bench.report.put(
        NAME,
        keyframes=size.keyframes,
        prime_ms=1e3 * seconds["prime"],
        exact_step_ms=1e3 * seconds["exact"],
    )
    vae = Autoencoder(bench, size.autoencoder, size.side * PIXELS)
    decode_box = vae.decode_box(flux.box(RATIO), size.side)
    resident, exact = ResidentRun(flux, RATIO, entries), ExactRun(flux)

    def cold_edit() -> None:
        vae.encode()  # the template's clean latents
        prime()
        vae.encode()  # what sampling starts from
        resident.run()
        decode_box()

    def exact_edit() -> None:
        vae.encode()
        exact.run()
        vae.decode()

    edits = bench.medians({"cold": cold_edit, "exact": exact_edit}, ROUNDS)
    bench.report.put(
        NAME,
        ratio=RATIO,
        steps=size.steps,
        cold_edit_s=edits["cold"],
        exact_edit_s=edits["exact"],
        cold_bound=(size.keyframes + size.steps / flux.bound(RATIO)) / size.steps,
    )
