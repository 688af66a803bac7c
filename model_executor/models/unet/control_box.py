"""control_box: the part of a picture for which a ControlNet computes what a mask-aware step of a UNet adds."""

from __future__ import annotations

from model_executor.models.base import Row
from model_executor.models.boxes import Box, around, grown, share
from model_executor.models.unet.unet_blocks import TOKEN_SIDE
from model_executor.models.unet.unet_sources import WORTH

CONTROL_GROWTH = 2
"""Tokens by which the box extends beyond that of the active tokens, on every side: one more than what the UNet's
convolutions compute, since a ControlNet that sees the box alone is wrong at its edge."""


def control_box(row: Row, num_levels: int) -> Box | None:
    """The box in tokens; None: all of the picture. Its edges lie on pixels of all maps, so that the maps of the box are
    parts of the maps of the picture. num_levels: resolutions of the UNet."""
    if row.active is None:
        return None
    box = around(row.active, row.grid[1]) if row.box is None else row.box
    unit = max(1, 2 ** (num_levels - 1) // TOKEN_SIDE)
    left, top, right, bottom = grown(box, CONTROL_GROWTH, row.grid)
    rows, columns = row.grid
    ends = min(-(-right // unit) * unit, columns), min(-(-bottom // unit) * unit, rows)
    aligned = (left // unit * unit, top // unit * unit, *ends)
    return None if share(aligned, row.grid) > WORTH else aligned
