"""Draws the training pictures: procedural 256x256 scenes of a dressed figure in a room.

A scene is a pure function of its seed and garments, so that swapping a garment gives the same picture with other
clothes: the ground truth of an edit. Everything is drawn at UNIT samples per pixel and then averaged.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from tools.train_embedded.garments import Colour, Garment, Slot, detail_of, draw_garment, jitter, scale, texture
from tools.train_embedded.parts import Part, PartsDraw, part_of_pixels

SIZE = 256  # pixels
UNIT = 2  # samples per pixel, in each direction
SAMPLES = SIZE * UNIT
SKINS: tuple[Colour, ...] = (
    (255, 224, 196), (241, 194, 155), (224, 172, 125), (198, 134, 90), (141, 85, 54), (96, 60, 42),
)  # fmt: skip
HAIRS: tuple[Colour, ...] = (
    (30, 22, 20), (70, 42, 26), (120, 74, 40), (190, 140, 70), (226, 196, 130), (150, 60, 36), (150, 150, 155),
)  # fmt: skip
SHOES: tuple[Colour, ...] = ((40, 36, 40), (110, 60, 36), (230, 230, 230), (160, 30, 40))

PART_OF_SLOT: dict[Slot, Part] = {"top": Part.TOP, "bottom": Part.BOTTOM, "hat": Part.HAT}

Point = tuple[float, float]
Arm = tuple[Point, Point, Point]  # shoulder, elbow, hand
Box = tuple[float, float, float, float]  # x0, y0, x1, y1
Pixels = NDArray[np.uint8]
Painter = Callable[[ImageDraw.ImageDraw], None]

_Y, _X = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32) / SIZE


@dataclass(frozen=True)
class Scene:
    """The description of a picture."""

    seed: int  # determines the room, the pose and the light
    top: Garment
    bottom: Garment | None  # None with a dress
    hat: Garment | None
    arms: tuple[Arm, ...] | None = None  # left and right in samples, instead of the seed's

    def garment(self, slot: Slot) -> Garment | None:
        match slot:
            case "top":
                return self.top
            case "bottom":
                return self.bottom
            case "hat":
                return self.hat

    def garments(self) -> dict[Slot, Garment]:
        worn = {"top": self.top, "bottom": self.bottom, "hat": self.hat}
        return {slot: worn[slot] for slot in ("top", "bottom", "hat") if worn[slot] is not None}  # type: ignore[misc]

    def wearing(self, garment: Garment) -> "Scene":
        """The same scene with `garment` instead of the one in its slot."""
        match garment.slot:
            case "top":
                return replace(self, top=garment)
            case "bottom":
                return replace(self, bottom=garment)
            case "hat":
                return replace(self, hat=garment)


@dataclass(frozen=True)
class Render:
    """A drawn scene. Boxes are in pixels."""

    image: Pixels  # [256, 256, 3]
    silhouettes: dict[Slot, Pixels]  # coverage [256, 256], 0..255, of each worn garment
    boxes: dict[Slot, Box]  # may cut through sleeves and hems
    whole_boxes: dict[Slot, Box]  # contain any garment of the slot; the top's also both hands
    part_samples: Pixels  # [512, 512]: the Part that each sample shows

    def parts(self) -> Pixels:
        """The Part that covers most of each pixel, [256, 256]."""
        return part_of_pixels(self.part_samples, UNIT)


def draw_scene(seed: int) -> Scene:
    rng = random.Random(seed)
    top = draw_garment(rng, "top")
    bottom = None if top.kind == "dress" else draw_garment(rng, "bottom")
    hat = draw_garment(rng, "hat") if rng.random() < 0.45 else None
    return Scene(rng.randrange(1 << 30), top, bottom, hat)


@dataclass(frozen=True)
class Body:
    """The figure's geometry, in samples, and its colours."""

    height: float  # standing; all other lengths are multiples of it
    x: float  # the spine
    y: float  # the top of the head
    head: Point
    head_radius: float
    shoulder_y: float
    waist_y: float
    hip_y: float
    ankle_y: float
    shoulder: float  # half widths
    waist: float
    hip: float
    arm_width: float
    leg_width: float
    stance: float
    arms: tuple[Arm, ...]  # left then right
    legs: tuple[tuple[Point, Point, Point], ...]  # hip, knee, ankle; left then right
    skin: Colour
    hair: Colour
    hair_style: str


