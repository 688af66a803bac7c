"""Control: how a request has one control picture steer its steps."""

from __future__ import annotations

import msgspec

from core.errors import InvalidRequestError
from core.validation import check_decimal, check_length, conform

MAX_CONTROLS = 4
"""Most control pictures of a request."""

MAX_CONTROL_SCALE = 10.0
MAX_TYPE_CHARACTERS = 512


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """How one control picture steers the steps, as a request says it. Raises InvalidRequestError for values out of
    range.
    """

    type: str = ""  # a control type of the model, see `ModelInfo.controls`; "": the only one that it has
    scale: float | None = None  # factor on what is added to the denoiser's blocks; None: the model's default
    # The part of the steps that it steers, as shares of those that are left after `strength`, 0..1.
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        conform(self)
        check_length("control_type", self.type, MAX_TYPE_CHARACTERS)
        if self.scale is not None:
            check_decimal("control_scale", self.scale, 0, MAX_CONTROL_SCALE)
        check_decimal("control_start", self.start, 0, 1)
        check_decimal("control_end", self.end, 0, 1)
        if self.start >= self.end:
            what = f"{self.start:g} is not below control_end {self.end:g}, so no step is steered"
            raise InvalidRequestError(f"Invalid 'control_start': {what}.", param="control_start")

    def steers(self, step: int, num_steps: int) -> bool:
        """Whether it steers a step, counted from 0, of so many: as diffusers' pipelines decide."""
        return not (step / num_steps < self.start or (step + 1) / num_steps > self.end)
