"""Plots of simulated runs, as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt  # the backend is chosen first

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.simulation.__main__ import Run

_COLOURS = {
    "round-robin": "#9aa0a6",
    "least-requests": "#5b8db8",
    "least-tokens": "#5aa469",
    "batch-cost": "#d9a441",
    "mask-aware": "#c0392b",
}


def write_plots(runs: Sequence[Run], folder: Path) -> None:
    """One file for each of P95 and mean: bars by scenario and policy, with the range over seeds."""
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "stencil", "axes.spines.top": False})
    scenarios = list(dict.fromkeys(run.scenario for run in runs))
    figure, axes = plt.subplots(2, 1, figsize=(1.0 + 1.25 * len(scenarios), 5.5), sharex=True, layout="constrained")
    for ax, field, label in zip(axes, ("p95", "mean"), ("P95", "mean"), strict=True):
        _bars(ax, runs, scenarios, field)
        ax.set_ylabel(f"{label} latency, s")
    axes[0].legend(ncols=len(_COLOURS), frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    axes[1].set_xticks(range(len(scenarios)), scenarios)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "routing_latency.svg", metadata={"Date": None})
    plt.close(figure)


def _bars(ax: Axes, runs: Iterable[Run], scenarios: Sequence[str], field: str) -> None:
    width = 0.8 / len(_COLOURS)
    for place, (policy, colour) in enumerate(_COLOURS.items()):
        for index, scenario in enumerate(scenarios):
            of_both = [run for run in runs if (run.scenario, run.policy) == (scenario, policy)]
            values = [getattr(run, field) for run in of_both]
            if values:
                mean, x = statistics.mean(values), index + (place - 2) * width
                around = [[mean - min(values)], [max(values) - mean]]
                label = policy if index == 0 else None
                ax.bar(x, mean, 0.9 * width, yerr=around, color=colour, label=label, error_kw={"lw": 0.8})
