"""Structural similarity (SSIM) of two pictures, whole or in the box around a mask.

Structural similarity of Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from error visibility to
structural similarity" (IEEE Transactions on Image Processing 13, 2004), computed as scikit-image does: a uniform window
of 7 x 7 pixels, unbiased variances, only windows wholly inside the picture, the mean over the channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Mask = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

WINDOW = 7  # pixels
BOX_MARGIN = 4
"""Pixels by which a mask's bounding box is grown, to include the seam to the unedited picture."""

_C1, _C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


def ssim(a: Pixels, b: Pixels) -> float:
    """Structural similarity, -1..1, 1 = equal. a, b: uint8 [height, width, channels].

    Pictures with a side below 7 pixels get the largest odd window that fits. Raises ValueError for different shapes.
    """
    if a.shape != b.shape:
        raise ValueError(f"pictures of shapes {a.shape} and {b.shape} cannot be compared")
    size = min(WINDOW, (min(a.shape[:2]) - 1) // 2 * 2 + 1)
    x, y = a.astype(np.float64), b.astype(np.float64)
    mean_x, mean_y = _window_mean(x, size), _window_mean(y, size)
    unbiased = size**2 / (size**2 - 1) if size > 1 else 1.0
    var_x = unbiased * (_window_mean(x * x, size) - mean_x**2)
    var_y = unbiased * (_window_mean(y * y, size) - mean_y**2)
    covariance = unbiased * (_window_mean(x * y, size) - mean_x * mean_y)
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)
    structure = (2 * covariance + _C2) / (var_x + var_y + _C2)
    return float((luminance * structure).mean())


def ssim_in_box(a: Pixels, b: Pixels, mask: Mask) -> float:
    """SSIM in the mask's bounding box, grown by BOX_MARGIN pixels on each side. a, b: uint8 [height, width, channels].

    mask: [height, width], true where the picture was edited. Raises ValueError for a mask that is false everywhere.
    """
    box = box_with_margin(mask)
    return ssim(a[box], b[box])


def box_with_margin(mask: Mask) -> tuple[slice, slice]:
    """Rows and columns of the mask's bounding box, grown by BOX_MARGIN pixels. Raises ValueError for an empty mask."""
    rows, columns = np.nonzero(mask)
    if len(rows) == 0:
        raise ValueError("an empty mask has no bounding box")
    return _grown(rows), _grown(columns)


def _grown(places: npt.NDArray[np.intp]) -> slice:
    return slice(max(0, int(places.min()) - BOX_MARGIN), int(places.max()) + BOX_MARGIN + 1)


def _window_mean(values: Floats, size: int) -> Floats:
    """Mean over every window of size x size pixels that lies wholly inside, by running sums."""
    total = np.pad(values, ((1, 0), (1, 0), (0, 0))).cumsum(0).cumsum(1)
    summed: Floats = total[size:, size:] - total[:-size, size:] - total[size:, :-size] + total[:-size, :-size]
    return summed / size**2
