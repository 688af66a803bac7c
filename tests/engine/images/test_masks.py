"""Masks: grown and softened as defined, and at other sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from engine.images.image_codec import Bytes
from engine.images.masks import edited_box, found_keep, grown_keep, mask_file, soft_keep


def keeps(seed: int, height: int, width: int) -> Bytes:
    random = np.random.default_rng(seed)
    keep = random.choice(np.array([0, 100, 255], np.uint8), (height, width), p=[0.03, 0.02, 0.95])
    keep[random.integers(height), random.integers(width)] = 0
    return keep


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40), st.integers(0, 50))
@settings(max_examples=60)
def test_a_grown_mask_is_the_least_around_each_pixel(seed: int, height: int, width: int, grow: int) -> None:
    keep = keeps(seed, height, width)
    expected = np.array(
        [
            [keep[max(0, y - grow) : y + grow + 1, max(0, x - grow) : x + grow + 1].min() for x in range(width)]
            for y in range(height)
        ]
    )
    assert np.array_equal(grown_keep(keep, grow), expected)


def test_a_soft_edge_blends_on_both_sides_of_it() -> None:
    keep = np.full((60, 60), 255, np.uint8)
    keep[20:40, 20:40] = 0
    soft = soft_keep(keep, 3.0)
    row = soft[30].astype(int)
    assert (np.diff(row[:30]) <= 0).all()
    assert (row[5], row[30]) == (255, 0)
    assert 90 < row[19] < 165, "half at the edge itself"
    assert np.array_equal(soft_keep(keep, 0.0), keep)


@pytest.mark.parametrize("size", [(64, 48), (128, 96), (91, 77), (40, 30)])
def test_a_found_mask_covers_the_same_part_of_the_upload(size: tuple[int, int]) -> None:
    found = np.zeros((48, 64), np.uint8)
    found[12:36, 16:48] = 1
    keep = found_keep(found, size)
    assert keep.shape == (size[1], size[0])
    assert set(np.unique(keep)) == {0, 255}
    width, height = size
    left, top, right, bottom = edited_box(keep)
    assert np.allclose([left / width, right / width], [0.25, 0.75], atol=1 / min(size))
    assert np.allclose([top / height, bottom / height], [0.25, 0.75], atol=1 / min(size))
    assert abs((keep == 0).mean() - 0.25) < 0.03


def test_a_found_pixel_is_never_lost() -> None:
    found = np.zeros((480, 640), np.uint8)
    found[200, 300] = 1
    assert (found_keep(found, (20, 15)) == 0).sum() >= 1


def test_at_the_same_size_a_found_mask_is_itself() -> None:
    found = (keeps(3, 50, 70) == 0).astype(np.uint8)
    assert np.array_equal(found_keep(found, (70, 50)) == 0, found == 1)


def test_the_file_is_transparent_where_the_mask_is() -> None:
    keep = np.array([[0, 255], [128, 255]], np.uint8)
    picture = mask_file(keep)
    assert picture.mode == "RGBA"
    assert np.array_equal(np.asarray(picture.getchannel("A")), keep)
    assert isinstance(picture, Image.Image)


@pytest.mark.parametrize("feather", [0.3, 1.0, 7.5, 40.0])
def test_what_is_far_from_an_edge_is_not_blurred(feather: float) -> None:
    """So only the surroundings need to be."""
    keep = np.full((400, 500), 255, np.uint8)
    keep[150:170, 220:260] = 0
    keep[160, 300] = 90
    whole = np.asarray(Image.fromarray(keep).filter(ImageFilter.GaussianBlur(feather)))
    assert np.array_equal(soft_keep(keep, feather), whole)


@pytest.mark.parametrize("size", [(64, 48), (300, 200), (91, 77), (40, 30)])
def test_a_part_is_scaled_as_the_whole(size: tuple[int, int]) -> None:
    found = np.zeros((48, 64), np.uint8)
    found[5:20, 30:31] = found[11:14, 25:60] = 1
    whole = np.asarray(Image.fromarray(found * np.uint8(255)).resize(size, Image.Resampling.BILINEAR))
    assert (np.abs((found_keep(found, size) == 0) ^ (whole >= 128)).mean()) < 0.001