def draw_body(rng: random.Random, hatted: bool) -> Body:
    zoom = rng.choice((1.0, 1.0, rng.uniform(1.1, 1.6)))
    height = rng.uniform(0.84, 0.94) * SAMPLES * zoom
    x = SAMPLES * rng.uniform(0.42, 0.58)
    standing = max(SAMPLES * 0.97 - height, SAMPLES * 0.05)
    y = standing if zoom == 1.0 else rng.uniform(0.05, 0.12) * SAMPLES
    build = rng.uniform(0.85, 1.15)
    head_radius = 0.082 * height
    head = (x + rng.uniform(-0.012, 0.012) * height, y + head_radius * 1.15)
    shoulder, hip = 0.125 * height * build, 0.115 * height * build
    shoulder_y, hip_y, ankle_y = y + 0.215 * height, y + 0.52 * height, y + 0.94 * height
    thick = build * 0.5 + 0.5
    arm_width, leg_width = 0.058 * height * thick, 0.082 * height * thick
    stance = rng.uniform(0.03, 0.085) * height
    joint_x = shoulder - arm_width * 0.35
    arms = [draw_arm(rng, side, (x + side * joint_x, shoulder_y + arm_width * 0.4), height) for side in (-1, 1)]
    legs = []
    for side in (-1, 1):
        joint = (x + side * hip * 0.5, hip_y)
        ankle = (x + side * (hip * 0.45 + stance), ankle_y)
        knee = ((joint[0] + ankle[0]) / 2 + side * rng.uniform(-0.01, 0.012) * height, (joint[1] + ankle[1]) / 2)
        legs.append((joint, knee, ankle))
    styles = ("short", "long", "bob") if hatted else ("short", "long", "bob", "bun", "bald")
    return Body(
        height=height, x=x, y=y, head=head, head_radius=head_radius, shoulder_y=shoulder_y,
        waist_y=y + 0.40 * height, hip_y=hip_y, ankle_y=ankle_y, shoulder=shoulder, waist=0.092 * height * build,
        hip=hip, arm_width=arm_width, leg_width=leg_width, stance=stance, arms=tuple(arms), legs=tuple(legs),
        skin=jitter(rng.choice(SKINS), rng, 8), hair=jitter(rng.choice(HAIRS), rng, 8), hair_style=rng.choice(styles),
    )  # fmt: skip


def draw_arm(rng: random.Random, side: int, joint: Point, height: float) -> Arm:
    """An arm in a random pose. side: -1 left, 1 right."""
    upper = rng.uniform(0.12, 0.55) if rng.random() < 0.7 else rng.uniform(0.6, 1.3)
    lower = upper + rng.uniform(-0.35, 0.25)
    elbow = (joint[0] + side * math.sin(upper) * 0.155 * height, joint[1] + math.cos(upper) * 0.155 * height)
    hand = (elbow[0] + side * math.sin(lower) * 0.145 * height, elbow[1] + math.cos(lower) * 0.145 * height)
    return joint, elbow, hand


def limb(draw: ImageDraw.ImageDraw, points: tuple[Point, ...], width: float, fill: Colour | int) -> None:
    """Draw a thick line through the points with round joints."""
    for a, b in pairwise(points):
        draw.line((a, b), fill=fill, width=int(width))
    for x, y in points:
        draw.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), fill=fill)


