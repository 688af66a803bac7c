"""Searches for the cheapest setting of mask-aware execution whose pictures are close enough to exact execution's, and
for the fewest steps with which they still are.

The decision only: measuring a setting is a function that the caller passes in.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.page_scheme import PageDtype

KEYFRAMES: tuple[int | None, ...] = (2, 3, 5, 9, None)
DTYPES: tuple[PageDtype, ...] = ("int8", "bfloat16", "float32")
MARGINS = (0, 4, 8, 16, 32)  # px
FULL_STEPS = (0, 1, 2, 4)
FULL_PLACES: tuple[tuple[float, ...], ...] = ((), (0,), (0, 1 / 3), (0, 1 / 9, 4 / 9), (0, 1 / 9, 1 / 3, 2 / 3))
"""Where among the steps that a schedule computes its full ones are, by their number. On the embedded model (9 of 28
steps, boxes) the second one at a third gave a mean SSIM of 0.985, right after the first one 0.982.
"""

GROWTHS = (0.6, 0.5, 0.42, 0.36, 0.31, 0.265, 0.225, 0.19, 0.16, 0.13, 0.1)
"""How fast the steps of a schedule grow, see `schedules`; the first is the sparsest."""

_BYTES: dict[PageDtype, int] = {"int8": 1, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Setting:
    """Settings of mask-aware execution. Mask classes are groups of edits by mask size, numbered from the smallest."""

    keyframes: int | None  # number of evenly spaced noise levels with pages; None: pages at every step
    dtype: PageDtype
    margin: int  # px
    full_steps: int  # for mask classes >= full_from; the others have none. Of all steps the leading ones are full, of
    # computed ones those of FULL_PLACES, whose own pages the others read.
    full_from: int = 0
    computed: tuple[int, ...] | None = None  # numbers of the steps that are computed; None: all

    def full_steps_of(self, mask_class: int) -> int:
        return self.full_steps if mask_class >= self.full_from else 0

    def own_page_steps_of(self, mask_class: int) -> tuple[int, ...]:
        """Full steps by number among the computed ones, if the others read their pages."""
        if self.computed is None:
            return ()
        number, places = len(self.computed), FULL_PLACES[self.full_steps_of(mask_class)]
        found = dict.fromkeys(math.ceil(place * number - 1e-9) for place in places)  # 1e-9: of rounding
        return tuple(place for place in found if place < number)

    def num_computed(self, num_steps: int) -> int:
        """Computed steps of an edit with `num_steps` steps."""
        return num_steps if self.computed is None else len(self.computed)


CHEAPEST = Setting(KEYFRAMES[0], DTYPES[0], MARGINS[0], FULL_STEPS[0])
DEAREST = Setting(KEYFRAMES[-1], DTYPES[-1], MARGINS[-1], FULL_STEPS[-1])


@dataclass(frozen=True)
class ClassTrial:
    """Results of the edits in one mask class."""

    ssim: tuple[float, ...]  # to exact execution, in the mask's box; only of edits that ran mask-aware
    ratios: tuple[float, ...]  # mask ratio, 0..1, of every edit

    @property
    def p10(self) -> float:
        """The SSIM that nine of ten edits reach; 1 if none ran mask-aware, since exact edits equal themselves."""
        return float(np.percentile(self.ssim, 10)) if self.ssim else 1.0


@dataclass(frozen=True)
class Trial:
    """The measured results of a setting, one per mask class, smallest masks first."""

    setting: Setting
    classes: tuple[ClassTrial, ...]

    @property
    def num_edits(self) -> int:
        """Number of edits that ran mask-aware; the SSIM figures describe only these."""
        return sum(len(each.ssim) for each in self.classes)

    @property
    def ssim_mean(self) -> float:
        return statistics.fmean([ssim for each in self.classes for ssim in each.ssim] or [0.0])

    @property
    def ssim_p10(self) -> float:
        """The lowest p10 of any mask class; 0 if no edit ran mask-aware."""
        return min(each.p10 for each in self.classes) if self.num_edits else 0.0

    @property
    def full_steps_from(self) -> float:
        """The mask ratio, 0..1, from which edits have full steps: halfway between two classes; 0: all edits."""
        first = self.setting.full_from
        if first == 0 or self.setting.full_steps == 0:
            return 0.0
        below, above = self.classes[first - 1], self.classes[first]
        return (max(below.ratios) + min(above.ratios)) / 2

    def cost(self, num_steps: int) -> float:
        """Compute of a template's first edit, priming included, relative to an exact edit, plus the size of its pages,
        relative to float32 pages at every step. num_steps: of the edits.
        """
        passes: float = (
            self.setting.num_computed(num_steps) if self.setting.keyframes is None else self.setting.keyframes
        )
        passes *= self._share_over_templates
        computed = passes + statistics.fmean(self._steps_computed(num_steps))
        return (computed + passes * _BYTES[self.setting.dtype] / _BYTES["float32"]) / num_steps

    @property
    def _share_over_templates(self) -> float:
        """The share of the edits that read their template's pages."""
        own = [bool(self.setting.own_page_steps_of(number)) for number in range(len(self.classes))]
        over = sum(len(each.ratios) for each, has_own in zip(self.classes, own, strict=True) if not has_own)
        return over / sum(len(each.ratios) for each in self.classes)

    def _steps_computed(self, num_steps: int) -> Iterator[float]:
        """Each edit's cost in full steps; a step that computes only active tokens counts as its mask ratio."""
        computed = self.setting.num_computed(num_steps)
        for number, each in enumerate(self.classes):
            full = min(self.setting.full_steps_of(number), computed)
            yield from (full + (computed - full) * ratio for ratio in each.ratios)

    def reaches(self, target: float) -> bool:
        """Whether nine of ten edits of every mask class have an SSIM of at least `target`."""
        return self.num_edits > 0 and self.ssim_p10 >= target

    def describe(self, num_steps: int) -> str:
        """The result as one line of text."""
        s = self.setting
        keyframes = "per-step" if s.keyframes is None else f"{s.keyframes} keyframes"
        steps = "" if s.computed is None else f"steps {' '.join(map(str, s.computed))}, "
        by_class = ", ".join(f"{each.p10:.4f}" for each in self.classes)
        full_steps = describe_full_steps(s.full_steps, self.full_steps_from)
        return (
            f"{steps}{keyframes}, {s.dtype}, margin {s.margin} px, {full_steps}:"
            f" SSIM {self.ssim_mean:.4f}, p10 from small to large masks {by_class}, cost {self.cost(num_steps):.2f}"
        )


