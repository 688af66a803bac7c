"""Masks as arrays: grown, softened, at the model's size, and the tokens under them. Numpy and Pillow only.

Sizes are (width, height) in pixels. `keep` is the mask used to paste back: uint8 [height, width] at upload size, 255 =
keep the upload's pixel, 0 = take the generated one, between = blend.
"""

from __future__ import annotations

import itertools
from math import ceil, floor

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from core.messages.image_processor import Box
from engine.images.crop_geometry import CropGeometry, Size, lay
from engine.images.image_codec import Bytes

BLUR_REACH = 4
"""Deviations of a Gaussian beyond which Pillow's blur of 8-bit values changes nothing."""


def grown_keep(keep: Bytes, grow: int) -> Bytes:
    """`keep`, of which something is edited, with that grown by `grow` px on each side, a square. Only its surroundings
    are computed, so a small edit of a large photo costs little.
    """
    if not grow:
        return keep
    rows, columns = _around(keep, grow)
    part = np.ascontiguousarray(keep[rows, columns])
    return _with_part(keep, rows, columns, _least_around(_least_around(part, grow, axis=0), grow, axis=1))


def soft_keep(keep: Bytes, feather: float) -> Bytes:
    """`keep`, of which something is edited, with its edge softened by a Gaussian with a deviation of `feather` px: of a
    smaller mask nothing may be left."""
    if not feather:
        return keep
    rows, columns = _around(keep, ceil(BLUR_REACH * feather))
    blurred = Image.fromarray(keep[rows, columns]).filter(ImageFilter.GaussianBlur(feather))
    return _with_part(keep, rows, columns, np.asarray(blurred))


def _around(keep: Bytes, reach: int) -> tuple[slice, slice]:
    """Rows and columns of all that is at most `reach` px from what is edited."""
    left, top, right, bottom = edited_box(keep)
    return slice(max(0, top - reach), bottom + reach), slice(max(0, left - reach), right + reach)


def _with_part(keep: Bytes, rows: slice, columns: slice, part: Bytes) -> Bytes:
    changed = keep.copy()
    changed[rows, columns] = part
    return changed


def _least_around(values: Bytes, reach: int, axis: int) -> Bytes:
    """The least of the values at most `reach` away along an axis, in log2(reach) passes over the array."""
    padding = [(0, 0), (0, 0)]
    padding[axis] = (reach, reach)
    found = np.moveaxis(np.pad(values, padding, mode="edge"), axis, 0)
    covered, window = 1, 2 * reach + 1  # each entry is the least of itself and the `covered` - 1 after it
    while covered < window:
        step = min(covered, window - covered)
        found = np.minimum(found[:-step], found[step:])
        covered += step
    return np.ascontiguousarray(np.moveaxis(found, 0, axis))


def found_keep(found: Bytes, size: Size) -> Bytes:
    """`keep` at upload size of a mask that an engine has found at generation size (uint8 [height, width], 1 = edit, at
    least one pixel)."""
    (width, height), (across, down) = size, (found.shape[1] / size[0], found.shape[0] / size[1])
    left, top, right, bottom = edited_box(255 - found)
    columns = slice(max(0, floor(left / across) - 1), min(width, ceil(right / across) + 1))
    rows = slice(max(0, floor(top / down) - 1), min(height, ceil(bottom / down) + 1))
    source = columns.start * across, rows.start * down, columns.stop * across, rows.stop * down
    shape = columns.stop - columns.start, rows.stop - rows.start
    part = Image.fromarray(found * np.uint8(255)).resize(shape, Image.Resampling.BILINEAR, source)
    keep = np.full((height, width), 255, np.uint8)
    keep[rows, columns] = np.where(np.asarray(part) >= 128, 0, 255)
    if keep.min() == 255:  # a pixel that a smaller upload has no room for
        keep = np.where(touched_cells(255 - found, size, 1, 0), 0, 255).astype(np.uint8)
    return keep


def mask_file(keep: Bytes) -> Image.Image:
    """A mask as `mask` of an edit takes it: RGBA, transparent = edit."""
    picture = Image.new("RGBA", (keep.shape[1], keep.shape[0]))
    picture.putalpha(Image.fromarray(keep))
    return picture


