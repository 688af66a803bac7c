"""Pictures for the browser tests: made and compared with Pillow, as JSON on stdout.

compare IMAGE MASK RESULT: sizes, and how many pixels outside and inside the mask (white = edit) differ from the image.
photo PATH: a 12-megapixel JPEG that EXIF turns upright. flat PATH WIDTH HEIGHT: a PNG of one colour.
tokens: JSON cases on stdin, what engine.image_ops makes of them on stdout.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from PIL import Image, ImageOps

from engine.images.generation_size import generation_size
from engine.images.masks import active_tokens

ROTATED = 6  # EXIF orientation: to be turned by a quarter


def compare(image: str, mask: str, result: str) -> dict[str, object]:
    before = np.asarray(ImageOps.exif_transpose(Image.open(image)).convert("RGB"))
    after = np.asarray(Image.open(result).convert("RGB"))
    is_edited = np.asarray(Image.open(mask).convert("L")) >= 128
    differs = (before != after).any(axis=-1)
    return {
        "size": [after.shape[1], after.shape[0]],
        "outside": int((~is_edited).sum()),
        "outside_changed": int(differs[~is_edited].sum()),
        "inside": int(is_edited.sum()),
        "inside_changed": int(differs[is_edited].sum()),
    }


def photo(path: str) -> dict[str, object]:
    rng = np.random.default_rng(1)
    coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = ROTATED
    coarse.resize((4000, 3000), Image.Resampling.BICUBIC).save(path, quality=90, exif=exif)
    return {}


def flat(path: str, width: str, height: str) -> dict[str, object]:
    Image.new("RGB", (int(width), int(height)), (90, 140, 60)).save(path)
    return {}


def tokens() -> dict[str, object]:
    return {"answers": [_tokens(**case) for case in json.load(sys.stdin)]}


def _tokens(
    width: int, height: int, native: int, token: int, margin: int, side: int | None, boxes: list[list[int]]
) -> object:
    size = generation_size(width, height, native, token, side)
    keep = np.full((height, width), 255, np.uint8)
    for left, top, right, bottom in boxes:
        keep[top:bottom, left:right] = 0
    return {"size": size, "active": active_tokens(keep, size, token, margin).tolist()}


if __name__ == "__main__":
    commands = {"compare": compare, "photo": photo, "flat": flat, "tokens": tokens}
    print(json.dumps(commands[sys.argv[1]](*sys.argv[2:])))
