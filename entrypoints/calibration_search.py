"""How a calibration looks for the cheapest setting of mask-aware execution that is close enough to exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from core.page_scheme import PageDtype

KEYFRAMES: tuple[int | None, ...] = (2, 3, 5, 9, None)
DTYPES: tuple[PageDtype, ...] = ("int8", "bfloat16", "float32")
MARGINS = (0, 4, 8, 16, 32)  # px
FULL_STEPS = (0, 1, 2, 4)

_BYTES: dict[PageDtype, int] = {"int8": 1, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Setting:
    """keyframes: how many, evenly spaced; None = pages at every step. margin: px."""

    keyframes: int | None
    dtype: PageDtype
    margin: int
    full_steps: int


CHEAPEST = Setting(KEYFRAMES[0], DTYPES[0], MARGINS[0], FULL_STEPS[0])
DEAREST = Setting(KEYFRAMES[-1], DTYPES[-1], MARGINS[-1], FULL_STEPS[-1])


@dataclass(frozen=True)
class Trial:
    """A setting that was measured. ssim_mean, ssim_p10: inside the mask's box, against exact. active_ratio: mean share
    of tokens computed, 0..1. num_edits: those that ran mask-aware; the figures are theirs.
    """

    setting: Setting
    ssim_mean: float
    ssim_p10: float
    active_ratio: float
    num_edits: int

    def cost(self, num_steps: int) -> float:
        """What a first edit computes, as a share of an exact one (priming counts as steps), plus what its pages take,
        as a share of float32 pages at every step.
        """
        passes = num_steps if self.setting.keyframes is None else self.setting.keyframes
        full = min(self.setting.full_steps, num_steps)
        computed = passes + full + (num_steps - full) * self.active_ratio
        return (computed + passes * _BYTES[self.setting.dtype] / _BYTES["float32"]) / num_steps

    def reaches(self, target: float) -> bool:
        """Whether nine of ten edits are at least so much alike."""
        return self.num_edits > 0 and self.ssim_p10 >= target

    def describe(self, num_steps: int) -> str:
        """One line for people."""
        s = self.setting
        keyframes = "per-step" if s.keyframes is None else f"{s.keyframes} keyframes"
        return (
            f"{keyframes}, {s.dtype}, margin {s.margin} px, full_steps {s.full_steps}: SSIM {self.ssim_mean:.4f},"
            f" p10 {self.ssim_p10:.4f}, active {self.active_ratio:.2f}, cost {self.cost(num_steps):.2f}"
        )


Measure = Callable[[Setting], Trial]


@dataclass(frozen=True)
class Search:
    """num_steps: denoising steps of the edits. target: the SSIM that nine of ten edits must reach."""

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
            trials = [trial for trial in map(self.measure, raised(best.setting)) if trial.num_edits]
            if not trials:
                return best
            best = self._choose(best, trials)
        return best

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
        return (after.ssim_p10 - before.ssim_p10) / max(cost, 1e-6)


def raised(setting: Setting) -> Iterator[Setting]:
    """The setting with one knob one notch higher, for each knob that has one."""
    if setting.margin != MARGINS[-1]:
        yield replace(setting, margin=MARGINS[MARGINS.index(setting.margin) + 1])
    if setting.full_steps != FULL_STEPS[-1]:
        yield replace(setting, full_steps=FULL_STEPS[FULL_STEPS.index(setting.full_steps) + 1])
    if setting.keyframes is not KEYFRAMES[-1]:
        yield replace(setting, keyframes=KEYFRAMES[KEYFRAMES.index(setting.keyframes) + 1])
    if setting.dtype != DTYPES[-1]:
        yield replace(setting, dtype=DTYPES[DTYPES.index(setting.dtype) + 1])
