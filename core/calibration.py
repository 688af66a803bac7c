"""What a calibration found for a checkpoint: how its pages must be kept so that edits stay close to exact ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from core.page_scheme import PageDtype

CALIBRATION = "calibration.json"
"""The file's name in a checkpoint's own directory."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Written by `python -m entrypoints.calibrate`.

    keyframes: noise levels 1..0, falling, or pages at every step. full_steps: leading calls of the model, of all that
    num_inference_steps take (ModelInfo.num_steps), to compute in full where the mask ratio (0..1) is at least
    full_steps_from; of other numbers of steps the same share.
    mask_margin: px. safe: whether the error asked for was reached; where not, the rest is the best that was found.
    ssim_mean: inside the mask's box, against exact, over `num_edits` edits of `num_inference_steps` steps. ssim_p10:
    the same, of the masks among them, by size, where it is least.
    """

    keyframes: tuple[float, ...] | Literal["per-step"]
    dtype: PageDtype
    full_steps: Annotated[int, msgspec.Meta(ge=0)]
    full_steps_from: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    mask_margin: int
    safe: bool
    ssim_mean: float
    ssim_p10: float
    num_edits: int
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1)]

    def __post_init__(self) -> None:
        """ValueError for keyframes that no noise level lies between."""
        if self.keyframes == "per-step":
            return
        falling = sorted(set(self.keyframes), reverse=True) == list(self.keyframes)
        if not falling or self.keyframes[:1] != (1.0,) or self.keyframes[-1:] != (0.0,):
            raise ValueError(f"keyframes must fall from 1 to 0, not {self.keyframes}")


def calibration_file(cache_folder: Path, fingerprint: str) -> Path:
    """Where a user's own calibration of the checkpoint with this fingerprint is kept."""
    return cache_folder / "calibration" / f"{fingerprint}.json"
