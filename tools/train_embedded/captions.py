"""Captions that ask for one or two garments, and the vocabulary of all captions."""

import random

from tools.train_embedded.garments import COLOURS, KINDS, PATTERNS, PLURAL, Garment

EMPTY_SCENE = ("", "a person", "a room", "a person in a room")


def noun_phrase(garment: Garment, *, article: bool = True, say_plain: bool = False) -> str:
    """For example "an orange striped shirt" or "blue trousers"."""
    pattern = f"{garment.pattern} " if garment.pattern != "plain" or say_plain else ""
    phrase = f"{garment.colour} {pattern}{garment.kind}"
    if not article or garment.kind in PLURAL:
        return phrase
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def caption(garments: tuple[Garment, ...], rng: random.Random) -> str:
    """A random wording that asks for these garments; in half of the cases only a noun phrase."""
    plain = rng.random() < 0.3
    phrase = " and ".join(noun_phrase(garment, say_plain=plain) for garment in garments)
    bare = " and ".join(noun_phrase(garment, article=False, say_plain=plain) for garment in garments)
    target = rng.choice(("clothes", "outfit", "garment", garments[0].kind))
    way = rng.random()
    if way < 0.5:
        return phrase
    if way < 0.6:
        return bare
    if way < 0.7:
        return f"a person wearing {phrase}"
    if way < 0.78:
        return f"a person in {phrase}"
    if way < 0.86:
        return f"make it {phrase}"
    if way < 0.93:
        return f"change the {target} to {phrase}"
    return f"{phrase} on a person"


def vocabulary() -> list[str]:
    """Every word that a caption can contain, sorted; for the tokenizers."""
    rng, words = random.Random(5), {"with", "of", "the", "same", "but", "bright", "dark", "light", "pattern", "colour"}
    for phrase in EMPTY_SCENE:
        words.update(phrase.split())
    for slot, kinds in KINDS.items():
        for kind in kinds:
            for colour in COLOURS:
                for pattern in PATTERNS:
                    garment = Garment(kind, colour, pattern, 0)
                    assert garment.slot == slot
                    for _ in range(8):
                        words.update(caption((garment, garment), rng).split())
    return sorted(words)
