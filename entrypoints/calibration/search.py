"""How a calibration looks for the cheapest setting of mask-aware execution that is close enough to exact."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.page_scheme import PageDtype

KEYFRAMES: tuple[int | None, ...] = (2, 3, 5, 9, None)
DTYPES: tuple[PageDtype, ...] = ("int8", "bfloat16", "float32")
MARGINS = (0, 4, 8, 16, 32)  # px
FULL_STEPS = (0, 1, 2, 4)

_BYTES: dict[PageDtype, int] = {"int8": 1, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Setting:
    """keyframes: how many, evenly spaced; None = pages at every step. margin: px. full_steps: of the mask classes from
    `full_from` on, smallest masks first; those below have none.
    """

    keyframes: int | None
    dtype: PageDtype
    margin: int
    full_steps: int
    full_from: int = 0

    def full_steps_of(self, mask_class: int) -> int:
        return self.full_steps if mask_class >= self.full_from else 0


CHEAPEST = Setting(KEYFRAMES[0], DTYPES[0], MARGINS[0], FULL_STEPS[0])
DEAREST = Setting(KEYFRAMES[-1], DTYPES[-1], MARGINS[-1], FULL_STEPS[-1])


@dataclass(frozen=True)
class ClassTrial:
    """Edits whose masks are of like size. ssim: inside the mask's box, against exact, of those that ran mask-aware.
    ratios: of all, the mask ratio.
    """

    ssim: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def p10(self) -> float:
        """The SSIM that nine of ten reach; 1 where none ran mask-aware, since exact ones are all alike."""
        return float(np.percentile(self.ssim, 10)) if self.ssim else 1.0


@dataclass(frozen=True)
class Trial:
    """A setting that was measured, class by class, smallest masks first."""

    setting: Setting
    classes: tuple[ClassTrial, ...]

    @property
    def num_edits(self) -> int:
        """Those that ran mask-aware; the figures are theirs."""
        return sum(len(each.ssim) for each in self.classes)

    @property
    def ssim_mean(self) -> float:
        return statistics.fmean([ssim for each in self.classes for ssim in each.ssim] or [0.0])

    @property
    def ssim_p10(self) -> float:
        """Of the class where it is least."""
        return min(each.p10 for each in self.classes) if self.num_edits else 0.0

    @property
    def full_steps_from(self) -> float:
        """The mask ratio, 0..1, from which `setting.full_steps` are run: halfway between two classes."""
        first = self.setting.full_from
        if first == 0 or self.setting.full_steps == 0:
            return 0.0
        below, above = self.classes[first - 1], self.classes[first]
        return (max(below.ratios) + min(above.ratios)) / 2

    def cost(self, num_steps: int) -> float:
        """What a first edit computes, as a share of an exact one (priming counts as steps), plus what its pages take,
        as a share of float32 pages at every step.
        """
        passes = num_steps if self.setting.keyframes is None else self.setting.keyframes
        computed = passes + statistics.fmean(self._steps_computed(num_steps))
        return (computed + passes * _BYTES[self.setting.dtype] / _BYTES["float32"]) / num_steps

    def _steps_computed(self, num_steps: int) -> Iterator[float]:
        """Each edit's steps; one of the active tokens alone counts as their share."""
        for number, each in enumerate(self.classes):
            full = min(self.setting.full_steps_of(number), num_steps)
            yield from (full + (num_steps - full) * ratio for ratio in each.ratios)

    def reaches(self, target: float) -> bool:
        """Whether nine of ten edits of every class are at least so much alike."""
        return self.num_edits > 0 and self.ssim_p10 >= target

    def describe(self, num_steps: int) -> str:
        """One line for people."""
        s = self.setting
        keyframes = "per-step" if s.keyframes is None else f"{s.keyframes} keyframes"
        by_class = ", ".join(f"{each.p10:.4f}" for each in self.classes)
        return (
            f"{keyframes}, {s.dtype}, margin {s.margin} px, {describe_full_steps(s.full_steps, self.full_steps_from)}:"
            f" SSIM {self.ssim_mean:.4f}, p10 from small to large masks {by_class}, cost {self.cost(num_steps):.2f}"
        )


