"""ImageCosts: predicts how long image work takes from its pixels, by a line per kind of job that every job refines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.costs.cost_model import FittedLine

Kind = Literal["prepare", "png", "webp", "jpeg"]
"""prepare: decoding and checking an upload; the others: encoding a result in that format."""

_FIRST_SECONDS: dict[Kind, tuple[float, float, float]] = {
    "prepare": (0.005, 0.02, 0.03),
    "png": (0.004, 0.03, 0.05),
    "webp": (0.004, 0.03, 0.12),
    "jpeg": (0.004, 0.03, 0.03),
}
"""Seconds per feature before any measurement. Low, so that no request is refused because of a guess."""

_FIRST_SIZES = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (16.0, 16.0))
"""Sizes at which these guesses count as measured. Features that are never observed keep them: a server that sees only
thumbnails does not attribute their constant cost to pixels."""


@dataclass(frozen=True, slots=True)
class ImageWork:
    """The size of one job."""

    kind: Kind
    source: float = 0.0  # prepare: megabytes of the upload, known before it is decoded; else megapixels of the upload
    output: float = 0.0  # megapixels made

    @property
    def features(self) -> tuple[float, float, float]:
        return 1.0, self.source, self.output


class ImageCosts:
    """The fitted lines of one image pool."""

    def __init__(self) -> None:
        self._lines = {kind: _first_line(kind) for kind in _FIRST_SECONDS}

    def predict(self, work: ImageWork) -> float:
        """Predicted seconds of one image processor."""
        return self._lines[work.kind].predict(work.features)

    def observe(self, work: ImageWork, seconds: float) -> None:
        """Note how long a job has taken, without its time in the queue."""
        self._lines[work.kind].observe(work.features, seconds)


def _first_line(kind: Kind) -> FittedLine:
    line = FittedLine(3)
    for source, output in _FIRST_SIZES:
        features = ImageWork(kind, source, output).features
        line.observe(features, sum(each * by for each, by in zip(features, _FIRST_SECONDS[kind], strict=True)))
    return line
