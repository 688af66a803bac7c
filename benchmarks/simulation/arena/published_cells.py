"""The contests `neustream`: requests in time in the cells of the authors' traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.simulation.arena.bar import Bar
from benchmarks.simulation.arena.contest import Contest, Metric, Values
from benchmarks.simulation.arena.tournament import Played
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.module_engine import serve
from benchmarks.simulation.module_trace import ModuleTrace
from benchmarks.simulation.published import DATA, PAPERS

GOODPUT = Metric("requests in time", is_more_better=True)

POLICIES = (OURS, "former goodput", "former step_batching", "neustream")

FEWER = 2
"""Requests of a cell that `default` may serve fewer in time than the best former policy."""

LEAST = {"dit_s2_256": 10_620, "sd15_256": 10_885}
"""File -> requests in time of all of its cells, at least."""


def contests() -> list[Contest]:
    """One per cell. Arrivals are given, so there is one seed."""
    return [
        Contest(f"{file} {cell.name}", partial(_play, file, cell.name), POLICIES, (GOODPUT,), 1, 0.0, FEWER)
        for file in _files()
        for cell in ModuleTrace.read(DATA / f"{file}.json").cells()
    ]


def _files() -> list[str]:
    return [name.removesuffix(".json") for name in PAPERS["neustream"]]


def _play(file: str, cell: str, policy: str, seed: int) -> Values:
    trace = ModuleTrace.read(DATA / f"{file}.json")
    found = next(each for each in trace.cells() if each.name == cell)
    return {GOODPUT: serve(trace, found, policy).goodput}


def bars(played: Sequence[Played]) -> Iterator[Bar]:
    """Totals of a file whose cells were all played."""
    for file in _files():
        mine = [each for each in played if each.contest.name.startswith(f"{file} ")]
        if not mine or OURS not in mine[0].results:
            continue
        totals = {policy: sum(each.results[policy][0][GOODPUT] for each in mine) for policy in mine[0].results}
        for policy, total in totals.items():
            yield Bar(
                f"{file}: requests in time of all cells, {policy}", total, LEAST[file] if policy == OURS else None
            )
