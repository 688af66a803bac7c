"""Selection: what a mask is asked for, by words, points or a box, instead of being drawn."""

from __future__ import annotations

from typing import Literal

import msgspec

SelectionKind = Literal["words", "points", "box"]
"""A way to ask for a mask."""

MAX_POINTS = 64
MAX_WORDS = 1000
"""Characters of a selection's words."""


class Point(msgspec.Struct, frozen=True):
    """A place of a picture: x and y as shares of its width and height, 0..1, from the left and the top."""

    x: float
    y: float
    adds: bool = True  # whether what is there belongs to the mask; False: it does not


class Selection(msgspec.Struct, frozen=True, omit_defaults=True):
    """At least one of the three is given. What the words name and what is at the points is joined; what is at points
    that do not add is left out of it. A box alone asks for what fills it; beside words or points, nothing outside of
    it is meant.
    """

    words: str = ""  # at most MAX_WORDS characters
    points: tuple[Point, ...] = ()  # at most MAX_POINTS
    box: tuple[float, float, float, float] | None = None  # left, top, right, bottom, as shares of the sides

    @property
    def kinds(self) -> frozenset[SelectionKind]:
        """The ways in which it asks."""
        given: dict[SelectionKind, bool] = {
            "words": bool(self.words),
            "points": bool(self.points),
            "box": self.box is not None,
        }
        return frozenset(kind for kind, is_given in given.items() if is_given)
