"""A plot of time against likeness: a curve for each way to make edits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

LOWEST_SSIM = 0.94
"""Points below are of no use to anyone, and would hide the others."""
SIZE = (7.0, 4.2)  # inches
MARKERS = "osD^v"


class Point(NamedTuple):
    """seconds: of an edit. ssim: mean, against edits with all steps."""

    seconds: float
    ssim: float


def write_plot(path: Path, title: str, curves: Mapping[str, Sequence[Point]]) -> None:
    """path: .svg or .png. curves: by their names in the legend, their points in the order that a line joins them."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    for marker, (name, points) in zip(MARKERS, curves.items(), strict=False):
        shown = [point for point in points if point.ssim >= LOWEST_SSIM]
        axes.plot([1e3 * at.seconds for at in shown], [at.ssim for at in shown], f"{marker}-", label=name, markersize=4)
    axes.set(title=title, xlabel="ms of an edit", ylabel="SSIM in the mask's box, mean", xlim=(0, None))
    axes.set_ylim(LOWEST_SSIM, 1.002)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):  # text as text; the same file for the same points
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
