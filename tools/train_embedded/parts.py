"""The parts of a drawn figure, and a drawing context that records which part each sample of a picture shows."""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw


class Part(IntEnum):
    ROOM = 0
    SKIN = 1
    HAIR = 2
    SHOES = 3
    BOTTOM = 4
    TOP = 5
    HAT = 6


class PartsDraw(ImageDraw.ImageDraw):
    """Draws every shape twice: on the picture, and with the number of the current part on `parts`.

    It covers the shapes that figures are made of; others would be drawn on the picture only.
    """

    def __init__(self, picture: Image.Image) -> None:
        super().__init__(picture)
        self.picture = picture
        self.parts = Image.new("L", picture.size, Part.ROOM)  # of the picture's size
        self.part = Part.ROOM  # set by the caller before each shape
        self._map = ImageDraw.Draw(self.parts)

    def paste(self, cloth: Image.Image, mask: Image.Image) -> None:
        """Paste `cloth` where `mask`, 0 or 255, is set. All have the picture's size."""
        self.picture.paste(cloth, (0, 0), mask)
        self.parts.paste(int(self.part), (0, 0, *self.parts.size), mask)

    def arc(self, xy: Any, start: float, end: float, fill: Any = None, width: int = 1) -> None:
        super().arc(xy, start, end, fill, width)
        self._map.arc(xy, start, end, self.part, width)

    def chord(self, xy: Any, start: float, end: float, fill: Any = None, outline: Any = None, width: int = 1) -> None:
        super().chord(xy, start, end, fill, outline, width)
        self._map.chord(xy, start, end, self.part)

    def ellipse(self, xy: Any, fill: Any = None, outline: Any = None, width: int = 1) -> None:
        super().ellipse(xy, fill, outline, width)
        self._map.ellipse(xy, self.part)

    def line(self, xy: Any, fill: Any = None, width: int = 0, joint: str | None = None) -> None:
        super().line(xy, fill, width, joint)
        self._map.line(xy, self.part, width, joint)

    def polygon(self, xy: Any, fill: Any = None, outline: Any = None, width: int = 1) -> None:
        super().polygon(xy, fill, outline, width)
        self._map.polygon(xy, self.part)

    def rectangle(self, xy: Any, fill: Any = None, outline: Any = None, width: int = 1) -> None:
        super().rectangle(xy, fill, outline, width)
        self._map.rectangle(xy, self.part)

    def rounded_rectangle(
        self,
        xy: Any,
        radius: float = 0,
        fill: Any = None,
        outline: Any = None,
        width: int = 1,
        *,
        corners: tuple[bool, bool, bool, bool] | None = None,
    ) -> None:
        super().rounded_rectangle(xy, radius, fill, outline, width, corners=corners)
        self._map.rounded_rectangle(xy, radius, self.part, corners=corners)


def part_of_pixels(samples: NDArray[np.uint8], unit: int) -> NDArray[np.uint8]:
    """The part that covers most of each pixel, [height, width], of the parts of samples, [unit * height, unit * width];
    of equal shares the part that is drawn later, which has the higher number.
    """
    height, width = samples.shape[0] // unit, samples.shape[1] // unit
    cells = samples.reshape(height, unit, width, unit)
    counts = np.stack([(cells == part).sum((1, 3), dtype=np.uint8) for part in reversed(Part)])
    most: NDArray[np.uint8] = (len(Part) - 1 - counts.argmax(0)).astype(np.uint8)
    return most
