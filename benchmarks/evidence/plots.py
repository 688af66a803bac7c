"""Plots of a sweep's results, as SVG; each is drawn if there are results for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt  # the backend is chosen first

from benchmarks.baselines.systems import SYSTEMS
from benchmarks.evidence.results import Result, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY, RED, BLUE, YELLOW = "#9aa0a6", "#c0392b", "#5b8db8", "#d9a441"
COLOURS = dict(zip(SYSTEMS, (GREY, "#5f6368", YELLOW, "#8e6bbf", BLUE, RED), strict=True))


def write_plots(results: Results, folder: Path) -> None:
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "stencil", "axes.spines.top": False})
    for name, draw in _PLOTS.items():
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        if draw(results, axes):
            figure.savefig(folder / f"benchmarks_{name}.svg", metadata={"Date": None})
        plt.close(figure)


def _rates(results: Results, axes: Any) -> bool:
    """Figure 12: mean latency and queue time against the offered rate."""
    by_system = defaultdict[str, list[Result]](list)
    for prefix in ("rate-", "headline-0-", "keep-up-"):
        for result in results.all(f"serving/{prefix}"):
            by_system[result["system"]].append(result)
    for name, found in by_system.items():
        found.sort(key=lambda result: result["request_rate"])
        for ax, figure in zip(axes, ("latency_mean_ms", "queue_mean_ms"), strict=True):
            measured = [result for result in found if result.get(figure) is not None]
            times = [result[figure] / 1e3 for result in measured]
            if measured:
                _line(ax, [run["request_rate"] for run in measured], times, COLOURS[name], SYSTEMS[name].label)
    for ax, label in zip(axes, ("mean latency, s", "mean queue time, s"), strict=True):
        _decorate(ax, "offered edits/s", label)
        ax.set_yscale("log")
    if by_system:
        axes[0].legend(frameon=False, fontsize=7)
    return bool(by_system)


def _mask_ratios(results: Results, axes: Any) -> bool:
    """Figure 15: a denoising step and a whole edit by mask ratio, with what the operations allow."""
    step, edit = results.find("mask-ratio/step"), results.find("mask-ratio/edit")
    if step is None or edit is None:
        return False
    for line, colour in zip(step["lines"], (RED, BLUE), strict=True):
        _step_times(axes[0], line, colour)
    _edit_times(axes[1], sorted(edit["lines"], key=lambda line: line["mask_ratio"]))
    _decorate(axes[0], "mask ratio", "a step, of the exact step's time")
    _decorate(axes[1], "mask ratio", "an edit, ms")
    for ax in axes:
        ax.legend(frameon=False, fontsize=7)
    return True


def _step_times(ax: Axes, line: Result, colour: str) -> None:
    times = {float(name[5:-3]): value / line["exact_ms"] for name, value in line.items() if name.startswith("step_")}
    ratios = sorted(times)
    _line(ax, ratios, [times[ratio] for ratio in ratios], colour, line["shape"])
    ax.plot(ratios, [1 / line[f"bound_{ratio}"] for ratio in ratios], "--", lw=1, color=colour, label="by operations")


def _edit_times(ax: Axes, lines: list[Result]) -> None:
    ratios = [line["mask_ratio"] for line in lines]
    for kind, colour in {"exact": GREY, "warm": RED, "cold": BLUE}.items():
        _line(ax, ratios, [1e3 * line[f"{kind}_s"] for line in lines], colour, kind)
    bound = [1e3 * (line["exact_s"] - line["exact_denoise_s"] * (1 - line["mask_ratio"])) for line in lines]
    ax.plot(ratios, bound, "--", lw=1, color=RED, label="denoising in proportion")


def _line(ax: Axes, x: Iterable[float], y: Iterable[float], colour: str, label: str) -> None:
    ax.plot([*x], [*y], "o-", ms=3, color=colour, label=label)


def _decorate(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(alpha=0.2)


_PLOTS: dict[str, Callable[[Results, Any], bool]] = {
    "rates": _rates,
    "mask_ratios": _mask_ratios,
}
