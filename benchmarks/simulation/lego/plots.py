"""Plots: a figure for each experiment: what every system gives in every cell, whose name states the arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from benchmarks.simulation.arena.verdict import half_interval
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.lego.experiments import Record
from benchmarks.simulation.published_plots import save

MARKS = {
    OURS: "o",
    "lego": "s",
    "pooled": "x",
    "Diffusers": "v",
    "Diffusers, planned": "^",
    "Diffusers-C": "d",
    "Diffusers-S": "*",
}
"""System -> its mark; the others are points."""

ROW_INCHES = 0.3


def write_plots(folder: Path, records: Sequence[Record]) -> None:
    """Write `lego_<experiment>.svg` for each experiment."""
    folder.mkdir(parents=True, exist_ok=True)
    for experiment in dict.fromkeys(each.experiment for each in records):
        mine = [each for each in records if each.experiment == experiment]
        save(_figure(experiment, mine), folder / f"lego_{experiment}.svg")


def _figure(experiment: str, records: Sequence[Record]) -> Figure:
    """Cells from top to bottom; means over seeds, with 95 % intervals."""
    cells = list(dict.fromkeys(each.cell for each in records))
    figure = Figure(figsize=(10.0, 1.6 + ROW_INCHES * len(cells)), layout="constrained")
    axes = figure.subplots()
    for system in dict.fromkeys(each.system for each in records):
        found = [
            (row, values)
            for row, cell in enumerate(cells)
            if (values := [each.value for each in records if (each.system, each.cell) == (system, cell)])
        ]
        axes.errorbar(
            [fmean(values) for _, values in found],
            [row for row, _ in found],
            xerr=[half_interval(values) for _, values in found],
            fmt=MARKS.get(system, "."),
            label=system,
            markersize=5,
            elinewidth=0.7,
        )
    number, unit = len({each.seed for each in records}), records[0].unit
    better = "more" if records[0].is_more_better else "less"
    axes.set(xlabel=f"{unit} ({better} is better; {number} seeds, {records[0].effort})", title=experiment)
    axes.set_yticks(range(len(cells)), cells, fontsize=6)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="x-small")
    return figure
