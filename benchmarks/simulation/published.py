"""Goodput of scheduling policies on published traces, in simulated time, beside what was measured there.

The traces, latency tables and measurements in `data/` are NeuStream's authors', see `source` in each file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.simulation.compared import OURS
from benchmarks.simulation.module_engine import OVERHEAD, POLICIES, Served, serve
from benchmarks.simulation.module_trace import Cell, ModuleTrace

DATA = Path(__file__).parent / "data"

PAPERS = {"neustream": ("dit_s2_256.json", "sd15_256.json")}
"""Paper -> files in DATA."""

OVERLOADED = 0.9
"""Cells in which NeuStream serves less than this share are counted together, too."""

CLOSE = 0.08
"""A simulated cell is close to the measured one if they differ by at most this share of all requests."""


@dataclass(frozen=True)
class Result:
    """One cell under all policies."""

    cell: Cell
    goodput: Mapping[str, int]  # policy -> requests in time
    batches: Mapping[str, Mapping[str, float]]  # policy -> module -> mean requests in its batches


def run(trace: ModuleTrace, policies: Sequence[str], processes: int, overhead: float) -> Iterator[Result]:
    """All cells of a trace, as they are done, in order. processes: that run them; 1: this one."""
    cells = list(trace.cells())
    runs = [(trace, cell, policy, overhead) for cell in cells for policy in policies]
    if processes == 1:
        yield from _results(cells, policies, map(_run, runs))
        return
    with get_context("forkserver").Pool(processes) as pool:
        yield from _results(cells, policies, pool.imap(_run, runs))


def _results(
    cells: Sequence[Cell], policies: Sequence[str], found: Iterator[tuple[int, dict[str, float]]]
) -> Iterator[Result]:
    for cell in cells:
        of_cell = dict(zip(policies, islice(found, len(policies)), strict=True))
        goodput = {policy: goodput for policy, (goodput, _) in of_cell.items()}
        yield Result(cell, goodput, {policy: batch for policy, (_, batch) in of_cell.items()})


def _run(run: tuple[ModuleTrace, Cell, str, float]) -> tuple[int, dict[str, float]]:
    served = serve(*run)
    return served.goodput, mean_batches(served)


def mean_batches(served: Served) -> dict[str, float]:
    """Module -> mean requests in its batches."""
    sizes: dict[str, list[int]] = {}
    for _, module, size in served.batches:
        sizes.setdefault(module, []).append(size)
    return {module: fmean(of) for module, of in sizes.items()}


# ------------------------------------------------------------------------------------------------------ reports


def compare(
    path: Path, processes: int, overhead: float = OVERHEAD, policies: Sequence[str] = tuple(POLICIES)
) -> list[Result]:
    """Run a file's cells and print a table of them."""
    trace = ModuleTrace.read(path)
    print(f"\n{trace.model}, {trace.num_requests} requests a cell. Measured: {trace.source}")
    print(f"{'requests in time':<28}{'measured':>20}   {'simulated':<10}")
    print(_row("", ["neustream", "clockwork"], policies))
    results = list[Result]()
    for result in run(trace, policies, processes, overhead):
        results.append(result)
        measured = [trace.measured(result.cell, system) for system in ("neustream", "clockwork")]
        print(_row(result.cell.name, measured, [result.goodput[policy] for policy in policies]), flush=True)
    for line in (*summary(trace, results, policies), *batching(trace, results, policies, overhead)):
        print(line)
    return results


def _row(name: str, measured: Sequence[Any], simulated: Sequence[Any]) -> str:
    cells = "".join(f"{'-' if value is None else value:>12}" for value in measured)
    return f"{name:<28}{cells}  |" + "".join(f"{value:>22}" for value in simulated)


def summary(trace: ModuleTrace, results: Sequence[Result], policies: Sequence[str]) -> Iterator[str]:
    """Totals, how close the simulation is to what was measured, and how the policies compare."""
    measured = {system: _total_measured(trace, results, system) for system in ("neustream", "clockwork")}
    totals = [sum(result.goodput[policy] for result in results) for policy in policies]
    yield _row("total", [measured["neustream"], measured["clockwork"]], totals)
    batches = [fmean(result.batches[policy].get(trace.loop, 0.0) for result in results) for policy in policies]
    yield _row("mean batch of the loop", [None, None], [f"{batch:.2f}" for batch in batches])
    for system in ("neustream", "clockwork"):
        if measured[system] is not None and system in policies:
            yield f"{system}: {closeness(trace, results, system)}"
    if {"neustream", OURS} <= set(policies):
        yield f"{OURS} against neustream, both simulated: {advantage(trace, results)}"