def wall_gradient(rng: random.Random) -> tuple[Image.Image, Colour]:
    """A wall with a gradient of light, and its main colour."""
    hue = [rng.uniform(90, 245) for _ in range(3)]
    mean, saturation = sum(hue) / 3, rng.uniform(0.2, 0.7)
    near = np.array([mean + (value - mean) * saturation for value in hue], np.float32)
    far = np.clip([value * rng.uniform(0.65, 1.25) for value in near], 0, 255).astype(np.float32)
    kind = rng.random()
    if kind < 0.45:
        share = _Y
    elif kind < 0.75:
        share = np.clip(np.hypot(_X - rng.random(), _Y - rng.uniform(0, 0.7)), 0, 1)
    else:
        share = np.clip(_X * rng.uniform(-0.6, 0.6) + _Y * 0.6 + 0.2, 0, 1)
    pixels = np.clip(near * (1 - share[..., None]) + far * share[..., None], 0, 255).astype(np.uint8)
    image = Image.fromarray(pixels).resize((SAMPLES, SAMPLES), Image.Resampling.BILINEAR)
    return image, (int(near[0]), int(near[1]), int(near[2]))


def hang_furniture(draw: ImageDraw.ImageDraw, rng: random.Random, wall: Colour, floor_y: float) -> None:
    """Draw up to two pictures, mirrors or doors beside the figure."""
    side = SAMPLES
    for _ in range(rng.randint(0, 2)):
        x = rng.choice((rng.uniform(0.0, 0.12), rng.uniform(0.72, 0.85))) * side
        y, w, h = rng.uniform(0.05, 0.3) * side, rng.uniform(0.12, 0.24) * side, rng.uniform(0.15, 0.4) * side
        frame = jitter(scale(wall, rng.choice((0.5, 1.25))), rng, 20)
        kind = rng.random()
        if kind < 0.5:
            picture = (rng.randint(110, 240), rng.randint(110, 240), rng.randint(110, 240))
            draw.rectangle((x, y, x + w, y + h), fill=frame)
            draw.rectangle((x + 8, y + 8, x + w - 8, y + h - 8), fill=picture)
        elif kind < 0.8:
            draw.ellipse((x, y, x + w, y + h), fill=frame)
            draw.ellipse((x + 8, y + 8, x + w - 8, y + h - 8), fill=(205, 220, 230))
        else:
            draw.rectangle((x, y, x + w, floor_y), fill=frame)
            draw.rectangle((x + w * 0.45, y, x + w * 0.55, floor_y), fill=scale(frame, 0.8))


def draw_room(rng: random.Random) -> Image.Image:
    image, wall = wall_gradient(rng)
    draw = ImageDraw.Draw(image)
    floor_y = rng.uniform(0.74, 0.9) * SAMPLES
    if rng.random() < 0.35:
        panels = rng.randint(5, 12)
        for i in range(panels):
            x = SAMPLES * (i + 0.5) / panels
            draw.line((x, 0, x, floor_y), fill=scale(wall, 0.93), width=3)
    hang_furniture(draw, rng, wall, floor_y)
    floor = jitter(scale(wall, rng.uniform(0.5, 0.85)), rng, 15)
    draw.rectangle((0, floor_y, SAMPLES, SAMPLES), fill=floor)
    draw.rectangle((0, floor_y - 5, SAMPLES, floor_y), fill=scale(floor, 1.2))
    if rng.random() < 0.4:
        rug = (SAMPLES * 0.1, floor_y + 12, SAMPLES * 0.9, SAMPLES * 1.02)
        draw.ellipse(rug, fill=jitter(scale(floor, 1.15), rng, 20))
    return image


