"""Runs the sections, most important first; one that fails, hangs or breaks the device does not affect others."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

import torch

from benchmarks.gpu import correctness, flux_sections, overhead, sdxl
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.report import BROKEN, SKIPPED

MIN_SECONDS = 20.0  # a section is not begun with less time left
MAX_SECONDS = 300.0  # time limit of a section

GoOn = Callable[[Sequence[str]], None]
"""Runs these sections in a new process in place of this one; does not return."""


def sections(bench: Bench) -> dict[str, Callable[[], None]]:
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
        "correctness": lambda: correctness.edits(bench),
        "kernel_tests": lambda: correctness.kernel_tests(bench),
        "flux_steps": lambda: flux_sections.steps(bench, flux()),
        "attention": lambda: flux_sections.attention(bench, flux(), entries()),
        "flux_cold": lambda: flux_sections.cold(bench, flux(), entries()),
        "flux_host_pages": lambda: flux_sections.host_pages(bench, flux(), entries()),
        "overhead": lambda: overhead.run(bench),
        "served": lambda: correctness.served(bench),
        "sdxl": unet,
    }


def run_sections(bench: Bench, only: Sequence[str], go_on: GoOn) -> None:
    """All of them, or these. go_on: called where this process cannot do the rest."""
    table = sections(bench)
    names = [name for name in table if not only or name in only]
    for number, name in enumerate(names):
        rest = names[number + 1 :]
        bench.report.begin(name)
        if bench.seconds_left < MIN_SECONDS:
            bench.report.put(SKIPPED, **{name: "no time was left"})
            continue
        print(f"--- {name}, {bench.seconds_left / 60:.1f} minutes left", flush=True)
        with _time_limit(bench, name, partial(go_on, rest)):
            _run_section(bench, name, table[name])
        if not bench.is_usable():
            go_on(rest)
        bench.clear()


def _run_section(bench: Bench, name: str, run: Callable[[], None]) -> None:
    started = bench.report.seconds
    try:
        run()
    except Exception:  # one section that fails must not cost the others their figures
        traceback.print_exc()
        bench.report.put(BROKEN, **{name: traceback.format_exc(limit=-3)})
    finally:
        bench.report.put("seconds", **{name: round(bench.report.seconds - started, 1)})


@contextmanager
def _time_limit(bench: Bench, name: str, go_on: Callable[[], None]) -> Iterator[None]:
    """Calls `go_on` from another thread at the time limit, since this one may hang in the driver."""
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