def _total_measured(trace: ModuleTrace, results: Sequence[Result], system: str) -> int | None:
    values = [trace.measured(result.cell, system) for result in results]
    return None if None in values else sum(value for value in values if value is not None)


def closeness(trace: ModuleTrace, results: Sequence[Result], system: str) -> str:
    """How close a simulated system is to the measured one, best repetition of each cell."""
    pairs = [
        (result.goodput[system], measured) for result in results if (measured := trace.measured(result.cell, system))
    ]
    total = sum(simulated for simulated, _ in pairs) / sum(measured for _, measured in pairs) - 1
    near = sum(abs(simulated - measured) <= CLOSE * trace.num_requests for simulated, measured in pairs)
    return f"{total:+.1%} in total of the measured; {near} of {len(pairs)} cells within {CLOSE:.0%} of all requests"


def advantage(trace: ModuleTrace, results: Sequence[Result]) -> str:
    """What our policy serves more than `neustream`."""
    low = [result for result in results if result.goodput["neustream"] < OVERLOADED * trace.num_requests]
    worst = min(results, key=lambda result: result.goodput[OURS] - result.goodput["neustream"])
    least = worst.goodput[OURS] - worst.goodput["neustream"]
    theirs = sum(result.goodput["neustream"] for result in low)
    gain = f"{sum(result.goodput[OURS] for result in low) / theirs - 1:+.1%}" if theirs else "-"
    return (
        f"{gain} over the {len(low)} cells where it serves under {OVERLOADED:.0%}; least {least:+d} ({worst.cell.name})"
    )


# ------------------------------------------------------------------------------------------------------ batches


def middle(results: Sequence[Result]) -> Cell:
    """The cell that most others differ from in one value only."""
    cells = [result.cell for result in results]
    return max(cells, key=lambda cell: sum(_num_equal(cell, other) == 2 for other in cells))


def _num_equal(one: Cell, other: Cell) -> int:
    return (one.rate == other.rate) + (one.cv == other.cv) + (one.slo == other.slo)


def batching(
    trace: ModuleTrace, results: Sequence[Result], policies: Sequence[str], overhead: float = OVERHEAD
) -> Iterator[str]:
    """Batches of the middle cell (figure 13) as multiples of Clockwork's, also where all requests have the mean number
    of steps, and the modules' normalised goodput (figure 16).
    """
    if "clockwork" not in policies:
        return
    cell = middle(results)
    of_cell = next(result for result in results if result.cell == cell).batches
    equal = msgspec.structs.replace(trace, steps=[round(fmean(trace.steps))] * trace.num_requests)
    of_equal = {policy: mean_batches(serve(equal, cell, policy, overhead)) for policy in policies}
    yield f"{cell.name}, mean batch of the loop and its multiple of clockwork's:"
    for name, batches in (("steps as drawn", of_cell), ("equal steps", of_equal)):
        loop = {policy: batches[policy].get(trace.loop, 0.0) for policy in policies}
        texts = [f"{loop[policy]:.2f} ({loop[policy] / loop['clockwork']:.2f}x)" for policy in policies]
        yield _row(name, [None, None], texts)
    yield f"{cell.name}, normalised goodput of modules, requests per second:"
    for module in (name for name in trace.modules if name in trace.latency_seconds):
        normalised = [_normalised(trace, cell, module, of_cell[policy].get(module, 0.0)) for policy in policies]
        yield _row(module, [None, None], [f"{value:.2f}" for value in normalised])


def _normalised(trace: ModuleTrace, cell: Cell, module: str, batch: float) -> float:
    """Equation 1 of the paper, with the mean batch that was run in place of the largest one that could be."""
    times = fmean(trace.steps) if module == trace.loop else 1.0
    return batch / (cell.slo * trace.latency_seconds[module][1] * times)


def as_json(results: Sequence[Result]) -> str:
    """The goodput by cell and policy."""
    return json.dumps({"cells": {result.cell.name: dict(result.goodput) for result in results}}, indent=1)