def draw_figure(draw: PartsDraw, body: Body, rng: random.Random) -> None:
    """Draw what garments are drawn over: shadow, back hair, legs, shoes, torso, neck and arms."""
    h = body.height
    floor = draw.picture.getpixel((int(min(SAMPLES - 1, body.x)), SAMPLES - 3))
    assert isinstance(floor, tuple)
    draw.part = Part.ROOM
    shadow_y = body.ankle_y + 0.03 * h
    shadow = (body.x - 0.22 * h, shadow_y - 0.02 * h, body.x + 0.22 * h, shadow_y + 0.025 * h)
    draw.ellipse(shadow, fill=scale((int(floor[0]), int(floor[1]), int(floor[2])), 0.75))
    draw.part = Part.HAIR
    draw_back_hair(draw, body)
    draw.part = Part.SKIN
    for leg in body.legs:
        limb(draw, leg, body.leg_width, scale(body.skin, 0.9))
    draw.part = Part.SHOES
    shoe, w = jitter(rng.choice(SHOES), rng, 10), body.leg_width
    for side, (_, _, (x, y)) in zip((-1, 1), body.legs, strict=True):
        left, right = (0.35, 0.0) if side < 0 else (0.0, 0.35)
        draw.ellipse((x - w * (0.6 + left), y - w * 0.1, x + w * (0.6 + right), y + w * 0.75), fill=shoe)
    draw.part = Part.SKIN
    draw.polygon(torso(body), fill=body.skin)
    hx, hy, r = *body.head, body.head_radius
    neck = (hx - r * 0.36, hy + r * 0.5, hx + r * 0.36, body.shoulder_y + body.arm_width * 0.2)
    draw.rectangle(neck, fill=scale(body.skin, 0.86))
    for arm in body.arms:
        limb(draw, arm, body.arm_width, body.skin)


def torso(body: Body) -> list[Point]:
    x, y, w = body.x, body.shoulder_y, body.arm_width
    return [
        (x - body.shoulder, y + w * 0.5), (x - body.shoulder * 0.55, y - w * 0.3),
        (x + body.shoulder * 0.55, y - w * 0.3), (x + body.shoulder, y + w * 0.5),
        (x + body.waist, body.waist_y), (x + body.hip, body.hip_y),
        (x - body.hip, body.hip_y), (x - body.waist, body.waist_y),
    ]  # fmt: skip


def draw_back_hair(draw: ImageDraw.ImageDraw, body: Body) -> None:
    hx, hy, r = *body.head, body.head_radius
    match body.hair_style:
        case "long":
            box = (hx - r * 1.2, hy - r * 0.6, hx + r * 1.2, hy + r * 2.6)
            draw.rounded_rectangle(box, radius=r * 0.8, fill=body.hair)
        case "bob":
            box = (hx - r * 1.25, hy - r * 0.8, hx + r * 1.25, hy + r * 1.2)
            draw.rounded_rectangle(box, radius=r * 0.6, fill=body.hair)
        case "bun":
            draw.ellipse((hx - r * 0.5, hy - r * 1.7, hx + r * 0.5, hy - r * 0.7), fill=body.hair)


def draw_head(draw: PartsDraw, body: Body, locks: bool) -> None:
    """Draw the face and the front hair."""
    hx, hy, r = *body.head, body.head_radius
    draw.part = Part.HAIR
    if body.hair_style == "long" and locks:
        for side in (-1, 1):
            cx = hx + side * r * 0.95
            draw.ellipse((cx - r * 0.28, hy - r * 0.2, cx + r * 0.28, hy + r * 2.3), fill=body.hair)
    draw.part = Part.SKIN
    draw.ellipse((hx - r * 0.86, hy - r, hx + r * 0.86, hy + r * 1.08), fill=body.skin)
    nose = ((hx, hy + r * 0.2), (hx + r * 0.06, hy + r * 0.42), (hx - r * 0.03, hy + r * 0.44))
    draw.line(nose, fill=scale(body.skin, 0.75), width=3)
    draw.arc((hx - r * 0.3, hy + r * 0.35, hx + r * 0.3, hy + r * 0.75), 20, 160, fill=(176, 60, 66), width=5)
    if body.hair_style != "bald":
        draw.part = Part.HAIR
        draw.chord((hx - r * 0.95, hy - r * 1.14, hx + r * 0.95, hy + r * 0.7), 180, 360, fill=body.hair)
        draw.part = Part.SKIN
        draw.ellipse((hx - r * 0.62, hy - r * 0.5, hx + r * 0.62, hy + r * 0.2), fill=body.skin)
    for side in (-1, 1):
        ex = hx + side * r * 0.36
        draw.ellipse((ex - r * 0.11, hy - r * 0.02, ex + r * 0.11, hy + r * 0.24), fill=(40, 30, 34))
        brow = ((hx + side * r * 0.2, hy - r * 0.16), (hx + side * r * 0.52, hy - r * 0.18))
        draw.line(brow, fill=scale(body.hair, 0.8), width=4)


