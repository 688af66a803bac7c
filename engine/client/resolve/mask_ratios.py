"""MaskRatios: how large masks usually are, for edits whose mask is not found yet."""

from __future__ import annotations

FIRST = 0.2
"""Before any mask is found: about the mean of edits in public traces (FlashPS, section 2.2)."""

WEIGHT = 0.1
"""Of the last mask in the mean."""


class MaskRatios:
    """A moving mean of active tokens / image tokens. It predicts costs alone: how an edit runs follows from its own
    mask."""

    def __init__(self) -> None:
        self.usual = FIRST

    def note(self, ratio: float) -> None:
        """Note the mask of one edit."""
        self.usual += WEIGHT * (ratio - self.usual)