def describe_full_steps(full_steps: int, full_steps_from: float) -> str:
    """The setting as a few words of text. full_steps_from: see `Trial.full_steps_from`."""
    return f"full_steps {full_steps}" + (f" from mask ratio {full_steps_from:.2f} on" if full_steps_from else "")


Measure = Callable[[Setting], Trial]


@dataclass(frozen=True)
class Search(ABC):
    """Starts at the cheapest setting and then raises one parameter by one value at a time: the cheapest change that
    reaches the target, else the one that gains most SSIM per cost. Settings under which no edit runs mask-aware are
    skipped.

    num_steps: denoising steps of each edit. target: the SSIM that nine of ten edits of every class must reach.
    """

    measure: Measure
    num_steps: int
    target: float

    def run(self) -> Trial:
        """The result of the setting to use; if it is below the target, no setting was found that reaches it.

        The most expensive setting is measured early: if it fails, those between are not expected to do better.
        """
        best = self.measure(self.cheapest)
        if not best.reaches(self.target):
            dearest = self._measure_dearest()
            if not dearest.reaches(self.target):
                return dearest
        while not best.reaches(self.target):
            trials = [trial for trial in map(self.measure, self.raised(best)) if trial.num_edits]
            if not trials:
                return best
            best = self._choose(best, trials)
        return best

    @property
    @abstractmethod
    def cheapest(self) -> Setting:
        """The setting to start at."""

    @abstractmethod
    def raised(self, trial: Trial) -> Iterator[Setting]:
        """The settings with one parameter one value higher than in `trial`, which must be below the target."""

    @abstractmethod
    def _measure_dearest(self) -> Trial:
        """The most expensive setting under which edits still run mask-aware."""

    def _choose(self, before: Trial, trials: list[Trial]) -> Trial:
        close = [trial for trial in trials if trial.reaches(self.target)]
        if close:
            return min(close, key=lambda trial: trial.cost(self.num_steps))
        return max(trials, key=lambda trial: self._gain_per_cost(before, trial))

    def _gain_per_cost(self, before: Trial, after: Trial) -> float:
        cost = after.cost(self.num_steps) - before.cost(self.num_steps)
        return (self._shortfall(before) - self._shortfall(after)) / max(cost, 1e-6)

    def _shortfall(self, trial: Trial) -> float:
        """Missing SSIM, summed over the classes, so that a change which helps only one of them counts too."""
        return sum(max(0.0, self.target - each.p10) for each in trial.classes)