def cut_top(body: Body, garment: Garment) -> tuple[Painter, Painter]:
    """Functions that draw a top's silhouette and its details."""
    rng, h, x = random.Random(garment.seed), body.height, body.x
    kind, y, r, w = garment.kind, body.shoulder_y, body.head_radius, body.arm_width
    pad = {"shirt": 1.05, "coat": 1.2, "dress": 1.04, "sweater": 1.14}[kind]
    shoulder, waist, hip = body.shoulder * pad, body.waist * pad * 1.02, body.hip * pad
    hem = {
        "shirt": body.hip_y + 0.01 * h,
        "coat": body.y + rng.uniform(0.68, 0.76) * h,
        "dress": body.y + rng.uniform(0.68, 0.82) * h,
        "sweater": body.hip_y + 0.03 * h,
    }[kind]

    def silhouette(draw: ImageDraw.ImageDraw) -> None:
        yoke = [
            (x - shoulder, y + w * 0.5), (x - body.shoulder * 0.55, y - w * 0.45), (x - r * 0.42, y - w * 0.62),
            (x + r * 0.42, y - w * 0.62), (x + body.shoulder * 0.55, y - w * 0.45), (x + shoulder, y + w * 0.5),
            (x + waist, body.waist_y), (x + hip, body.hip_y), (x - hip, body.hip_y), (x - waist, body.waist_y),
        ]  # fmt: skip
        draw.polygon(yoke, fill=255)
        start, half, flare = {
            "shirt": (body.hip_y - 3, hip, hip),
            "sweater": (body.hip_y - 3, hip, hip),
            "coat": (body.hip_y - 3, hip, body.hip * 1.5),
            "dress": (body.waist_y, body.waist * 1.05, body.hip * 1.9),
        }[kind]
        draw.polygon([(x - half, start), (x + half, start), (x + flare, hem), (x - flare, hem)], fill=255)
        for sleeve, width in sleeves(body, kind):
            limb(draw, sleeve, width, 255)
        if kind in ("shirt", "dress"):
            depth = 0.25 if kind == "shirt" else 0.6
            draw.ellipse((x - r * 0.5, y - w * 1.1, x + r * 0.5, y + w * depth), fill=0)

    def details(draw: ImageDraw.ImageDraw) -> None:
        tone = detail_of(garment.colour)
        match kind:
            case "coat":
                draw.line(((x, y), (x, hem)), fill=tone, width=5)
                for side in (-1, 1):
                    lapel = [(x, y + 0.1 * h), (x + side * r * 0.9, y + 0.01 * h), (x + side * r * 0.35, y - w * 0.6)]
                    draw.polygon(lapel, fill=tone)
                for i in range(4):
                    button_y = y + 0.13 * h + i * 0.055 * h
                    draw.ellipse((x + 8, button_y - 5, x + 18, button_y + 5), fill=tone)
            case "sweater":
                draw.rounded_rectangle((x - r * 0.5, y - w * 0.8, x + r * 0.5, y - w * 0.3), radius=6, fill=tone)
                draw.rectangle((x - hip, hem - 0.018 * h, x + hip, hem), fill=tone)
            case "dress":
                half = body.waist * 1.04
                draw.rectangle((x - half, body.waist_y - 0.012 * h, x + half, body.waist_y + 0.012 * h), fill=tone)
            case "shirt":
                for i in range(4):
                    button_y = y + 0.05 * h + i * 0.065 * h
                    draw.ellipse((x - 4, button_y - 4, x + 4, button_y + 4), fill=tone)

    return silhouette, details


