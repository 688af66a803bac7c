"""Draws the contact sheet: each cell shows the template, mask, result and prompt of one edit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from tools.train_embedded.cases import Case
from tools.train_embedded.scenes import SIZE, Pixels

CAPTION = 22  # pixels below a row
GAP = 8
TINT = np.array([255, 0, 170], np.float32)


def masked_view(case: Case) -> Pixels:
    """The template in grey with the mask tinted."""
    grey = np.repeat(case.template.mean(-1, keepdims=True), 3, -1) * 0.7 + 60
    return np.where(case.mask[..., None], 0.25 * grey + 0.75 * TINT, grey).astype(np.uint8)


def contact_sheet(asked: Sequence[Case], edits: Sequence[Pixels], path: Path, columns: int = 2) -> None:
    cell = 3 * SIZE + 4 * GAP
    rows = (len(asked) + columns - 1) // columns
    sheet = Image.new("RGB", (columns * cell + GAP, rows * (SIZE + CAPTION + GAP) + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (case, edit) in enumerate(zip(asked, edits, strict=True)):
        x, y = GAP + i % columns * cell, GAP + i // columns * (SIZE + CAPTION + GAP)
        for j, picture in enumerate((case.template, masked_view(case), edit)):
            sheet.paste(Image.fromarray(picture), (x + j * (SIZE + GAP), y))
        draw.text((x + 2, y + SIZE + 3), f"“{case.prompt}”", fill="black", font_size=15)
    sheet.save(path, optimize=True)
