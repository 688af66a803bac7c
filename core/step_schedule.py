"""StepSchedule: which denoising steps of a run are computed.

The sampler goes from each computed step to the next in one larger step: a schedule is a choice of noise levels.

The steps that lay out a picture come first and change much; later ones change little, and most can be left out. Which
ones is measured per checkpoint by `python -m entrypoints.calibrate`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

StepScheduleName = Literal["full", "calibrated"]
"""full: every step of a run is computed. calibrated: those of the checkpoint's calibration."""


class StepSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured for runs of one number of steps, from full noise. Raises ValueError for steps that do not rise from 0 to
    below that number.
    """

    num_inference_steps: Annotated[int, msgspec.Meta(ge=1)]
    computed: tuple[int, ...]  # numbers of the steps that are computed
    # Leading computed steps that compute every token of a mask-aware edit whose mask ratio (0..1) is at least this.
    full_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    full_steps_from: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    # The measurement: similarity inside the mask's box to edits with every step and every token.
    ssim_mean: float
    ssim_p10: float  # the 10th percentile, for the class of mask sizes where it is least

    def __post_init__(self) -> None:
        rising = tuple(sorted(set(self.computed)))
        if rising != self.computed or rising[:1] != (0,) or rising[-1] >= self.num_inference_steps:
            raise ValueError(
                f"computed steps must rise from 0 to below {self.num_inference_steps}, and not be {self.computed}"
            )

    def steps_of(self, num_inference_steps: int) -> tuple[int, ...]:
        """Numbers of the computed steps of a run with any number of steps.

        No step of the sampler is larger, as a share of the run, than the schedule's own there: runs with fewer steps
        leave out fewer of them, if any.
        """
        chosen = [0]
        while (following := self._next(chosen[-1], num_inference_steps)) < num_inference_steps:
            chosen.append(following)
        return tuple(chosen)

    def full_steps_at(self, mask_ratio: float, num_computed: int) -> int:
        """Leading steps, of `num_computed` computed ones, that compute every token: the same share as measured, rounded
        up. mask_ratio: 0..1.
        """
        if mask_ratio < self.full_steps_from:
            return 0
        return -(-self.full_steps * num_computed // len(self.computed))

    def _next(self, step: int, num_inference_steps: int) -> int:
        """The computed step after a computed one; num_inference_steps: there is none."""
        own, other = self.num_inference_steps, num_inference_steps
        bounds = (*self.computed, own)
        index = bisect_right(self.computed, step * own // other) - 1
        largest = bounds[index + 1] - bounds[index]  # in this schedule's steps
        return min(other, step + max(1, largest * other // own))


def schedule_for(schedules: Sequence[StepSchedule], num_inference_steps: int) -> StepSchedule:
    """The schedule measured for this number of steps, else the one for most, which is most exact. schedules: one or
    more.
    """
    return next(
        (schedule for schedule in schedules if schedule.num_inference_steps == num_inference_steps),
        max(schedules, key=lambda schedule: schedule.num_inference_steps),
    )
