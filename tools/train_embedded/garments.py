"""Garments: their kinds, palette, woven patterns and texture tiles."""

import random
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw

Colour = tuple[int, int, int]  # sRGB, 0..255
Slot = Literal["top", "bottom", "hat"]

PALETTE: dict[str, Colour] = {
    "red": (204, 30, 40),
    "orange": (244, 130, 28),
    "yellow": (246, 216, 56),
    "green": (40, 150, 60),
    "teal": (24, 172, 172),
    "blue": (40, 80, 210),
    "purple": (132, 50, 172),
    "pink": (246, 140, 182),
    "brown": (118, 74, 42),
    "black": (38, 38, 44),
    "white": (240, 240, 238),
    "grey": (140, 142, 146),
}
COLOURS = tuple(PALETTE)
PATTERNS = ("plain", "striped", "dotted", "checked", "pinstriped")
KINDS: dict[Slot, tuple[str, ...]] = {
    "top": ("shirt", "coat", "dress", "sweater"),
    "bottom": ("trousers", "skirt", "shorts"),
    "hat": ("hat", "cap", "beanie"),
}
PLURAL = frozenset({"trousers", "shorts"})
LIGHT_COLOURS = frozenset({"white", "yellow", "pink", "grey"})  # patterns on these are darker, on others lighter

# One repeat of a pattern is as large as an image token (16 px), so a pattern is the same in every token that it fills.
# The second tone covers at most 44 %, so that the median pixel has the garment's colour.
REPEAT = 16


@dataclass(frozen=True)
class Garment:
    """One piece of clothing. seed: determines its cut and a small deviation of its colour from the palette's."""

    kind: str
    colour: str
    pattern: str
    seed: int

    @property
    def slot(self) -> Slot:
        return next(slot for slot, kinds in KINDS.items() if self.kind in kinds)


def draw_garment(rng: random.Random, slot: Slot) -> Garment:
    """A random garment, uniform in colour and kind; plain is twice as likely as each pattern."""
    return Garment(
        rng.choice(KINDS[slot]), rng.choice(COLOURS), rng.choice((*PATTERNS, "plain")), rng.randrange(1 << 30)
    )


def scale(colour: Colour, factor: float) -> Colour:
    r, g, b = (min(255, max(0, round(value * factor))) for value in colour)
    return r, g, b


def mix(a: Colour, b: Colour, share: float) -> Colour:
    """A mixture with `share` 0..1 of b."""
    r, g, b_ = (round(x * (1 - share) + y * share) for x, y in zip(a, b, strict=True))
    return r, g, b_


def jitter(colour: Colour, rng: random.Random, amount: float) -> Colour:
    r, g, b = (min(255, max(0, round(value + rng.uniform(-amount, amount)))) for value in colour)
    return r, g, b


def ink_of(colour: str, base: Colour) -> Colour:
    """The second tone of a patterned garment: the same hue, darker for light colours and lighter for others."""
    if colour == "white":
        return 118, 122, 134
    return scale(base, 0.55) if colour in LIGHT_COLOURS else mix(base, (255, 255, 255), 0.72)


def detail_of(colour: str) -> Colour:
    """The tone of buttons, seams and collars."""
    return scale(PALETTE[colour], 0.55) if sum(PALETTE[colour]) > 200 else (110, 110, 118)


def tile(pattern: str, base: Colour, ink: Colour, unit: int) -> Image.Image:
    """One repeat of a pattern: REPEAT pixels wide and high, at `unit` samples per pixel."""
    side = REPEAT * unit
    image = Image.new("RGB", (side, side), base)
    draw = ImageDraw.Draw(image)

    def block(x0: float, y0: float, x1: float, y1: float, fill: Colour) -> None:
        draw.rectangle((x0 * unit, y0 * unit, x1 * unit - 1, y1 * unit - 1), fill=fill)

    match pattern:
        case "plain":
            pass
        case "striped":
            block(0, 5, REPEAT, 10, ink)
        case "pinstriped":
            block(3, 0, 5, REPEAT, ink)
            block(11, 0, 13, REPEAT, ink)
        case "dotted":
            for centre in (4, 12):
                x, radius = centre * unit, 3 * unit
                draw.ellipse((x - radius, x - radius, x + radius - 1, x + radius - 1), fill=ink)
        case "checked":
            half = mix(base, ink, 0.6)
            block(0, 6, REPEAT, 10, half)
            block(6, 0, 10, REPEAT, half)
            block(6, 6, 10, 10, ink)
        case _:
            raise ValueError(f"unknown pattern {pattern!r}")
    return image


def texture(garment: Garment, size: tuple[int, int], unit: int) -> Image.Image:
    """A canvas of `size` samples, `unit` samples per pixel, filled with the garment's cloth."""
    base = jitter(PALETTE[garment.colour], random.Random(garment.seed), 7)
    repeat = tile(garment.pattern, base, ink_of(garment.colour, base), unit)
    cloth = Image.new("RGB", size)
    row = Image.new("RGB", (size[0], repeat.height))
    for x in range(0, size[0], repeat.width):
        row.paste(repeat, (x, 0))
    for y in range(0, size[1], repeat.height):
        cloth.paste(row, (0, y))
    return cloth
