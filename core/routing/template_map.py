"""TemplateMap: the number of keyframes of each template that each engine has in memory or is about to compute."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from core.costs.load_report import ResidentPages

Counts = npt.NDArray[np.float64]
"""Whole numbers, as floats because they are multiplied with seconds."""

FIRST_KEYFRAMES = 2
"""Keyframes that an edit needs before its first step; the others are loaded or primed beside its steps."""

MAX_EXPECTED = 64
"""Most templates per engine that are expected to be primed. One that never is, because its edit was given up, is
dropped after this many later ones, or when the engine is idle.
"""


class TemplatePages:
    """A template's keyframes on each engine, for an edit that reads `needed` of them. Arrays of shape [engines]:

    loads_first: keyframes to load before the edit can begin. is_missing: 1.0 where some have to be primed. is_new: 1.0
    where no earlier request is known to prime them. prime_first, prime_later: keyframes that this edit would then cause
    to be primed, before it begins and beside its steps.
    """

    def __init__(self, rows: Counts) -> None:
        """rows: shape [8, engines]; zeros for a template that is nowhere, and of which nothing is read."""
        self.needed = 0
        self._rows = rows
        self._reported = rows[:3]  # ready, on a slower tier, expected
        self.loads_first, self.is_missing, self.is_new, self.prime_first, self.prime_later = rows[3:]

    def need(self, needed: int) -> None:
        """Set how many keyframes edits read: the same for all of a model, or by step count if it has no keyframes."""
        if needed != self.needed:
            self.needed = needed
            for engine, reported in enumerate(self._reported.T.tolist()):
                self._set(engine, *reported)

    def report(self, engine: int, ready: int, below: int) -> bool:
        """Set what an engine has reported; whether no more keyframes are expected from it."""
        was_ready, was_below, expected = self._reported[:, engine].tolist()
        if ready + below >= expected or ready + below < was_ready + was_below:
            expected = 0.0
        self._set(engine, ready, below, expected)
        return not expected

    def expect(self, engine: int, number: int) -> None:
        """Note that this many keyframes will soon be there."""
        ready, below, _ = self._reported[:, engine].tolist()
        self._set(engine, ready, below, number)

    def forget(self, engine: int) -> None:
        self._set(engine, 0, 0, 0)

    def copy(self) -> TemplatePages:
        """A copy of this one, for another template."""
        other = TemplatePages(self._rows.copy())
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
    """TemplatePages by template. Templates that no engine has or expects are not kept."""

    def __init__(self, num_engines: int) -> None:
        self._pages: dict[str, TemplatePages] = {}  # template key -> where its pages are
        self._expected: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(num_engines)]  # oldest first
        self._nothing = TemplatePages(np.zeros((8, num_engines)))

    def __len__(self) -> int:
        return len(self._pages)

    def pages(self, template: str, needed: int) -> TemplatePages:
        """The pages for an edit that reads `needed` keyframes; valid until the next call."""
        pages = self._pages.get(template, self._nothing)
        pages.need(needed)
        return pages

    def observe(self, engine: int, resident: ResidentPages) -> None:
        """Process what an engine reports about one template."""
        pages = self._get(resident.template)
        if pages.report(engine, resident.num_ready, resident.num_below):
            self._expected[engine].pop(resident.template, None)
        if not (resident.num_ready or resident.num_below):
            self._prune(resident.template)

    def expect(self, engine: int, template: str, num_keyframes: int) -> None:
        """Note that a request just sent to the engine causes this many keyframes to be primed."""
        pages = self._get(template)
        pages.need(num_keyframes)
        pages.expect(engine, num_keyframes)
        expected = self._expected[engine]
        expected[template] = None
        expected.move_to_end(template)
        if len(expected) > MAX_EXPECTED:
            self._give_up(engine, next(iter(expected)))

    def clear_expected(self, engine: int) -> None:
        """Drop the keyframes expected from an idle engine: they will not be primed any more."""
        for template in list(self._expected[engine]):
            self._give_up(engine, template)

    def forget(self, engine: int) -> None:
        """Drop a dead engine's pages."""
        self._expected[engine].clear()
        for template, pages in list(self._pages.items()):
            pages.forget(engine)
            self._prune(template)

    def _get(self, template: str) -> TemplatePages:
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
