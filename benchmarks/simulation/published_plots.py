"""Plots of goodput on a published trace: by rate, burstiness and objective, and of batch sizes over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.simulation.compared import OURS
from benchmarks.simulation.module_engine import serve
from benchmarks.simulation.module_trace import Cell, ModuleTrace
from benchmarks.simulation.published import Result, middle

AXES: tuple[tuple[str, str, Callable[[Cell], float]], ...] = (
    ("rate", "requests per second", lambda cell: cell.rate),
    ("cv", "coefficient of variation of arrivals", lambda cell: cell.cv),
    ("slo", "objective, multiple of the time alone", lambda cell: cell.slo),
)
"""(name, label, value of a cell)."""

SHOWN = {
    OURS: "o-",
    "former goodput": "x-",
    "neustream": "s-",
    "former step_batching": "^-",
    "clockwork_ideal": "v-",
    "clockwork": "d-",
}
"""Policy -> how its line is drawn."""

WINDOW = 20.0
"""Seconds over which a batch size is the mean."""


def write_plots(folder: Path, trace: ModuleTrace, results: Sequence[Result]) -> None:
    """Write `goodput_<model>.svg` and `batches_<model>.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    save(_goodput(trace, results), folder / f"goodput_{trace.model}.svg")
    save(_batches(trace, middle(results)), folder / f"batches_{trace.model}.svg")


def _goodput(trace: ModuleTrace, results: Sequence[Result]) -> Figure:
    figure, centre = Figure(figsize=(11.0, 3.6), layout="constrained"), middle(results)
    for axes, (name, label, value) in zip(figure.subplots(1, 3, sharey=True), AXES, strict=True):
        others = [of for other, _, of in AXES if other != name]
        line = sorted(
            (result for result in results if all(of(result.cell) == of(centre) for of in others)),
            key=lambda result, value=value: value(result.cell),  # type: ignore[misc]
        )
        _draw(axes, trace, line, value)
        axes.set(xlabel=label, ylim=(0, 1.03))
    figure.axes[0].set(ylabel="requests in time")
    figure.axes[0].legend(fontsize="x-small")
    figure.suptitle(f"{trace.model}: simulated (lines) and measured (crosses)", fontsize="medium")
    return figure


def _draw(axes: Any, trace: ModuleTrace, line: Sequence[Result], value: Callable[[Cell], float]) -> None:
    at = [value(result.cell) for result in line]
    for policy, style in SHOWN.items():
        shares = [result.goodput[policy] / trace.num_requests for result in line]
        (drawn,) = axes.plot(at, shares, style, label=policy, markersize=4)
        measured = [trace.measured(result.cell, policy) for result in line]
        points = [(x, count / trace.num_requests) for x, count in zip(at, measured, strict=True) if count is not None]
        axes.plot(*zip(*points, strict=True) if points else ((), ()), "x", color=drawn.get_color())
    axes.grid(alpha=0.3)


def _batches(trace: ModuleTrace, cell: Cell) -> Figure:
    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    axes = figure.subplots()
    for policy, style in SHOWN.items():
        sizes = [(when, size) for when, module, size in serve(trace, cell, policy).batches if module == trace.loop]
        points = _windows(sizes)
        axes.plot([when for when, _ in points], [size for _, size in points], style[1:], label=policy, linewidth=1)
    axes.set(
        xlabel="seconds", ylabel=f"mean batch of {trace.loop}", title=f"{trace.model}, {cell.name}", ylim=(0, None)
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    return figure


def _windows(sizes: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    windows: dict[int, list[int]] = {}
    for when, size in sizes:
        windows.setdefault(int(when / WINDOW), []).append(size)
    return [((index + 0.5) * WINDOW, sum(of) / len(of)) for index, of in sorted(windows.items())]


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the same file for the same points."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})