def sleeves(body: Body, kind: str) -> list[tuple[tuple[Point, ...], float]]:
    """Each sleeve's points and width."""

    def along(a: Point, b: Point, share: float) -> Point:
        return a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share

    w = body.arm_width
    drawn: list[tuple[tuple[Point, ...], float]] = []
    for joint, elbow, hand in body.arms:
        match kind:
            case "shirt":
                drawn.append(((joint, along(joint, elbow, 0.72)), w * 1.3))
            case "dress":
                drawn.append(((joint, along(joint, elbow, 0.22)), w * 1.2))
            case _:
                drawn.append(((joint, elbow, along(elbow, hand, 0.86)), w * (1.34 if kind == "coat" else 1.26)))
    return drawn


def cut_bottom(body: Body, garment: Garment) -> tuple[Painter, Painter]:
    """Functions that draw the silhouette and the details of trousers, shorts or a skirt."""
    h, x, hip, waist, hip_y = body.height, body.x, body.hip, body.waist, body.hip_y
    hem = body.y + random.Random(garment.seed).uniform(0.68, 0.8) * h

    def silhouette(draw: ImageDraw.ImageDraw) -> None:
        top = body.waist_y + 0.03 * h
        band = [
            (x - waist * 1.05, top), (x + waist * 1.05, top), (x + hip * 1.06, hip_y + 2),
            (x + hip * 0.9, hip_y + 0.05 * h), (x - hip * 0.9, hip_y + 0.05 * h), (x - hip * 1.06, hip_y + 2),
        ]  # fmt: skip
        draw.polygon(band, fill=255)
        if garment.kind == "skirt":
            flare = hip * 1.5 + body.stance * 0.5
            skirt = [(x - hip * 1.05, hip_y), (x + hip * 1.05, hip_y), (x + flare, hem), (x - flare, hem)]
            draw.polygon(skirt, fill=255)
            return
        for joint, knee, ankle in body.legs:
            if garment.kind == "shorts":
                end = (joint[0] * 0.25 + knee[0] * 0.75, joint[1] * 0.25 + knee[1] * 0.75)
                limb(draw, (joint, end), body.leg_width * 1.25, 255)
            else:
                end = (ankle[0], ankle[1] - body.leg_width * 0.1)
                limb(draw, (joint, knee, end), body.leg_width * 1.18, 255)

    def details(draw: ImageDraw.ImageDraw) -> None:
        if garment.kind != "skirt":
            draw.line(((x, hip_y), (x, hip_y + 0.06 * h)), fill=detail_of(garment.colour), width=4)

    return silhouette, details


def cut_hat(body: Body, garment: Garment) -> tuple[Painter, Painter]:
    hx, hy, r = *body.head, body.head_radius

    def silhouette(draw: ImageDraw.ImageDraw) -> None:
        match garment.kind:
            case "hat":
                draw.ellipse((hx - r * 1.6, hy - r * 0.85, hx + r * 1.6, hy - r * 0.35), fill=255)
                crown = (hx - r * 0.9, hy - r * 1.75, hx + r * 0.9, hy - r * 0.5)
                draw.rounded_rectangle(crown, radius=r * 0.3, fill=255)
            case "cap":
                draw.chord((hx - r * 1.02, hy - r * 1.35, hx + r * 1.02, hy + r * 0.5), 180, 360, fill=255)
                draw.ellipse((hx - r * 0.1, hy - r * 0.62, hx + r * 1.6, hy - r * 0.28), fill=255)
            case _:
                draw.chord((hx - r * 1.05, hy - r * 1.6, hx + r * 1.05, hy + r * 0.7), 180, 360, fill=255)
                draw.ellipse((hx - r * 0.3, hy - r * 1.85, hx + r * 0.3, hy - r * 1.3), fill=255)
                brim = (hx - r * 1.1, hy - r * 0.62, hx + r * 1.1, hy - r * 0.3)
                draw.rounded_rectangle(brim, radius=8, fill=255)

    def details(draw: ImageDraw.ImageDraw) -> None:
        if garment.kind == "hat":
            band = (hx - r * 0.9, hy - r * 0.95, hx + r * 0.9, hy - r * 0.72)
            draw.rectangle(band, fill=detail_of(garment.colour))

    return silhouette, details


