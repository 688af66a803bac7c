"""TemplateMap: which engine has how many of a template's keyframes, for every template that some engine has."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from core.load_report import Residency

Counts = npt.NDArray[np.float64]
"""Whole numbers, as floats: they are multiplied with seconds."""

READY, BELOW, EXPECTED = range(3)

MAX_EXPECTED = 64
"""Templates per engine that are taken to be on their way. One that never comes, since its edit was given up, is
forgotten once so many others were sent after it, or when the engine is idle.
"""


class TemplateMap:
    """Counts by template, shape [3, engines]: keyframes ready, on slower tiers, and expected. A template that no engine
    has or expects has no row.
    """

    def __init__(self, num_engines: int) -> None:
        self._rows: dict[str, Counts] = {}  # template key -> counts
        self._expected: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(num_engines)]  # oldest first
        self._nothing: Counts = np.zeros((3, num_engines))

    def __len__(self) -> int:
        return len(self._rows)

    def counts(self, template: str) -> Counts:
        """Shape [3, engines]; not to be written."""
        return self._rows.get(template, self._nothing)

    def observe(self, engine: int, residency: Residency) -> None:
        """What an engine says about one template."""
        row = self._row(residency.template)
        before = row[READY, engine] + row[BELOW, engine]
        row[READY, engine], row[BELOW, engine] = residency.num_ready, residency.num_below
        total = residency.num_ready + residency.num_below
        if total >= row[EXPECTED, engine] or total < before:
            row[EXPECTED, engine] = 0
            self._expected[engine].pop(residency.template, None)
        self._prune(residency.template)

    def expect(self, engine: int, template: str, num_keyframes: int) -> None:
        """Whoever was just sent there has so many keyframes made."""
        self._row(template)[EXPECTED, engine] = num_keyframes
        expected = self._expected[engine]
        expected[template] = None
        expected.move_to_end(template)
        if len(expected) > MAX_EXPECTED:
            self._give_up(engine, next(iter(expected)))

    def settle(self, engine: int) -> None:
        """The engine is idle: what it was to make and has not made it will not make."""
        for template in list(self._expected[engine]):
            self._give_up(engine, template)

    def forget(self, engine: int) -> None:
        """The engine is gone, and its pages with it."""
        self._expected[engine].clear()
        for template, row in list(self._rows.items()):
            row[:, engine] = 0
            self._prune(template)

    def _row(self, template: str) -> Counts:
        row = self._rows.get(template)
        if row is None:
            row = self._rows[template] = np.zeros_like(self._nothing)
        return row

    def _give_up(self, engine: int, template: str) -> None:
        del self._expected[engine][template]
        self._rows[template][EXPECTED, engine] = 0
        self._prune(template)

    def _prune(self, template: str) -> None:
        if not self._rows[template].any():
            del self._rows[template]
