"""Draws the contact sheet: a picture in a row, and what the segmenter finds in it for some words."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tools.train_embedded import seeds
from tools.train_embedded.captions import noun_phrase
from tools.train_embedded.examples import PERSON
from tools.train_embedded.garments import Garment
from tools.train_embedded.scenes import SIZE, Pixels, Scene, render
from tools.train_embedded.sheet import TINT
from tools.train_segmenter.pool import draw
from tools.train_segmenter.segmenter import Segmenter

SCENES = 5  # after the example picture
CELL, CAPTION, GAP = SIZE * 3 // 4, 20, 6  # pixels


def asked_of(scene: Scene) -> list[str]:
    """The words that a row shows: each garment, or one that is not there, and what every scene may have."""
    bottom = scene.bottom or Garment("trousers", "grey", "plain", 0)
    garments = [f"the {scene.top.kind}", f"her {noun_phrase(bottom, article=False)}"]
    return [*garments, "hat", "hair", "shoes", "the person", "background"]


def overlay(image: Pixels, mask: NDArray[np.bool_]) -> Pixels:
    """The picture in grey, tinted where the mask [256, 256] is true."""
    grey = np.repeat(image.mean(-1, keepdims=True), 3, -1) * 0.7 + 60
    return np.where(mask[..., None], 0.35 * grey + 0.65 * TINT, grey).astype(np.uint8)


def write_sheet(segmenter: Segmenter, path: Path) -> None:
    """Write the rows of the example picture and of the first test scenes."""
    tests = (draw(seeds.SEGMENTER_TEST + i) for i in range(SCENES))
    rows = [_row(segmenter, PERSON, render(PERSON).image), *(_row(segmenter, x.scene, x.image) for x in tests)]
    width, height = CELL + GAP, CELL + CAPTION + GAP
    sheet = Image.new("RGB", (len(rows[0]) * width + GAP, len(rows) * height + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for i, row in enumerate(rows):
        for j, (title, picture) in enumerate(row):
            x, y = GAP + j * width, GAP + i * height
            sheet.paste(Image.fromarray(picture).resize((CELL, CELL), Image.Resampling.LANCZOS), (x, y))
            pen.text((x + 2, y + CELL + 2), title, fill="black", font_size=13)
    sheet.save(path, optimize=True)


def _row(segmenter: Segmenter, scene: Scene, image: Pixels) -> list[tuple[str, Pixels]]:
    """Titles and pictures: the scene, then what is found for each text."""
    texts = asked_of(scene)
    views = [("", image)]
    for text, mask in zip(texts, segmenter.masks(image, texts), strict=True):
        views.append((text if mask.any() else f"{text}: not found", overlay(image, mask)))
    return views