def wear(draw: PartsDraw, garment: Garment, painters: tuple[Painter, Painter], light: float) -> Pixels:
    """Draw a garment with soft folds; returns its coverage [256, 256], without details that stick out."""
    silhouette, details = painters
    mask = Image.new("L", (SAMPLES, SAMPLES), 0)
    silhouette(ImageDraw.Draw(mask))
    soft = mask.resize((SIZE // 2, SIZE // 2), Image.Resampling.BOX).filter(ImageFilter.GaussianBlur(5))
    lit = np.roll(np.asarray(soft, np.float32) / 255, int(6 * light) or 3, 1)
    shade = np.clip(0.70 + 0.36 * lit, 0.62, 1.04)
    shade_image = Image.fromarray((shade * 235).astype(np.uint8)).resize((SAMPLES, SAMPLES), Image.Resampling.BILINEAR)
    cloth = np.asarray(texture(garment, (SAMPLES, SAMPLES), UNIT), np.uint16)
    shaded = np.minimum(cloth * np.asarray(shade_image, np.uint16)[..., None] // 235, 255).astype(np.uint8)
    draw.part = PART_OF_SLOT[garment.slot]
    draw.paste(Image.fromarray(shaded), mask)
    details(draw)
    return np.asarray(mask.resize((SIZE, SIZE), Image.Resampling.BOX))


def slot_boxes(body: Body) -> dict[Slot, Box]:
    """A box around each slot in pixels, equal for all kinds of garments in the slot."""
    hx, hy, r = *body.head, body.head_radius
    samples: dict[Slot, Box] = {
        "top": (
            body.x - body.shoulder * 2.1,
            body.shoulder_y - body.arm_width,
            body.x + body.shoulder * 2.1,
            body.y + 0.8 * body.height,
        ),
        "bottom": (
            body.x - body.hip * 1.7,
            body.waist_y,
            body.x + body.hip * 1.7,
            body.ankle_y + body.leg_width * 0.3,
        ),
        "hat": (hx - r * 1.8, hy - r * 2.0, hx + r * 1.8, hy - r * 0.2),
    }
    return {slot: in_pixels(box) for slot, box in samples.items()}


def whole_boxes(body: Body) -> dict[Slot, Box]:
    """The slots' boxes in pixels, enlarged to contain any kind of garment in this pose, and both hands."""
    boxes, w = slot_boxes(body), body.arm_width
    hands = [hand for _, _, hand in body.arms]
    top = (
        min(x for x, _ in hands) - w, body.shoulder_y - w,
        max(x for x, _ in hands) + w, max(body.y + 0.83 * body.height, *(y + w for _, y in hands)),
    )  # fmt: skip
    legs = body.hip * 0.45 + body.stance + body.leg_width * 0.7
    half = max(legs, body.hip * 1.5 + body.stance * 0.5)
    bottom = (body.x - half, body.waist_y, body.x + half, body.ankle_y + body.leg_width * 0.7)
    return {**boxes, "top": around(boxes["top"], in_pixels(top)), "bottom": around(boxes["bottom"], in_pixels(bottom))}


def in_pixels(box: Box) -> Box:
    return box[0] / UNIT, box[1] / UNIT, box[2] / UNIT, box[3] / UNIT


def around(a: Box, b: Box) -> Box:
    """The smallest box that contains both."""
    return min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


@dataclass(frozen=True)
class Light:
    """How a scene is lit: where folds fall, and the brightness over the picture."""

    side: float  # -1..1, from which side garments are lit
    slope_x: float
    slope_y: float
    exposure: float

    def shine(self, image: Image.Image) -> Pixels:
        """The finished picture [256, 256, 3] of an image in samples."""
        pixels = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BOX), np.float32)
        gain = (1 + self.slope_x * (_X - 0.5) * 2 + self.slope_y * (_Y - 0.5) * 2) * self.exposure
        lit: Pixels = np.clip(pixels * gain[..., None], 0, 255).astype(np.uint8)
        return lit


def stage(scene: Scene) -> tuple[random.Random, Image.Image, Body, Light, bool]:
    """A scene before its figure is drawn: the random state, the room, the body, the light, and whether long hair falls
    over the shoulders.
    """
    rng = random.Random(scene.seed)
    image = draw_room(rng)
    body = draw_body(rng, hatted=scene.hat is not None)
    if scene.arms is not None:
        body = replace(body, arms=scene.arms)
    side, locks = rng.uniform(-1, 1), rng.random() < 0.6
    return (
        rng,
        image,
        body,
        Light(side, rng.uniform(-0.10, 0.10), rng.uniform(-0.08, 0.08), rng.uniform(0.95, 1.05)),
        locks,
    )


def hand_boxes(body: Body) -> list[Box]:
    """The bounding boxes, in samples, of the circles that are the hands."""
    reach = body.arm_width * 0.55
    return [(x - reach, y - reach, x + reach, y + reach) for _, _, (x, y) in body.arms]


def empty_room(scene: Scene) -> Pixels:
    """The scene without its figure, [256, 256, 3]."""
    _, image, _, light, _ = stage(scene)
    return light.shine(image)


def hands(scene: Scene) -> NDArray[np.bool_]:
    """The pixels [256, 256] of both hands, which are drawn over everything but the head and a hat."""
    _, _, body, _, _ = stage(scene)
    drawn = Image.new("L", (SAMPLES, SAMPLES), 0)
    for box in hand_boxes(body):
        ImageDraw.Draw(drawn).ellipse(box, fill=255)
    shown: NDArray[np.bool_] = np.asarray(drawn.resize((SIZE, SIZE), Image.Resampling.BOX)) > 127
    return shown


def render(scene: Scene) -> Render:
    rng, image, body, light, locks = stage(scene)
    draw = PartsDraw(image)
    draw_figure(draw, body, rng)
    silhouettes: dict[Slot, Pixels] = {}
    if scene.bottom is not None:
        silhouettes["bottom"] = wear(draw, scene.bottom, cut_bottom(body, scene.bottom), light.side)
    silhouettes["top"] = wear(draw, scene.top, cut_top(body, scene.top), light.side)
    draw.part = Part.SKIN
    for box in hand_boxes(body):
        draw.ellipse(box, fill=body.skin)
    draw_head(draw, body, locks)
    if scene.hat is not None:
        silhouettes["hat"] = wear(draw, scene.hat, cut_hat(body, scene.hat), light.side)
    parts = np.asarray(draw.parts)
    return Render(light.shine(image), visible(silhouettes), slot_boxes(body), whole_boxes(body), parts)


def visible(silhouettes: dict[Slot, Pixels]) -> dict[Slot, Pixels]:
    """The silhouettes, the bottom's without the part that the top, drawn later, covers."""
    if "bottom" not in silhouettes:
        return silhouettes
    shown = np.where(silhouettes["top"] > 127, 0, silhouettes["bottom"]).astype(np.uint8)
    return {**silhouettes, "bottom": shown}


__all__ = ["SIZE", "Body", "Render", "Scene", "draw_scene", "render"]
