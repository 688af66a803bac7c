"""A figure per metric: every policy in every contest, relative to the best former one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from benchmarks.simulation.arena.contest import Metric
from benchmarks.simulation.arena.tournament import Played
from benchmarks.simulation.arena.verdict import best_of, half_interval, values
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.published_plots import save

MARKS = {OURS: "o", "former step_batching": "^", "former goodput": "x", "former elastic": "v"}
"""Policy -> its mark; the others are points."""

ROW_INCHES = 0.16

SHOWN, TICKS = (0.25, 4.0), (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0)
"""Multiples; a policy beyond them is not shown."""


def write_plots(folder: Path, every: Sequence[Played]) -> None:
    """Write `arena_<metric>.svg` for each metric."""
    folder.mkdir(parents=True, exist_ok=True)
    for metric in dict.fromkeys(metric for played in every for metric in played.contest.metrics):
        mine = [each for each in every if metric in each.contest.metrics and _former(each)]
        if mine:
            save(_figure(metric, mine), folder / f"arena_{metric.name.replace(' ', '_')}.svg")


def _former(played: Played) -> list[str]:
    return [name for name in played.contest.former if name in played.results]


def _figure(metric: Metric, every: Sequence[Played]) -> Figure:
    """Contests from top to bottom, values as multiples of the best former policy's mean, with 95 % intervals of the
    paired difference.
    """
    figure = Figure(figsize=(9.0, 1.2 + ROW_INCHES * len(every)), layout="constrained")
    axes = figure.subplots()
    names = dict.fromkeys(name for each in every for name in each.results)
    for name in names:
        rows, ratios, bars = list[int](), list[float](), list[float]()
        for row, played in enumerate(every):
            best = best_of(_former(played), metric, played.results)
            base = values(played.results, best, metric)
            if name in played.results and fmean(base):
                own = values(played.results, name, metric)
                rows.append(row)
                ratios.append(fmean(own) / fmean(base))
                bars.append(half_interval([a - b for a, b in zip(own, base, strict=True)]) / fmean(base))
        axes.errorbar(ratios, rows, xerr=bars, fmt=MARKS.get(name, "."), label=name, markersize=4, elinewidth=0.7)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set(
        xlabel=f"{metric.name}, multiple of the best former policy ({'more' if metric.is_more_better else 'less'} is "
        "better)",
        xlim=SHOWN,
        xscale="log",
    )
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(every)), [f"{each.group}: {each.contest.name}" for each in every], fontsize=5)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    return figure
