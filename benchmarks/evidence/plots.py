"""Plots of a sweep's results, as SVG. Each takes what there is, and returns whether it could draw anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt  # the backend is chosen first

from benchmarks.baselines.systems import SYSTEMS
from benchmarks.evidence.results import Result, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(SYSTEMS, ("#9aa0a6", "#5f6368", "#d9a441", "#8e6bbf", "#5b8db8", "#5aa469", "#c0392b"), strict=True))
BACKEND_COLOURS = {"stencil": "#c0392b", "diffusers": "#9aa0a6", "first-block-cache": "#d9a441"}


def write_plots(results: Results, folder: Path) -> dict[str, str]:
    """Draws all; names of plots and of their files."""
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "stencil", "axes.spines.top": False})
    written = {}
    for name, draw in _PLOTS.items():
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        if draw(results, axes):
            figure.savefig(folder / f"benchmarks_{name}.svg", metadata={"Date": None})
            written[name] = f"benchmarks_{name}.svg"
        plt.close(figure)
    return written


def _rates(results: Results, axes: Any) -> bool:
    """Figure 12: mean latency and queue time against the offered rate."""
    by_system = defaultdict[str, list[Result]](list)
    for result in [
        *results.all("serving/rate-"),
        *results.all("serving/headline-0-"),
        *results.all("serving/keep-up-"),
    ]:
        by_system[result["system"]].append(result)
    for name, found in by_system.items():
        found.sort(key=lambda result: result["request_rate"])
        for ax, figure in zip(axes, ("latency_mean_ms", "queue_mean_ms"), strict=True):
            points = [(result["request_rate"], result.get(figure)) for result in found]
            points = [(rate, value / 1e3) for rate, value in points if value is not None]
            if points:
                ax.plot(*zip(*points, strict=True), "o-", ms=3, color=COLOURS[name], label=SYSTEMS[name].label)
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
        sizes = sorted(by_size)
        style = {"color": BACKEND_COLOURS[backend], "label": backend, "ms": 3}
        axes[0].plot(sizes, [by_size[size] for size in sizes], "o-", **style)
        axes[1].plot(sizes, [by_size[size] / by_size[sizes[0]] for size in sizes], "o-", **style)
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
    for line, colour in zip(step["lines"], ("#c0392b", "#5b8db8"), strict=True):
        points = [(float(name[5:-3]), value) for name, value in line.items() if name.startswith("step_")]
        ratios, times = zip(*sorted(points), strict=True)
        exact = line["exact_ms"]
        axes[0].plot(ratios, [time / exact for time in times], "o-", ms=3, color=colour, label=line["shape"])
        bounds = [1 / line[f"bound_{ratio}"] for ratio in ratios]
        axes[0].plot(ratios, bounds, "--", lw=1, color=colour, label="by operations")
    lines = sorted(edit["lines"], key=lambda line: line["mask_ratio"])
    shares = [line["mask_ratio"] for line in lines]
    for kind, colour in {"exact": "#9aa0a6", "warm": "#c0392b", "cold": "#5b8db8"}.items():
        axes[1].plot(shares, [1e3 * line[f"{kind}_s"] for line in lines], "o-", ms=3, color=colour, label=kind)
    rest = [line["exact_s"] - line["exact_denoise_s"] for line in lines]
    bound = [1e3 * (r + line["exact_denoise_s"] * line["mask_ratio"]) for r, line in zip(rest, lines, strict=True)]
    axes[1].plot(shares, bound, "--", lw=1, color="#c0392b", label="denoising in proportion")
    _decorate(axes[0], "mask ratio", "a step, of the exact step's time")
    _decorate(axes[1], "mask ratio", "an edit, ms")
    for ax in axes:
        ax.legend(frameon=False, fontsize=7)
    return True


def _batching(results: Results, axes: Any) -> bool:
    """Figure 16: P95 by batching, and by routing policy in simulation."""
    batching, found = results.find("batching"), list(results.all("policies/"))
    if batching is None or not found:
        return False
    (line,) = batching["lines"]
    names = ("static", "continuous", "disaggregated")
    for place, figure in enumerate(("p95_s", "inference_p95_s")):
        label = "request" if not place else "inference"
        x = [index + 0.4 * place for index in range(len(names))]
        axes[0].bar(
            x, [line[f"{name}_{figure}"] for name in names], 0.36, label=label, color=("#c0392b", "#5b8db8")[place]
        )
    axes[0].set_xticks([index + 0.2 for index in range(len(names))], names)
    axes[0].set_ylabel("P95, s")
    axes[0].legend(frameon=False)
    runs = [line for result in found for line in result["lines"]]
    _policy_bars(axes[1], runs)
    return True


def _policy_bars(ax: Axes, runs: list[Result]) -> None:
    scenarios = list(dict.fromkeys(run["scenario"] for run in runs))
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    for place, policy in enumerate(policies):
        p95 = [
            run["p95"]
            for scenario in scenarios
            for run in runs
            if (run["scenario"], run["policy"]) == (scenario, policy)
        ]
        ax.bar([index + 0.16 * place for index in range(len(p95))], p95, 0.15, label=policy)
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
            ax.plot(measured, predicted, ".", ms=4, color="#c0392b")
            ax.plot([0, max(measured)], [0, max(measured)], "-", lw=0.8, color="#9aa0a6")
        _decorate(ax, f"{stage} batch, measured ms", "predicted ms")
    return True


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
