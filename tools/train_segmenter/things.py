"""What a mask can be asked for in a scene, the nouns for it, and the pixels that it covers."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tools.train_embedded.garments import KINDS, Garment
from tools.train_embedded.parts import Part
from tools.train_embedded.scenes import PART_OF_SLOT, Pixels, Scene

SMALLEST = 64  # pixels of a 256x256 picture, 0.1 %, below which a thing counts as neither there nor absent

NOUNS: Mapping[str, tuple[str, ...]] = {
    "person": ("person", "person", "figure", "woman", "man", "girl", "boy", "human", "model", "lady"),
    "background": ("background", "background", "backdrop", "room", "surroundings"),
    "hair": ("hair", "hair", "hairstyle", "haircut"),
    "shoes": ("shoes", "shoes", "shoe", "footwear", "boots", "sneakers"),
    "headwear": ("hat", "hat", "headwear"),
    "clothes": ("clothes", "outfit", "clothing", "garments"),
    "shirt": ("shirt", "shirt", "t-shirt", "blouse"),
    "coat": ("coat", "coat", "jacket"),
    "dress": ("dress", "dress", "gown"),
    "sweater": ("sweater", "sweater", "jumper", "pullover"),
    "trousers": ("trousers", "trousers", "pants", "jeans"),
    "skirt": ("skirt",),
    "shorts": ("shorts",),
    "cap": ("cap", "baseball cap"),
    "beanie": ("beanie", "beanie", "bobble hat"),
}
"""Thing -> its nouns; a noun that is listed twice is used twice as often. `headwear` is a hat, a cap or a beanie."""

THINGS = tuple(NOUNS)
SHOWN = ("room", "skin", "hair", "shoes", *(kind for kinds in KINDS.values() for kind in kinds))
"""What a pixel can show: a part of the figure, or a kind of garment."""


def covered(parts: Pixels, thing: str, scene: Scene) -> NDArray[np.bool_]:
    """The pixels of a thing, shaped like `parts`, a map of Part numbers; none if the scene lacks it."""
    table = np.zeros(len(Part), np.bool_)  # Part -> whether the thing has it
    table[list(_parts_of(thing, scene))] = True
    pixels: NDArray[np.bool_] = table[parts]
    return pixels


def _parts_of(thing: str, scene: Scene) -> tuple[Part, ...]:
    """The parts that a thing consists of in a scene; none if the scene lacks it."""
    match thing:
        case "person":
            return tuple(part for part in Part if part != Part.ROOM)
        case "background":
            return (Part.ROOM,)
        case "hair":
            return (Part.HAIR,)
        case "shoes":
            return (Part.SHOES,)
        case "clothes":
            return (Part.TOP, Part.BOTTOM)
    garment = garment_of(thing, scene)
    return () if garment is None else (PART_OF_SLOT[garment.slot],)


def garment_of(thing: str, scene: Scene) -> Garment | None:
    """The worn garment that a thing names; None if it names another thing, or if nothing of it is worn."""
    if thing == "headwear":
        return scene.hat
    return next((garment for garment in scene.garments().values() if garment.kind == thing), None)


def is_garment(thing: str) -> bool:
    """Whether a thing has a colour and a pattern that prompts may give."""
    return thing == "headwear" or any(thing in kinds for kinds in KINDS.values())


def shown(parts: Pixels, scene: Scene) -> Pixels:
    """What each pixel shows, as an index into SHOWN; shaped like `parts`."""
    table = np.zeros(len(Part), np.uint8)  # Part -> index
    for part, name in ((Part.ROOM, "room"), (Part.SKIN, "skin"), (Part.HAIR, "hair"), (Part.SHOES, "shoes")):
        table[part] = SHOWN.index(name)
    for slot, garment in scene.garments().items():
        table[PART_OF_SLOT[slot]] = SHOWN.index(garment.kind)
    pixels: Pixels = table[parts]
    return pixels
