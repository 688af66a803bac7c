"""Draws the edges of a picture as a client's `cv2.Canny` does: white lines on black (Canny, 1986)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.train_embedded.masks import Mask
from tools.train_embedded.scenes import Pixels

LOW, HIGH = 100, 200  # thresholds of the gradient that most users of Canny take
TAN_22, TAN_67 = 2**0.5 - 1, 2**0.5 + 1  # between directions of which neighbours are compared


@dataclass(frozen=True)
class Lines:
    """How edges are drawn. low, high: thresholds of |dx| + |dy| of a Sobel filter, of pixels 0..255; a weak edge counts
    if it touches a strong one."""

    low: float = LOW
    high: float = HIGH
    width: int = 1  # pixels, odd


CANNY = Lines()


def edges(image: Pixels, lines: Lines = CANNY) -> Mask:
    """Where a picture has edges, [height, width]. image: [height, width, 3]."""
    found = canny(image, lines.low, lines.high)
    return found if lines.width == 1 else grown(found, lines.width)


def control_picture(image: Pixels, lines: Lines = CANNY) -> Pixels:
    """The edges of a picture, white on black, [height, width, 3]."""
    return np.repeat(edges(image, lines)[..., None], 3, -1).astype(np.uint8) * 255


def canny(image: Pixels, low: float, high: float) -> Mask:
    """Edges of a pixel's width, [height, width]. Each pixel's gradient is that of its steepest channel."""
    across, down = _gradient(image.astype(np.int32))
    strength = np.abs(across) + np.abs(down)
    thin = _is_ridge(across, down, strength)
    return _connected(thin & (strength > high), thin & (strength > low))


def grown(found: Mask, width: int) -> Mask:
    """Lines made `width` pixels wide."""
    reach = width // 2
    across, down = np.pad(found, ((0, 0), (reach, reach))), np.zeros_like(found)
    wide = np.logical_or.reduce([across[:, i : i + found.shape[1]] for i in range(width)])
    padded = np.pad(wide, ((reach, reach), (0, 0)))
    return np.logical_or.reduce([padded[i : i + found.shape[0]] for i in range(width)], out=down)


def _gradient(image: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Sobel's derivatives to the right and down, [height, width]."""
    x = np.pad(image, ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows, columns = x[:-2] + 2 * x[1:-1] + x[2:], x[:, :-2] + 2 * x[:, 1:-1] + x[:, 2:]
    across, down = rows[:, 2:] - rows[:, :-2], columns[2:] - columns[:-2]
    steepest = (np.abs(across) + np.abs(down)).argmax(-1)[..., None]
    return np.take_along_axis(across, steepest, -1)[..., 0], np.take_along_axis(down, steepest, -1)[..., 0]


def _is_ridge(across: NDArray[np.int32], down: NDArray[np.int32], strength: NDArray[np.int32]) -> Mask:
    """Where the gradient is largest among the neighbours before and behind, in its direction."""
    x = np.pad(strength, 1)
    height, width = strength.shape

    def at(row: int, column: int) -> NDArray[np.int32]:
        return x[1 + row : 1 + row + height, 1 + column : 1 + column + width]

    steep, flat = np.abs(down) > TAN_67 * np.abs(across), np.abs(down) < TAN_22 * np.abs(across)
    falls = (across < 0) == (down < 0)
    before = np.where(flat, at(0, -1), np.where(steep, at(-1, 0), np.where(falls, at(-1, -1), at(-1, 1))))
    behind = np.where(flat, at(0, 1), np.where(steep, at(1, 0), np.where(falls, at(1, 1), at(1, -1))))
    return (strength > before) & (strength >= behind)


def _connected(strong: Mask, weak: Mask) -> Mask:
    """Strong edges, and weak ones that touch them, directly or over others."""
    found = strong
    while True:
        more = grown(found, 3) & weak | strong
        if (more == found).all():
            return found
        found = more
