"""ControlPicture: a picture that steers the steps of an offline edit."""

from __future__ import annotations

from dataclasses import dataclass

from core.control import Control
from core.validation import conformed
from entrypoints.pictures import ImageLike


@dataclass(frozen=True, slots=True)
class ControlPicture:
    """What a ControlNet sees, such as edges or depths; it is not made here of a photo. Raises InvalidRequestError for
    values of the wrong type or out of range; what the model has is checked when the edit runs.
    """

    picture: ImageLike  # of the proportions of the picture to edit, or of the one to make
    type: str = ""  # a control type of the model, see `ModelInfo.controls`; "": the only one that it has
    scale: float | None = None  # 0..10, how strongly it steers; None: the model's default
    # The shares of the steps between which it steers, 0..1.
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        conformed("picture", self.picture, ImageLike)
        _ = self.control

    @property
    def control(self) -> Control:
        """How it steers."""
        return Control(type=self.type, scale=self.scale, start=self.start, end=self.end)
