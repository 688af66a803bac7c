"""Draws training masks (a garment's silhouette grown by a few pixels, a box, or a free shape) and their captions."""

import math
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tools.train_embedded.captions import EMPTY_SCENE, caption
from tools.train_embedded.garments import Slot
from tools.train_embedded.scenes import SIZE, Box, Pixels, Render, Scene, limb

Mask = NDArray[np.bool_]  # [256, 256], true = redraw

SMALLEST, LARGEST = 0.012, 0.7  # share of the picture
AIMS: tuple[Slot, ...] = ("top", "top", "bottom", "bottom", "hat")  # hats half as often as the others


@dataclass(frozen=True)
class Mixture:
    """Shares of the kinds of training masks; the rest up to 1 are free masks."""

    silhouettes: float
    boxes: float
    whole_boxes: float


FIRST = Mixture(0.67, 0.2, 0.0)
MORE_BOXES = Mixture(0.26, 0.28, 0.36)


@dataclass(frozen=True)
class MaskedEdit:
    """One training example's mask and the caption of what lies under it."""

    mask: Mask
    caption: str


def silhouette_mask(coverage: Pixels, grow: int) -> Mask:
    """Every pixel the garment touches, grown by `grow` pixels on each side."""
    touched: Mask = coverage > 8
    return grown(touched, grow)


def grown(mask: Mask, reach: int) -> Mask:
    """The mask grown by `reach` pixels on each side, along both axes: the pixels whose window holds a set one."""
    for axis in (0, 1):
        edges = [(reach + 1, reach) if a == axis else (0, 0) for a in (0, 1)]
        before = np.pad(mask, edges).cumsum(axis, dtype=np.int16)  # set pixels up to each place
        ends = np.arange(mask.shape[axis])
        mask = before.take(ends + 2 * reach + 1, axis) > before.take(ends, axis)
    return mask


def box_mask(box: Box, margin: float = 4.0, radius: float = 0.0) -> Mask:
    x0, y0, x1, y1 = box
    image = Image.new("L", (SIZE, SIZE), 0)
    grown = (x0 - margin, y0 - margin, x1 + margin, y1 + margin)
    ImageDraw.Draw(image).rounded_rectangle(grown, radius=radius, fill=255)
    return np.asarray(image) > 127


def free_mask(rng: random.Random) -> Mask:
    """Random brush strokes, a rectangle, or an irregular blob, anywhere in the picture."""
    image = Image.new("L", (SIZE, SIZE), 0)
    draw, kind = ImageDraw.Draw(image), rng.random()
    if kind < 0.4:
        for _ in range(rng.randint(1, 3)):
            points = [(rng.uniform(0, SIZE), rng.uniform(0, SIZE))]
            for _ in range(rng.randint(2, 6)):
                points.append((points[-1][0] + rng.uniform(-70, 70), points[-1][1] + rng.uniform(-70, 70)))
            limb(draw, tuple(points), rng.uniform(14, 50), 255)
    elif kind < 0.75:
        w, h = rng.uniform(30, 220), rng.uniform(30, 220)
        x, y = rng.uniform(-10, SIZE - w + 10), rng.uniform(-10, SIZE - h + 10)
        draw.rectangle((x, y, x + w, y + h), fill=255)
    else:
        x, y, radius = rng.uniform(50, 206), rng.uniform(50, 206), rng.uniform(25, 90)
        turns = [i / 12 * math.tau for i in range(12)]
        reach = [radius * rng.uniform(0.6, 1.2) for _ in turns]
        draw.polygon([(x + math.cos(a) * r, y + math.sin(a) * r) for a, r in zip(turns, reach, strict=True)], fill=255)
    return np.asarray(image) > 127


def covered_slot(mask: Mask, render: Render) -> Slot | None:
    """The slot whose garment is covered most, by share; None if less than a quarter of any garment is covered."""
    shares = {
        slot: float((coverage[mask] > 127).sum() / max(1, (coverage > 127).sum()))
        for slot, coverage in render.silhouettes.items()
    }
    slot = max(shares, key=lambda name: shares[name])
    return slot if shares[slot] > 0.25 else None


def draw_edit(rng: random.Random, scene: Scene, render: Render, mixture: Mixture = FIRST) -> MaskedEdit:
    """A random mask, of a kind drawn from the mixture, with a caption; some silhouettes cover two garments."""
    worn = scene.garments()
    boxes_to = mixture.silhouettes + mixture.boxes
    while True:
        kind = rng.random()
        aimed: Slot = rng.choice([name for name in AIMS if name in worn])
        asked: tuple[Slot, ...] = (aimed,)
        if kind < mixture.silhouettes:
            mask = silhouette_mask(render.silhouettes[aimed], rng.choice((2, 3, 3, 4, 6)))
            others = [name for name in worn if name != aimed]
            if others and rng.random() < 0.15:
                other = rng.choice(others)
                asked = (aimed, other)
                mask = mask | silhouette_mask(render.silhouettes[other], 3)
        elif kind < boxes_to:
            mask = box_mask(render.boxes[aimed], rng.uniform(-4, 12), rng.choice((0.0, 0.0, 24.0)))
        elif kind < boxes_to + mixture.whole_boxes:
            mask = box_mask(render.whole_boxes[aimed], rng.uniform(0, 12))
        else:
            mask = free_mask(rng)
            covered = covered_slot(mask, render)
            asked = () if covered is None else (covered,)
        if SMALLEST <= mask.mean() <= LARGEST:
            break
    if not asked:
        return MaskedEdit(mask, rng.choice(EMPTY_SCENE))
    return MaskedEdit(mask, caption(tuple(worn[slot] for slot in asked), rng))