def model_mask(keep: Bytes, size: Size, geometry: CropGeometry | None = None) -> Bytes:
    """The model's mask: uint8 [height, width] at generation size, 1 = edit.

    As in FluxFillPipeline's mask processor: 255 - keep resized (Pillow, Lanczos), then 1 from one half on. If that
    leaves no pixel of a small or faint mask, every pixel that it touches is selected, as an empty edit is never meant.
    geometry: where the picture lies at generation size, if it is a crop.
    """
    grey = lay(Image.fromarray(255 - keep), size, geometry or CropGeometry(size))
    mask = (np.asarray(grey) >= 128).astype(np.uint8)
    if not mask.any():
        mask = touched_cells(keep, size, cell=1, margin=0, geometry=geometry).astype(np.uint8)
    return mask


def active_tokens(
    keep: Bytes, size: Size, token_size: int, margin: int, geometry: CropGeometry | None = None
) -> npt.NDArray[np.int32]:
    """Indices of the tokens to compute, int32 [active tokens], row-major, ascending.

    A token is active if a pixel of the upload with keep < 255, grown by `margin` pixels of generation size on each side
    (a square), covers any part of it. geometry: as for `model_mask`.
    """
    return np.flatnonzero(touched_cells(keep, size, token_size, margin, geometry)).astype(np.int32)


def masked_tokens(mask: Bytes, token_size: int) -> npt.NDArray[np.int32]:
    """Tokens with a pixel of the model's mask: that of an enlarged small picture may reach beyond the upload's mask."""
    height, width = mask.shape
    cells = mask.reshape(height // token_size, token_size, width // token_size, token_size)
    return np.flatnonzero(cells.any(axis=(1, 3))).astype(np.int32)


def touched_cells(
    keep: Bytes, size: Size, cell: int, margin: int, geometry: CropGeometry | None = None
) -> npt.NDArray[np.bool_]:
    """The cells of `cell` px that the mask touches, scaled to `size` and grown by `margin` px: bool [rows, columns].
    geometry: where the mask lies in `size`; by default it fills it."""
    (width, height), (x, y) = (geometry.size, geometry.offset) if geometry else (size, (0, 0))
    rows = _any_in_windows(keep < 255, *_windows(keep.shape[0], height, y, size[1] // cell, cell, margin))
    across = _windows(keep.shape[1], width, x, size[0] // cell, cell, margin)
    return _any_in_windows(np.ascontiguousarray(rows.T), *across).T


def _windows(
    source: int, scaled: int, offset: int, count: int, cell: int, margin: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each of `count` cells along a side: the first source pixel that touches it, and the one after the last.

    Exact integer arithmetic. Source pixel x covers [x, x + 1) * scaled / source + offset at generation size, and
    `margin` more on both ends; the first and last pixels also cover all beyond them, where a crop repeats its edges.
    """
    left = np.arange(count, dtype=np.int64) * cell - margin - offset
    right = left + cell + 2 * margin
    starts = left * source // scaled
    ends = -(-right * source // scaled)
    return starts.clip(0, source - 1), ends.clip(1, source)


def _any_in_windows(
    touched: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """OR over rows [start, end) of each window: bool [windows, columns]. Windows overlap; each row is read once."""
    edges = np.unique(np.concatenate((starts, ends)))
    segments = np.stack([touched[start:end].any(axis=0) for start, end in itertools.pairwise(edges)])
    counts = np.concatenate((np.zeros((1, touched.shape[1]), np.int32), segments.cumsum(axis=0, dtype=np.int32)))
    hit: npt.NDArray[np.bool_] = counts[np.searchsorted(edges, ends)] > counts[np.searchsorted(edges, starts)]
    return hit


def edited_box(keep: Bytes) -> Box:
    """The smallest box around all pixels with keep < 255, of which there must be at least one."""
    rows = np.flatnonzero(keep.min(axis=1) < 255)
    columns = np.flatnonzero(keep[rows[0] : rows[-1] + 1].min(axis=0) < 255)
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
