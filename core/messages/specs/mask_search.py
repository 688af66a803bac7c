"""MaskSearch: what a request says of a mask that an engine is to find, and of what then depends on it."""

from __future__ import annotations

import msgspec

from core.selection import Selection


class MaskedRun(msgspec.Struct, frozen=True):
    """How an edit runs whose mask has at least this many active tokens, see `PictureSpec`."""

    least_active: int
    is_mask_aware: bool
    full_steps: int
    own_page_steps: tuple[int, ...] = ()


class MaskSearch(msgspec.Struct, frozen=True):
    """Set by the API server. Lengths are pixels at the size of the picture that the engine sees."""

    selection: Selection
    grow: int = 0  # by which the mask is grown on each side, a square
    margin: int = 0  # by which the computed area extends beyond it
    runs: tuple[MaskedRun, ...] = ()  # in ascending order, the first of a mask of one token; (): there are no steps

    def run(self, num_active: int) -> MaskedRun:
        """How an edit with this many active tokens, at least one, runs."""
        return next(run for run in reversed(self.runs) if run.least_active <= num_active)
