"""Calibration: the cache settings measured for a checkpoint, with which its edits stay close to exact ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from core.page_scheme import PageDtype
from core.skip_level import SkipLevel
from core.step_schedule import StepSchedule

CALIBRATION = "calibration.json"
"""Name of the calibration file in a checkpoint's own directory."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Written by `python -m entrypoints.calibrate`."""

    # The settings.
    keyframes: tuple[float, ...] | Literal["per-step"]  # noise levels 1..0, falling; or pages at every step
    dtype: PageDtype  # of pages
    full_steps: Annotated[int, msgspec.Meta(ge=0)]  # leading model calls to compute in full, see num_inference_steps
    full_steps_from: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # least mask ratio (0..1) with full steps
    mask_margin: int  # px
    step_schedules: tuple[StepSchedule, ...] = ()  # of runs with different numbers of steps
    skip_levels: tuple[SkipLevel, ...] = ()  # for approximate caching
    # The measurement.
    safe: bool  # whether the requested error was reached; if not, the settings are the best found
    ssim_mean: float  # inside the mask's box, against exact edits
    ssim_p10: float  # the 10th percentile, for the class of mask sizes where it is least
    num_edits: int
    # Steps of these edits. full_steps is out of all their model calls (ModelInfo.num_steps); edits with another number
    # of steps use the same share.
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1)]

    def __post_init__(self) -> None:
        """ValueError unless the keyframes fall from 1 to 0."""
        if self.keyframes == "per-step":
            return
        falling = sorted(set(self.keyframes), reverse=True) == list(self.keyframes)
        if not falling or self.keyframes[:1] != (1.0,) or self.keyframes[-1:] != (0.0,):
            raise ValueError(f"keyframes must fall from 1 to 0, not {self.keyframes}")


def calibration_file(cache_folder: Path, fingerprint: str) -> Path:
    """Path of a user's own calibration of the checkpoint with this fingerprint."""
    return cache_folder / "calibration" / f"{fingerprint}.json"
