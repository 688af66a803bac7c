"""Contact sheets: a row of pictures and a line of words for each edit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from tools.train_embedded.scenes import SIZE, Pixels

CAPTION, GAP, FONT_SIZE = 20, 6, 14  # pixels


def write_sheet(path: Path, rows: Sequence[tuple[Sequence[Pixels], str]], heads: Sequence[str] = ()) -> None:
    """rows: pictures of SIZE x SIZE px and their caption. heads: of the columns."""
    first = CAPTION if heads else 0
    width, height = len(rows[0][0]) * (SIZE + GAP) + GAP, first + len(rows) * (SIZE + CAPTION + GAP) + GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    for column, name in enumerate(heads):
        draw.text((GAP + column * (SIZE + GAP) + 2, 3), name, fill="black", font_size=FONT_SIZE)
    for place, (pictures, words) in enumerate(rows):
        top = first + GAP + place * (SIZE + CAPTION + GAP)
        for column, picture in enumerate(pictures):
            sheet.paste(Image.fromarray(picture), (GAP + column * (SIZE + GAP), top))
        draw.text((GAP + 2, top + SIZE + 3), words, fill="black", font_size=FONT_SIZE)
    sheet.save(path, optimize=True)
