"""Random draws of mask areas, templates, step counts and sizes, by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.load.pictures import Size
from benchmarks.simulation.masks import MASKS

Areas = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
Integers = Callable[[np.random.Generator, int], npt.NDArray[np.int64]]

MASK_AREAS = {
    "flashps-prod": MASKS["production"],
    "public": MASKS["public"],
    "viton": MASKS["tryon"],
    "gamma": MASKS["reference"],
}
"""FlashPS, figure 3 and section 2.2, means 0.11, 0.19 and 0.35; and a Gamma law of mean 0.15."""

LEAST_AREA = 1e-4


def mask_areas(text: str) -> Areas:
    """A name of MASK_AREAS or `fixed:R`: shares of the picture under the mask. Raises ValueError."""
    if text in MASK_AREAS:
        draw = MASK_AREAS[text]
        return lambda random, number: draw(random, number).clip(LEAST_AREA, 1.0)
    kind, _, rest = text.partition(":")
    area = float(rest) if kind == "fixed" else 0.0
    if not 0 < area <= 1:
        raise ValueError(f"a mask-ratio-dist is {', '.join(MASK_AREAS)} or fixed:R with R in (0, 1], not {text}")
    return lambda random, number: np.full(number, area)


def templates(text: str, pool: int) -> Integers:
    """Which template an edit is of. `zipf:A`: of a pool, popular by Zipf's law of exponent A. `fixed:N`: N in turn.
    `unique`: each its own. Raises ValueError.
    """
    kind, _, rest = text.partition(":")
    match kind:
        case "unique":
            return lambda random, number: np.arange(number)
        case "fixed" if int(rest) > 0:
            return lambda random, number: np.arange(number) % int(rest)
        case "zipf":
            weights = 1.0 / np.arange(1, pool + 1) ** float(rest)
            return lambda random, number: random.choice(pool, number, p=weights / weights.sum())
    raise ValueError(f"template-reuse is zipf:A, unique or fixed:N, not {text}")


def step_counts(text: str) -> Integers:
    """`N`, `uniform:LOW-HIGH` or `choice:A,B,..`. Raises ValueError."""
    kind, _, rest = text.rpartition(":")
    match kind:
        case "":
            chosen = [int(rest)]
        case "uniform":
            low, _, high = rest.partition("-")
            chosen = list(range(int(low), int(high) + 1))
        case "choice":
            chosen = [int(value) for value in rest.split(",")]
        case _:
            chosen = []
    if not chosen or min(chosen) < 1:
        raise ValueError(f"num-inference-steps is N, uniform:LOW-HIGH or choice:A,B,.., not {text}")
    return lambda random, number: random.choice(chosen, number)


def sizes(text: str) -> list[Size]:
    """`WxH,WxH,..`, equally likely. Raises ValueError."""
    return [size(part) for part in text.split(",")]


def size(text: str) -> Size:
    """`WxH`. Raises ValueError."""
    width, _, height = text.partition("x")
    if int(width) < 1 or int(height) < 1:
        raise ValueError(f"a size is WxH, not {text}")
    return int(width), int(height)
