"""Crops for `padding_mask_crop`: each step equals diffusers'."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.images.crop_geometry import covering, crop_region, fitted, lay
from engine.images.masks import edited_box

SIDE = st.integers(1, 90)
FRAME = st.tuples(st.integers(1, 12), st.integers(1, 12)).map(lambda grid: (grid[0] * 16, grid[1] * 16))


@pytest.fixture(scope="module")
def processor() -> Any:
    return pytest.importorskip("diffusers.image_processor").VaeImageProcessor(vae_scale_factor=16)


def noise(size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(sum(size)).integers(0, 256, (size[1], size[0], 3), np.uint8)


@settings(max_examples=150, deadline=None)
@given(size=st.tuples(SIDE, SIDE), frame=FRAME, padding=st.integers(0, 100), data=st.data())
def test_the_region_is_diffusers_own_and_within_the_picture(
    processor: Any, size: tuple[int, int], frame: tuple[int, int], padding: int, data: st.DataObject
) -> None:
    left, top = (data.draw(st.integers(0, side - 1)) for side in size)
    right, bottom = (data.draw(st.integers(first + 1, side)) for first, side in zip((left, top), size, strict=True))
    keep = np.full((size[1], size[0]), 255, np.uint8)
    keep[top:bottom, left:right] = 0
    region = crop_region(edited_box(keep), padding, size, frame)
    assert region == processor.get_crop_region(Image.fromarray(255 - keep), *frame, pad=padding)
    assert 0 <= region[0] <= left < right <= region[2] <= size[0]
    assert 0 <= region[1] <= top < bottom <= region[3] <= size[1]


@settings(max_examples=100, deadline=None)
@given(size=st.tuples(SIDE, SIDE), frame=FRAME)
def test_a_picture_is_laid_in_a_frame_as_diffusers_fills_it(
    processor: Any, size: tuple[int, int], frame: tuple[int, int]
) -> None:
    picture = Image.fromarray(noise(size))
    geometry = fitted(size, frame)
    ours = np.asarray(lay(picture, frame, geometry))
    if min(geometry.size) > 1:  # diffusers' own rounds thinner ones to nothing, and fails
        assert np.array_equal(ours, np.asarray(processor.resize(picture, frame[1], frame[0], "fill")))
    grey = picture.convert("L")
    assert np.array_equal(np.asarray(lay(grey, frame, geometry)).shape, (frame[1], frame[0]))


@settings(max_examples=100, deadline=None)
@given(size=st.tuples(SIDE, SIDE), frame=FRAME)
def test_the_way_back_is_diffusers_crop(processor: Any, size: tuple[int, int], frame: tuple[int, int]) -> None:
    """frame: the size that the model saw."""
    painted = Image.fromarray(noise(frame))
    geometry = covering(frame, size)
    back = Image.new("RGB", size)
    back.paste(painted.resize(geometry.size, Image.Resampling.LANCZOS), geometry.offset)
    assert np.array_equal(np.asarray(back), np.asarray(processor.resize(painted, size[1], size[0], "crop")))
    (x, y), (width, height) = geometry.offset, geometry.size
    assert x <= 0 <= x + width - size[0]
    assert y <= 0 <= y + height - size[1]