class CacheSearch(Search):
    """Over keyframes, page dtype, margin and full steps, with every step computed."""

    @property
    def cheapest(self) -> Setting:
        return CHEAPEST

    def raised(self, trial: Trial) -> Iterator[Setting]:
        setting = trial.setting
        if setting.margin != MARGINS[-1]:
            yield replace(setting, margin=MARGINS[MARGINS.index(setting.margin) + 1])
        yield from self._with_more_full_steps(trial)
        if setting.keyframes is not KEYFRAMES[-1]:
            yield replace(setting, keyframes=KEYFRAMES[KEYFRAMES.index(setting.keyframes) + 1])
        if setting.dtype != DTYPES[-1]:
            yield replace(setting, dtype=DTYPES[DTYPES.index(setting.dtype) + 1])

    def _with_more_full_steps(self, trial: Trial) -> Iterator[Setting]:
        """Start full steps at the smallest mask class that fails, and give them to all larger ones too, for which a
        full step costs less extra. Later, give more of them, or extend them to smaller classes that fail.
        """
        setting, fails = trial.setting, [each.p10 < self.target for each in trial.classes]
        first, limit = fails.index(True), setting.num_computed(self.num_steps)
        more = next((number for number in FULL_STEPS if setting.full_steps < number < limit), None)
        if setting.full_steps and first < setting.full_from:
            yield replace(setting, full_from=first)
        if more and any(fails[setting.full_from :]):
            yield replace(setting, full_steps=more, full_from=setting.full_from if setting.full_steps else first)

    def _measure_dearest(self) -> Trial:
        """A large margin may cover all of a small picture."""
        full_steps = max(number for number in FULL_STEPS if number < max(1, self.num_steps))
        for margin in reversed(MARGINS):
            trial = self.measure(replace(DEAREST, margin=margin, full_steps=full_steps))
            if trial.num_edits:
                break
        return trial


@dataclass(frozen=True)
class StepSearch(Search):
    """Over the steps that are computed, and full ones among them; all else is as in `found`. Needs a schedule that
    leaves steps out, see `schedules`.

    The schedule is made denser until the mask classes without full steps in `found` reach the target without them.
    Where all steps of small masks are cheap, that costs less than full steps for all.
    """

    found: Setting  # of a CacheSearch

    @property
    def cheapest(self) -> Setting:
        return replace(self.found, computed=self._ladder[0], full_steps=0)

    def raised(self, trial: Trial) -> Iterator[Setting]:
        setting, found = trial.setting, self.found
        assert setting.computed is not None
        without = trial.classes[: found.full_from] if found.full_steps else trial.classes
        denser = self._ladder.index(setting.computed) + 1
        if denser < len(self._ladder):
            yield replace(setting, computed=self._ladder[denser])
        if all(each.p10 >= self.target for each in without):
            limit = setting.num_computed(self.num_steps)
            more = setting.full_steps + 1
            if more < min(limit, len(FULL_PLACES)):
                yield replace(setting, full_steps=more)

    def _measure_dearest(self) -> Trial:
        """Of all steps, as in `found`: no schedule comes closer."""
        return self.measure(self.found)

    @property
    def _ladder(self) -> list[tuple[int, ...]]:
        return schedules(self.num_steps)


def search_steps(measure: Measure, num_steps: int, target: float, found: Setting) -> Trial:
    """The cheapest result of two searches that reaches the target, else the closest one: full steps for the mask
    classes that have them in `found`, or for all, so that no template is primed. found: of a CacheSearch."""
    every = replace(found, full_steps=max(1, found.full_steps), full_from=0)
    trials = [StepSearch(measure, num_steps, target, each).run() for each in dict.fromkeys((found, every))]
    close = [trial for trial in trials if trial.reaches(target)]
    if close:
        return min(close, key=lambda trial: trial.cost(num_steps))
    return max(trials, key=lambda trial: trial.ssim_p10)


def schedules(num_steps: int) -> list[tuple[int, ...]]:
    """Numbers of the computed steps of a run, for each schedule worth measuring, sparsest first; never all steps.

    Sampling lays out the picture first, so steps are small at the start and grow with the square root of the way gone.
    On the embedded model (28 steps, boxes, exact edits) 8 steps spaced so have a mean SSIM of 0.990, 10 spaced evenly
    0.957.
    """
    found = (_growing(num_steps, growth) for growth in GROWTHS)
    return [computed for computed in dict.fromkeys(found) if len(computed) < num_steps]


def _growing(num_steps: int, growth: float) -> tuple[int, ...]:
    """Computed steps whose distances are `growth` times the square root of the way from the first one."""
    computed = [0]
    while (following := computed[-1] + max(1, round(growth * (computed[-1] * num_steps) ** 0.5))) < num_steps:
        computed.append(following)
    return tuple(computed)


def by_size(ratios: Sequence[float], least: int, most: int) -> list[list[int]]:
    """Indices of edits, grouped by mask size, smallest first: at most `most` groups of about equal length, each with at
    least `least` edits unless there is only one group. ratios: mask ratio of each edit.
    """
    order = sorted(range(len(ratios)), key=lambda index: ratios[index])
    number = max(1, min(most, len(order) // least))
    return [part.tolist() for part in np.array_split(order, number)]
