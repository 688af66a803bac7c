"""Distributions of mask ratios: how much of a picture an edit computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Ratios = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Ratios]

# Quantiles 0, 0.05, ... 1 of the mask ratios behind FlashPS's figure 3, from the masks that its artifact publishes.
_PRODUCTION = (
    *(0.0157, 0.0376, 0.0484, 0.0547, 0.0612, 0.0673, 0.0722, 0.0761, 0.0822, 0.0884, 0.0952),
    *(0.1028, 0.1103, 0.1192, 0.1278, 0.139, 0.1545, 0.1768, 0.2082, 0.2446, 0.4209),
)
_PUBLIC = (
    *(0.0, 0.0038, 0.0127, 0.0152, 0.0182, 0.0207, 0.0248, 0.0304, 0.036, 0.0432, 0.056),
    *(0.0987, 0.1547, 0.1781, 0.1968, 0.2219, 0.2538, 0.3468, 0.766, 0.8733, 0.9998),
)
_SHARES = tuple(index / 20 for index in range(21))


def whole(random: np.random.Generator, number: int) -> Ratios:
    """Every token is computed."""
    return np.ones(number)


def reference(random: np.random.Generator, number: int) -> Ratios:
    """Gamma of shape 1.6 and mean 0.15."""
    return random.gamma(1.6, 0.15 / 1.6, number).clip(1e-4, 1.0)


def production(random: np.random.Generator, number: int) -> Ratios:
    """FlashPS, figure 3 left, 970 masks of mean 0.11."""
    return np.interp(random.random(number), _SHARES, _PRODUCTION)


def public(random: np.random.Generator, number: int) -> Ratios:
    """FlashPS, figure 3 right, 3788 masks of mean 0.19: half of them are below 0.06, a tenth above 0.76."""
    return np.interp(random.random(number), _SHARES, _PUBLIC)


def tryon(random: np.random.Generator, number: int) -> Ratios:
    """Mean 0.35, all that FlashPS says of its virtual try-on benchmark (section 2.2); a Beta of standard deviation
    0.14.
    """
    return random.beta(3.7, 6.9, number).clip(1e-4, 1.0)


MASKS: dict[str, Draw] = {draw.__name__: draw for draw in (whole, reference, production, public, tryon)}
