"""Runs the sections, most important first; one that fails, hangs or breaks the device does not affect others."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

import torch

from benchmarks.gpu import (
    correctness,
    engine_edits,
    family_steps,
    flux_sections,
    fp8,
    invariance,
    kernel_times,
    machine,
    offload,
    overhead,
    sdxl,
)
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine_edits import needed_bytes
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.report import BROKEN, SKIPPED
from benchmarks.gpu.sdxl import Sdxl

MIN_SECONDS = 15.0  # a section is not begun with less time left

GoOn = Callable[[Sequence[str]], None]
"""Runs these sections in a new process in place of this one; does not return."""

CPU_PATIENCE = 10
"""Times a section's time limit: on a CPU it is as slow as other processes make it."""


class Section(NamedTuple):
    """seconds: its time limit, about twice what it should take. has_graphs: it uses CUDA graphs where it may, and is
    run again without them where it fails."""

    run: Callable[[], None]
    seconds: float
    has_graphs: bool = False


def sections(bench: Bench) -> dict[str, Section]:
    @cache
    def flux() -> FluxBench:
        return FluxBench(bench)

    @cache
    def entries() -> list[torch.Tensor]:
        entries = [flux().entry() for _ in flux().keyframes()]
        with torch.inference_mode():
            flux().prime(entries)()
        return entries

    @cache
    def unet() -> Sdxl:
        with torch.inference_mode():
            return Sdxl(bench)

    def engine() -> None:
        """Its engine has weights of its own; other weights stay where there is memory for both."""
        entry, weights = flux().entry_bytes, sum(each.nbytes for each in flux().module.parameters())
        flux().switch.clear()
        entries.cache_clear()
        bench.clear()
        for model in (unet, flux):
            if bench.free_bytes < needed_bytes(bench, weights, entry):
                model.cache_clear()
                bench.clear()
        engine_edits.run(bench, entry)

    def offloading() -> None:
        """Its engines have weights of their own."""
        for made in (entries, unet, flux):
            made.cache_clear()
        bench.clear()
        offload.run(bench)

    table = {
        "machine": Section(lambda: machine.run(bench), 30),
        "kernel_tests": Section(lambda: correctness.kernel_tests(bench), 160),
        "flux_steps": Section(lambda: flux_sections.steps(bench, flux()), 150, has_graphs=True),
        "sdxl": Section(lambda: sdxl.run(bench, unet()), 90, has_graphs=True),
        "family_steps": Section(lambda: family_steps.run(bench), 90, has_graphs=True),
        "flux_cold": Section(lambda: flux_sections.cold(bench, flux(), entries()), 60, has_graphs=True),
        "engine_edits": Section(engine, 80, has_graphs=True),
        "flux_host_pages": Section(lambda: flux_sections.host_pages(bench, flux(), entries()), 60, has_graphs=True),
        "kernel_times": Section(lambda: kernel_times.run(bench, flux(), (entries()[0], entries()[1]), unet()), 60),
        "overhead": Section(lambda: overhead.run(bench), 30, has_graphs=True),
        "invariance": Section(lambda: invariance.run(bench, flux()), 45),
        "fp8": Section(lambda: fp8.run(bench), 20),
        "served": Section(lambda: correctness.served(bench), 70, has_graphs=True),
        "correctness": Section(lambda: correctness.edits(bench), 150, has_graphs=True),
        "attention": Section(lambda: flux_sections.attention(bench, flux(), entries()), 30),
        "offload": Section(offloading, 120, has_graphs=True),
    }
    patience = 1 if bench.device.type == "cuda" else CPU_PATIENCE
    return {name: section._replace(seconds=patience * section.seconds) for name, section in table.items()}


def run_sections(bench: Bench, only: Sequence[str], go_on: GoOn) -> None:
    """Run the sections, all or `only` these. go_on: called where this process cannot do the rest."""
    table = sections(bench)
    names = [name for name in table if not only or name in only]
    for number, name in enumerate(names):
        bench.report.begin(name, goes_on_without_graphs=not bench.graphs.are_on)
        _run_in_time(bench, name, table[name], names[number + 1 :], go_on)


def _run_in_time(bench: Bench, name: str, section: Section, rest: Sequence[str], go_on: GoOn) -> None:
    """Run a section, and again without graphs if it fails with them."""
    if bench.seconds_left < MIN_SECONDS:
        bench.report.put(SKIPPED, **{name: "no time was left"})
        return
    print(f"--- {name}, {bench.seconds_left / 60:.1f} minutes left", flush=True)
    with _time_limit(bench, name, section, partial(go_on, rest)):
        why = _run_section(bench, name, section.run)
    is_again = why is not None and section.has_graphs and bench.graphs.are_on
    if why is not None and is_again:
        bench.graphs.are_on = False
        bench.report.begin_again(name, why)
    if not bench.is_usable():
        go_on([name, *rest] if is_again else rest)
    bench.clear()
    if is_again:
        _run_in_time(bench, name, section, rest, go_on)


def _run_section(bench: Bench, name: str, run: Callable[[], None]) -> str | None:
    """Run one section; why it failed, None if it did not."""
    started, why = bench.report.seconds, None
    try:
        run()
    except Exception:  # one section that fails must not cost the others their figures
        traceback.print_exc()
        why = traceback.format_exc(limit=-3)
        bench.report.put(BROKEN, **{name: why})
    bench.report.put("seconds", **{name: round(bench.report.seconds - started, 1)})
    return why


@contextmanager
def _time_limit(bench: Bench, name: str, section: Section, go_on: Callable[[], None]) -> Iterator[None]:
    """Calls `go_on` from another thread at the time limit, since this one may hang in the driver. Graphs are turned off
    first, where they may be what hangs."""
    seconds = min(section.seconds, bench.seconds_left)

    def cut_off() -> None:
        print(f"{name} is cut off after {seconds:.0f} s", flush=True)
        bench.report.put(SKIPPED, **{name: f"what is missing was cut off after {seconds:.0f} s"})
        bench.graphs.are_on = bench.graphs.are_on and not section.has_graphs
        go_on()

    timer = threading.Timer(seconds, cut_off)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
