"""Sections one after the other, in the order of what they are worth: what breaks, hangs or breaks the device costs
itself, and none of the others.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

import torch

from benchmarks.gpu import (
    attention,
    correctness,
    flux_cold,
    flux_pages,
    flux_steps,
    kernel_tests,
    overhead,
    sdxl,
    served,
)
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.report import BROKEN, SKIPPED

MIN_SECONDS = 20.0
"""A section is not begun with less left."""

MAX_SECONDS = 300.0
"""That a section may take; one that hangs is cut off."""

GoOn = Callable[[Sequence[str]], None]
"""Does these sections in a process of its own, in place of this one; does not return."""


def sections(bench: Bench) -> dict[str, Callable[[], None]]:
    """Those of FLUX share its weights, and its pages after them."""

    @cache
    def flux() -> FluxBench:
        return FluxBench(bench)

    @cache
    def entries() -> list[torch.Tensor]:
        entries = [flux().entry() for _ in flux().keyframes()]
        with torch.inference_mode():
            flux().prime(entries)()
        return entries

    def unet() -> None:
        entries.cache_clear()
        flux.cache_clear()
        bench.clear()
        sdxl.run(bench)

    return {
        correctness.NAME: lambda: correctness.run(bench),
        kernel_tests.NAME: lambda: kernel_tests.run(bench),
        flux_steps.NAME: lambda: flux_steps.run(bench, flux()),
        attention.NAME: lambda: attention.run(bench, flux(), entries()),
        flux_cold.NAME: lambda: flux_cold.run(bench, flux(), entries()),
        flux_pages.NAME: lambda: flux_pages.run(bench, flux(), entries()),
        overhead.NAME: lambda: overhead.run(bench),
        served.NAME: lambda: served.run(bench),
        sdxl.NAME: unet,
    }


def run_sections(bench: Bench, only: Sequence[str], go_on: GoOn) -> None:
    """All of them, or these. go_on: called where the rest cannot be done here any more."""
    table = sections(bench)
    names = [name for name in table if not only or name in only]
    for number, name in enumerate(names):
        rest = names[number + 1 :]
        bench.report.begin(name)
        if bench.seconds_left < MIN_SECONDS:
            bench.report.put(SKIPPED, **{name: "no time was left"})
            continue
        print(f"--- {name}, {bench.seconds_left / 60:.1f} minutes left", flush=True)
        with _cut_off(bench, name, partial(go_on, rest)):
            _run_section(bench, name, table[name])
        if not bench.is_usable():
            go_on(rest)
        bench.clear()


def _run_section(bench: Bench, name: str, run: Callable[[], None]) -> None:
    started = bench.report.seconds
    try:
        run()
    except Exception:  # the run's edge: one section that breaks must not cost the others their figures
        traceback.print_exc()
        bench.report.put(BROKEN, **{name: traceback.format_exc(limit=-3)})
    finally:
        bench.report.put("seconds", **{name: round(bench.report.seconds - started, 1)})


@contextmanager
def _cut_off(bench: Bench, name: str, go_on: Callable[[], None]) -> Iterator[None]:
    """Have the rest done elsewhere when this section is not over in its time. Its own thread may hang in the driver."""
    seconds = min(MAX_SECONDS, bench.seconds_left)

    def cut_off() -> None:
        print(f"{name} is cut off after {seconds:.0f} s", flush=True)
        bench.report.put(SKIPPED, **{name: f"what is missing was cut off after {seconds:.0f} s"})
        go_on()

    timer = threading.Timer(seconds, cut_off)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
