"""The map of a scene's parts agrees with what is drawn."""

import numpy as np
import pytest
from PIL import Image

from tools.train_embedded.parts import Part, PartsDraw, part_of_pixels
from tools.train_embedded.scenes import PART_OF_SLOT, draw_scene, empty_room, render
from tools.train_segmenter.things import SHOWN, THINGS, covered, garment_of, shown

SEEDS = range(5_000_000, 5_000_006)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_room_is_where_the_empty_room_is_seen(seed: int) -> None:
    """But for the figure's shadow, and for pixels that happen to have the room's colour."""
    scene = draw_scene(seed)
    drawn = render(scene)
    differs = (drawn.image != empty_room(scene)).any(-1)
    figure = drawn.parts() != Part.ROOM
    assert (differs & figure).sum() > 0.97 * figure.sum()
    away = differs & ~figure
    rows = np.flatnonzero(away.sum(1) > 12)  # of more than an outline's pixels: the shadow
    assert away[: rows.min() if len(rows) else None].sum() < 0.03 * figure.sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_garments_are_where_their_silhouettes_show(seed: int) -> None:
    drawn = render(draw_scene(seed))
    for slot, silhouette in drawn.silhouettes.items():
        part = drawn.parts() == PART_OF_SLOT[slot]
        assert (part & (silhouette == 0)).sum() <= 0.02 * part.sum()  # collars stick out
        if slot == "hat":  # drawn last, so nothing hides it
            assert part[silhouette > 127].all()


def test_a_shape_is_recorded_as_it_is_drawn() -> None:
    picture = Image.new("RGB", (40, 30), "white")
    draw = PartsDraw(picture)
    draw.part = Part.HAIR
    draw.chord((4, 4, 30, 26), 180, 360, fill="red")
    draw.line(((2, 2), (35, 28)), fill="red", width=3)
    draw.polygon([(30, 2), (38, 2), (38, 9)], fill="red")
    draw.part = Part.TOP
    mask = Image.new("L", picture.size, 0)
    mask.paste(255, (20, 20, 30, 28))
    draw.paste(Image.new("RGB", picture.size, "blue"), mask)
    draw.rounded_rectangle((2, 20, 12, 28), radius=3, fill="blue")
    draw.rounded_rectangle((34, 20, 38, 24), radius=9, fill="blue")  # an ellipse
    draw.arc((12, 2, 28, 12), 20, 160, fill="blue", width=2)
    pixels, parts = np.asarray(picture), np.asarray(draw.parts)
    for part, colour in ((Part.ROOM, (255, 255, 255)), (Part.HAIR, (255, 0, 0)), (Part.TOP, (0, 0, 255))):
        assert np.array_equal(parts == part, (pixels == colour).all(-1)), part
        assert (parts == part).sum() > 20


def test_a_pixel_belongs_to_what_covers_most_of_it() -> None:
    samples = np.array([[1, 1, 2, 3], [1, 2, 3, 2], [5, 0, 6, 4], [4, 0, 4, 6]], np.uint8)
    assert part_of_pixels(samples, 2).tolist() == [[1, 3], [0, 6]]


def test_every_pixel_is_of_the_person_or_of_the_background() -> None:
    scene = draw_scene(5_000_001)
    parts = render(scene).parts()
    masks = {thing: covered(parts, thing, scene) for thing in THINGS}
    assert np.array_equal(masks["person"], ~masks["background"])
    worn = [thing for thing in THINGS if garment_of(thing, scene) is not None]
    assert scene.hat is not None
    assert set(worn) >= {scene.top.kind, scene.hat.kind if scene.hat.kind != "hat" else "headwear"}
    for thing in THINGS:
        assert masks[thing].any() or garment_of(thing, scene) is None, thing
        assert not (masks[thing] & masks["background"]).any() or thing == "background"
    assert masks["clothes"].sum() == masks[scene.top.kind].sum() + sum(
        masks[kind].sum() for kind in ("trousers", "skirt", "shorts")
    )


def test_a_map_of_names_agrees_with_the_things() -> None:
    scene = draw_scene(5_000_004)
    parts = render(scene).parts()
    names = shown(parts, scene)
    for thing in (scene.top.kind, "hair", "shoes"):
        assert np.array_equal(names == SHOWN.index(thing), covered(parts, thing, scene))
    assert np.array_equal(names == SHOWN.index("room"), covered(parts, "background", scene))
