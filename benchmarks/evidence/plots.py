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
COLOURS = dict(zip(SYSTEMS, (GREY, "#5f6368", YELLOW, "#8e6bbf", BLUE, "#5aa469", RED), strict=True))
BACKEND_COLOURS = {"stencil": RED, "diffusers": GREY, "first-block-cache": YELLOW}


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


def _batch_sizes(results: Results, axes: Any) -> bool:
    """Figure 14: throughput by batch size, and against one at a time."""
    rates = defaultdict[str, dict[int, float]](dict)
    for result in results.all("batch-size/"):
        (line,) = result["lines"]
        rates[line["backend"]][line["batch_size"]] = line["edits_per_s"]
    for backend, by_size in rates.items():
        sizes, colour = sorted(by_size), BACKEND_COLOURS[backend]
        _line(axes[0], sizes, [by_size[size] for size in sizes], colour, backend)
        _line(axes[1], sizes, [by_size[size] / by_size[sizes[0]] for size in sizes], colour, backend)
    _decorate(axes[0], "batch size", "edits/s")
    _decorate(axes[1], "batch size", "against its smallest batch")
    if rates:
        axes[0].legend(frameon=False)
    return bool(rates)


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


def _batching(results: Results, axes: Any) -> bool:
    """Figure 16: P95 by batching, and by routing policy in simulation."""
    batching, found = results.find("batching"), list(results.all("policies/"))
    if batching is None or not found:
        return False
    (line,) = batching["lines"]
    names = ("static", "continuous", "disaggregated")
    for place, (figure, label, colour) in enumerate(
        (("p95_s", "request", RED), ("inference_p95_s", "inference", BLUE))
    ):
        x = [index + 0.4 * place for index in range(len(names))]
        axes[0].bar(x, [line[f"{name}_{figure}"] for name in names], 0.36, label=label, color=colour)
    axes[0].set_xticks([index + 0.2 for index in range(len(names))], names)
    axes[0].set_ylabel("P95, s")
    axes[0].legend(frameon=False)
    _policy_bars(axes[1], [line for result in found for line in result["lines"]])
    return True


def _policy_bars(ax: Axes, runs: list[Result]) -> None:
    scenarios = list(dict.fromkeys(run["scenario"] for run in runs))
    p95 = {(run["policy"], run["scenario"]): run["p95"] for run in runs}
    for place, policy in enumerate(dict.fromkeys(run["policy"] for run in runs)):
        heights = [p95[policy, scenario] for scenario in scenarios if (policy, scenario) in p95]
        ax.bar([index + 0.16 * place for index in range(len(heights))], heights, 0.15, label=policy)
    ax.set_xticks([index + 0.32 for index in range(len(scenarios))], scenarios)
    ax.set_ylabel("P95 of 8 simulated engines, s")
    ax.legend(frameon=False, fontsize=7)


def _cost_model(results: Results, axes: Any) -> bool:
    """Figure 11: predicted against measured times of held-out batches."""
    result = results.find("cost-model")
    if result is None:
        return False
    for ax, stage in zip(axes, ("denoise", "prime"), strict=True):
        pairs = [(1e3 * measured, 1e3 * predicted) for name, measured, predicted in result["pairs"] if name == stage]
        if pairs:
            measured, predicted = zip(*pairs, strict=True)
            ax.plot(measured, predicted, ".", ms=4, color=RED)
            ax.plot([0, max(measured)], [0, max(measured)], "-", lw=0.8, color=GREY)
        _decorate(ax, f"{stage} batch, measured ms", "predicted ms")
    return True


def _line(ax: Axes, x: Iterable[float], y: Iterable[float], colour: str, label: str) -> None:
    ax.plot([*x], [*y], "o-", ms=3, color=colour, label=label)


def _decorate(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(alpha=0.2)


_PLOTS: dict[str, Callable[[Results, Any], bool]] = {
    "rates": _rates,
    "batch_sizes": _batch_sizes,
    "mask_ratios": _mask_ratios,
    "batching": _batching,
    "cost_model": _cost_model,
}
