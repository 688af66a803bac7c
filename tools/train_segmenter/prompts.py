"""Draws mask prompts: noun phrases for things that are in a scene, and for some that are not."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tools.train_embedded.garments import COLOURS, PALETTE, PATTERNS, Garment
from tools.train_embedded.metrics import lab
from tools.train_embedded.scenes import Pixels, Scene
from tools.train_segmenter.things import NOUNS, SMALLEST, THINGS, covered, garment_of, is_garment

DETERMINERS = ("", "", "", "the", "the", "a", "her", "his", "their", "my", "this")
DIFFERENT = 45.0  # CIELAB distance from which two colours of the palette are not mistaken for each other
ADJECTIVES: Mapping[str, tuple[str, ...]] = {
    "person": ("whole", "entire", "young", "standing"),
    "background": ("whole", "entire", "plain", "empty"),
    "hair": ("long", "short", "dark", "light", "brown", "black", "blonde", "red", "grey"),
    "shoes": ("brown", "black", "white", "red", "leather"),
    "clothes": ("whole", "entire"),
}
"""Thing -> adjectives that say nothing about which pixels are meant: any of them names the thing, true or not."""

STRANGERS = (
    "dog", "cat", "car", "tree", "house", "chair", "table", "bag", "umbrella", "phone", "flower", "bird", "bicycle",
    "horse", "boat", "cup", "book", "lamp", "clock", "sofa", "laptop", "scarf", "gloves", "tie", "necklace",
    "sunglasses", "watch", "belt", "backpack", "bottle", "ball", "pizza", "zebra", "elephant", "train", "aeroplane",
)  # fmt: skip
"""Nouns of what no scene shows."""


@dataclass(frozen=True)
class Prompt:
    """A noun phrase and the pixels that it asks for."""

    text: str
    mask: NDArray[np.bool_]  # shaped like the map of parts that it was drawn for; all false if the thing is absent


@dataclass(frozen=True)
class Shares:
    """How many of the prompts ask for what is not there: another thing, a garment in another colour, a stranger."""

    absent: float = 0.16
    other_colour: float = 0.1
    strange: float = 0.06


SHARES = Shares()

WEIGHTS = {"shorts": 4.0, "skirt": 2.0, "dress": 2.0, "headwear": 2.0, "cap": 2.0, "beanie": 2.0, "hair": 1.5}
"""Thing -> how often it is asked for where it is seen, of those that are rare or hard; others: 1."""


@dataclass(frozen=True)
class Asked:
    """What prompts can ask of one picture."""

    scene: Scene
    nothing: NDArray[np.bool_]  # an empty mask, shaped like the picture's map of parts
    seen: dict[str, NDArray[np.bool_]]  # thing -> its pixels, of the things of which enough is seen
    absent: tuple[str, ...]  # the things of which no pixel is seen

    @classmethod
    def of(cls, parts: Pixels, scene: Scene) -> "Asked":
        masks = {thing: covered(parts, thing, scene) for thing in THINGS}
        sizes = {thing: int(mask.sum()) for thing, mask in masks.items()}
        return cls(
            scene,
            np.zeros(parts.shape, np.bool_),
            {thing: mask for thing, mask in masks.items() if sizes[thing] >= SMALLEST},
            tuple(thing for thing in THINGS if not sizes[thing]),
        )


def draw_prompt(rng: random.Random, asked: Asked, shares: Shares = SHARES) -> Prompt:
    kind = rng.random()
    if kind < shares.absent and asked.absent:
        thing = rng.choice(asked.absent)
        return Prompt(phrase(rng, thing, any_look(rng, thing)), asked.nothing)
    kind -= shares.absent
    garments = [thing for thing in asked.seen if garment_of(thing, asked.scene) is not None]
    if 0 <= kind < shares.other_colour and garments:
        return Prompt(phrase_in_other_colour(rng, rng.choice(garments), asked.scene), asked.nothing)
    kind -= shares.other_colour
    if 0 <= kind < shares.strange:
        return Prompt(determined(rng, [stranger(rng)]), asked.nothing)
    things = list(asked.seen)
    (thing,) = rng.choices(things, [WEIGHTS.get(thing, 1.0) for thing in things])
    return Prompt(phrase(rng, thing, garment_of(thing, asked.scene)), asked.seen[thing])


def phrase(rng: random.Random, thing: str, look: Garment | None = None, say_colour: float = 0.5) -> str:
    """A noun phrase for a thing, such as "her red striped sweater". look: what its colour and pattern are read from."""
    words = []
    if look is not None:
        words += [look.colour] if rng.random() < say_colour else []
        words += [look.pattern] if rng.random() < 0.25 and look.pattern != "plain" else []
    elif thing in ADJECTIVES and rng.random() < 0.25:
        words.append(rng.choice(ADJECTIVES[thing]))
    return determined(rng, [*words, rng.choice(NOUNS[thing])])


def phrase_in_other_colour(rng: random.Random, thing: str, scene: Scene) -> str:
    """A noun phrase for a worn garment that gives it a clearly wrong colour."""
    worn = garment_of(thing, scene)
    assert worn is not None
    colour = rng.choice(other_colours(worn.colour))
    return phrase(rng, thing, Garment(worn.kind, colour, "plain", 0), say_colour=1.0)


def other_colours(colour: str) -> list[str]:
    """The palette's colours that nobody would call by the name of this one."""
    points = {name: lab(np.array(value)) for name, value in PALETTE.items()}
    return [name for name in COLOURS if np.linalg.norm(points[name] - points[colour]) >= DIFFERENT]


def words() -> list[str]:
    """Every word of the prompts, sorted; for the tokenizer."""
    nouns, adjectives = chain(*NOUNS.values()), chain(*ADJECTIVES.values())
    phrases = [*DETERMINERS, "an", *nouns, *STRANGERS, *adjectives, *COLOURS, *PATTERNS]
    return sorted({word for each in phrases for word in each.split()})


def any_look(rng: random.Random, thing: str) -> Garment | None:
    """A random colour and pattern for a garment; None for another thing."""
    return Garment("shirt", rng.choice(COLOURS), rng.choice(PATTERNS), 0) if is_garment(thing) else None


def stranger(rng: random.Random) -> str:
    """A noun of what no scene shows, or letters that spell no word."""
    if rng.random() < 0.7:
        return rng.choice(STRANGERS)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 9)))


def determined(rng: random.Random, following: list[str]) -> str:
    """The words after an article, a possessive, or nothing."""
    determiner = rng.choice(DETERMINERS)
    if determiner == "a":
        determiner = "an" if following[0][0] in "aeiou" else "a"
    return " ".join([determiner, *following] if determiner else following)
