"""TemplateMap: which engine has how many of a template's keyframes, for every template that some engine has."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from core.costs.load_report import Residency

Counts = npt.NDArray[np.float64]
"""Whole numbers, as floats: they are multiplied with seconds."""

FIRST_KEYFRAMES = 2
"""An edit begins when it has the pages around its first noise levels; the others come beside its steps."""

MAX_EXPECTED = 64
"""Templates per engine that are taken to be on their way. One that never comes, since its edit was given up, is
forgotten once so many others were sent after it, or when the engine is idle.
"""


class TemplateResidency:
    """A template's keyframes on each engine as far as an edit is concerned that reads `needed` of them, shape [engines]
    each. loads_first: to be loaded before it can begin. is_missing: 1.0 where some have to be primed. is_new: 1.0 where
    nobody is known to prime them; prime_first, prime_later: how many then are, before it begins and beside its steps.
    """

    def __init__(self, rows: Counts) -> None:
        """rows: shape [8, engines]; zeros for a template that is nowhere, and of which nothing is read."""
        self.needed = 0
        self._rows = rows
        self._reported = rows[:3]  # ready, on a slower tier, expected
        self.loads_first, self.is_missing, self.is_new, self.prime_first, self.prime_later = rows[3:]

    def need(self, needed: int) -> None:
        """Edits read so many keyframes: the same for all of a model, or by step count where it has no keyframes."""
        if needed != self.needed:
            self.needed = needed
            for engine, reported in enumerate(self._reported.T.tolist()):
                self._set(engine, *reported)

    def report(self, engine: int, ready: int, below: int) -> bool:
        """What the engine says. Whether nothing more is expected."""
        was_ready, was_below, expected = self._reported[:, engine].tolist()
        if ready + below >= expected or ready + below < was_ready + was_below:
            expected = 0.0
        self._set(engine, ready, below, expected)
        return not expected

    def expect(self, engine: int, number: int) -> None:
        """So many are to be there before long."""
        ready, below, _ = self._reported[:, engine].tolist()
        self._set(engine, ready, below, number)

    def forget(self, engine: int) -> None:
        self._set(engine, 0, 0, 0)

    def copy(self) -> TemplateResidency:
        """Of another template that nothing is known of, like this one."""
        other = TemplateResidency(self._rows.copy())
        other.needed = self.needed
        return other

    @property
    def is_nowhere(self) -> bool:
        return not self._reported.any()

    def _set(self, engine: int, ready: float, below: float, expected: float) -> None:
        lacking = max(self.needed - ready, 0.0)
        missing = max(lacking - below, 0.0)
        unclaimed = max(min(missing, self.needed - expected), 0.0)
        first = min(unclaimed, FIRST_KEYFRAMES)
        derived = (min(below, lacking, FIRST_KEYFRAMES), missing > 0, unclaimed > 0, first, unclaimed - first)
        self._rows[:, engine] = (ready, below, expected, *derived)


class TemplateMap:
    """TemplateResidency by template. One that no engine has or expects is not kept."""

    def __init__(self, num_engines: int) -> None:
        self._pages: dict[str, TemplateResidency] = {}  # template key -> where its pages are
        self._expected: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(num_engines)]  # oldest first
        self._nothing = TemplateResidency(np.zeros((8, num_engines)))

    def __len__(self) -> int:
        return len(self._pages)

    def pages(self, template: str, needed: int) -> TemplateResidency:
        """For an edit that reads so many keyframes; valid until the next call."""
        pages = self._pages.get(template, self._nothing)
        pages.need(needed)
        return pages

    def observe(self, engine: int, residency: Residency) -> None:
        """What an engine says about one template."""
        pages = self._get(residency.template)
        if pages.report(engine, residency.num_ready, residency.num_below):
            self._expected[engine].pop(residency.template, None)
        if not (residency.num_ready or residency.num_below):
            self._prune(residency.template)

    def expect(self, engine: int, template: str, num_keyframes: int) -> None:
        """Whoever was just sent there has so many keyframes made."""
        pages = self._get(template)
        pages.need(num_keyframes)
        pages.expect(engine, num_keyframes)
        expected = self._expected[engine]
        expected[template] = None
        expected.move_to_end(template)
        if len(expected) > MAX_EXPECTED:
            self._give_up(engine, next(iter(expected)))

    def clear_expected(self, engine: int) -> None:
        """The engine is idle: what it was to make and has not made it will not make."""
        for template in list(self._expected[engine]):
            self._give_up(engine, template)

    def forget(self, engine: int) -> None:
        """The engine is gone, and its pages with it."""
        self._expected[engine].clear()
        for template, pages in list(self._pages.items()):
            pages.forget(engine)
            self._prune(template)

    def _get(self, template: str) -> TemplateResidency:
        pages = self._pages.get(template)
        if pages is None:
            pages = self._pages[template] = self._nothing.copy()
        return pages

    def _give_up(self, engine: int, template: str) -> None:
        del self._expected[engine][template]
        self._pages[template].expect(engine, 0)
        self._prune(template)

    def _prune(self, template: str) -> None:
        if self._pages[template].is_nowhere:
            del self._pages[template]
