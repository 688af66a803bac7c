"""What image work costs: seconds by pixels, a line per kind of job, learnt from every job that is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from core.costs.cost_model import Line, Vector

Kind = Literal["prepare", "png", "webp", "jpeg"]
"""Of the work on an upload, or on a result by its format."""

_FIRST_SECONDS: dict[Kind, tuple[float, float, float]] = {
    "prepare": (0.005, 0.02, 0.03),
    "png": (0.004, 0.03, 0.05),
    "webp": (0.004, 0.03, 0.12),
    "jpeg": (0.004, 0.03, 0.03),
}
"""What each feature costs until it was measured. Low: where nothing is known, nothing is refused for it."""

_FIRST_SIZES = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (16.0, 16.0))
"""Sizes that these are taken for as measured. What is never seen of one kind stays as it was: a server of thumbnails
does not take what they cost for the price of their pixels."""


@dataclass(frozen=True, slots=True)
class ImageWork:
    """One job's size. source: of an upload megabytes, which are known before it is decoded; of a result megapixels of
    its upload. output: megapixels that are made.
    """

    kind: Kind
    source: float = 0.0
    output: float = 0.0

    @property
    def features(self) -> Vector:
        """Shape [3]."""
        return np.array([1.0, self.source, self.output])


class ImageCosts:
    """Owned by one image pool."""

    def __init__(self) -> None:
        self._lines = {kind: _first_line(kind) for kind in _FIRST_SECONDS}

    def predict(self, work: ImageWork) -> float:
        """Seconds of one processor."""
        return self._lines[work.kind].predict(work.features)

    def observe(self, work: ImageWork, seconds: float) -> None:
        """A job has taken so long, without its wait."""
        self._lines[work.kind].observe(work.features, seconds)


def _first_line(kind: Kind) -> Line:
    line = Line(3)
    for source, output in _FIRST_SIZES:
        features = ImageWork(kind, source, output).features
        line.observe(features, float(features @ _FIRST_SECONDS[kind]))
    return line