def describe_full_steps(full_steps: int, full_steps_from: float) -> str:
    """In a few words."""
    return f"full_steps {full_steps}" + (f" from mask ratio {full_steps_from:.2f} on" if full_steps_from else "")


Measure = Callable[[Setting], Trial]


@dataclass(frozen=True)
class Search:
    """num_steps: denoising steps of the edits. target: the SSIM that nine of ten edits of every class must reach."""

    measure: Measure
    num_steps: int
    target: float

    def run(self) -> Trial:
        """The setting to use; one below the target means that none reaches it.

        Begins with the cheapest setting. While that is not close enough, each knob is tried one notch higher, and the
        one that gains most SSIM per cost is kept; of those that reach the target, the cheapest. The dearest setting is
        looked at early: where it fails, nothing between can be expected to do better. Settings with which no edit runs
        mask-aware are passed over.
        """
        best = self.measure(CHEAPEST)
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

    def raised(self, trial: Trial) -> Iterator[Setting]:
        """The setting of a trial below the target with one knob one notch higher, for each knob that has one."""
        setting = trial.setting
        if setting.margin != MARGINS[-1]:
            yield replace(setting, margin=MARGINS[MARGINS.index(setting.margin) + 1])
        yield from self._with_more_full_steps(setting, [each.p10 < self.target for each in trial.classes])
        if setting.keyframes is not KEYFRAMES[-1]:
            yield replace(setting, keyframes=KEYFRAMES[KEYFRAMES.index(setting.keyframes) + 1])
        if setting.dtype != DTYPES[-1]:
            yield replace(setting, dtype=DTYPES[DTYPES.index(setting.dtype) + 1])

    def _with_more_full_steps(self, setting: Setting, fails: Sequence[bool]) -> Iterator[Setting]:
        """Begun at the smallest masks that fail, and given to all larger ones, for which a full step is cheaper. Then
        more of them where that was too little, and to smaller masks where those fail.
        """
        first, more = fails.index(True), self._more(setting.full_steps)
        if setting.full_steps and first < setting.full_from:
            yield replace(setting, full_from=first)
        if more and any(fails[setting.full_from :]):
            yield replace(setting, full_steps=more, full_from=setting.full_from if setting.full_steps else first)

    def _more(self, full_steps: int) -> int | None:
        """One notch; None where there is none, or no step would be left."""
        return next((number for number in FULL_STEPS if full_steps < number < self.num_steps), None)

    def _measure_dearest(self) -> Trial:
        """Of the dearest setting with which edits still run mask-aware: large margins may cover small pictures."""
        full_steps = max(number for number in FULL_STEPS if number < max(1, self.num_steps))
        for margin in reversed(MARGINS):
            trial = self.measure(replace(DEAREST, margin=margin, full_steps=full_steps))
            if trial.num_edits:
                break
        return trial

    def _choose(self, before: Trial, trials: list[Trial]) -> Trial:
        close = [trial for trial in trials if trial.reaches(self.target)]
        if close:
            return min(close, key=lambda trial: trial.cost(self.num_steps))
        return max(trials, key=lambda trial: self._gain_per_cost(before, trial))

    def _gain_per_cost(self, before: Trial, after: Trial) -> float:
        cost = after.cost(self.num_steps) - before.cost(self.num_steps)
        return (self._shortfall(before) - self._shortfall(after)) / max(cost, 1e-6)

    def _shortfall(self, trial: Trial) -> float:
        """SSIM that is missing, all classes together: a knob that helps one of two is not for nothing."""
        return sum(max(0.0, self.target - each.p10) for each in trial.classes)


def by_size(ratios: Sequence[float], least: int, most: int) -> list[list[int]]:
    """Indices of edits by the size of their masks, in classes of equal numbers: at most `most`, of `least` edits or
    more each where there are two.
    """
    order = sorted(range(len(ratios)), key=lambda index: ratios[index])
    number = max(1, min(most, len(order) // least))
    return [part.tolist() for part in np.array_split(order, number)]
