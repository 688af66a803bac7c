"""StepSchedule: which denoising steps of a run are computed.

The sampler goes from each computed step to the next in one larger step: a schedule is a choice of noise levels.

The steps that lay out a picture come first and change much; later ones change little, and most can be left out. Which
ones is measured per checkpoint by `python -m entrypoints.calibrate`.

A mask-aware edit reads the tokens that it does not compute from its template's pages. With a large mask, whose edit
changes what its surroundings look like to the model, they are not close enough: then some steps compute every token
(full steps), and the others read what the last one of these has computed: the edit's own pages.
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
    # Of these, the full steps of a mask-aware edit whose mask ratio (0..1) is at least full_steps_from: the first one
    # and any others. (): there are none, and every edit reads its template's pages.
    full_steps: tuple[int, ...] = ()
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
        full = self.full_steps
        if full and (full[0] != 0 or tuple(sorted({*full})) != full or not {*full} <= {*self.computed}):
            raise ValueError(f"full steps must rise from 0 and be computed ones, and not be {full}")

    def steps_of(self, num_inference_steps: int) -> tuple[int, ...]:
        """Numbers of the computed steps of a run with any number of steps.

        No step of the sampler is larger, as a share of the run, than the schedule's own there: runs with fewer steps
        leave out fewer of them, if any.
        """
        chosen = [0]
        while (following := self._next(chosen[-1], num_inference_steps)) < num_inference_steps:
            chosen.append(following)
        return tuple(chosen)

    def full_steps_at(self, mask_ratio: float, num_computed: int) -> tuple[int, ...]:
        """Which of `num_computed` computed steps, numbered from 0, are full: those as far into them as was measured,
        rounded up. Of few steps not all are full, unless the schedule's are: others are to read their pages.
        mask_ratio: 0..1.
        """
        if mask_ratio < self.full_steps_from:
            return ()
        last = num_computed if len(self.full_steps) == len(self.computed) else num_computed - 1
        places = (self.computed.index(step) for step in self.full_steps)
        found = dict.fromkeys(-(-place * num_computed // len(self.computed)) for place in places)
        return tuple(place for place in found if place < num_computed)[:last]

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
