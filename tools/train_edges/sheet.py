"""Draws the contact sheet: for each edit the template with its mask, the control picture, and the results without and
with it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw

from tools.train_embedded.cases import Case
from tools.train_embedded.scenes import SIZE, Pixels
from tools.train_embedded.sheet import masked_view

CELL, CAPTION, GAP, COLUMNS = SIZE * 3 // 4, 20, 6, 2


class Shown(NamedTuple):
    """One edit of the sheet; pictures are [256, 256, 3]."""

    case: Case
    control: Pixels
    without: Pixels
    controlled: Pixels


def write_sheet(rows: Sequence[Shown], path: Path) -> None:
    width, height = 4 * (CELL + GAP) + GAP, CELL + CAPTION + GAP
    lines = (len(rows) + COLUMNS - 1) // COLUMNS
    sheet = Image.new("RGB", (COLUMNS * width + GAP, lines * height + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for i, row in enumerate(rows):
        x, y = GAP + i % COLUMNS * width, GAP + i // COLUMNS * height
        views = (masked_view(row.case), row.control, row.without, row.controlled)
        for j, picture in enumerate(views):
            small = Image.fromarray(picture).resize((CELL, CELL), Image.Resampling.LANCZOS)
            sheet.paste(small, (x + j * (CELL + GAP), y))
        pen.text((x + 2, y + CELL + 2), f"“{row.case.prompt}”: without control, with it", fill="black", font_size=13)
    sheet.save(path, optimize=True)
