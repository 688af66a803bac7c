"""When edits are due, in seconds after the start: drawn before anything is sent, so that no answer can move them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np


def due_times(arrivals: str, number: int, rate: float, burstiness: float, random: np.random.Generator) -> list[float]:
    """`number` ascending times.

    arrivals: `poisson`, `gamma:CV` (of the times between them) or `trace:FILE`, one time a line, which `rate` does not
    change. rate: edits per second; infinite: all at once. burstiness: shape of the Gamma distribution of the times
    between arrivals, 1 = Poisson, less comes in bursts; a CV given in `arrivals` goes before it. Raises ValueError.
    """
    kind, _, rest = arrivals.partition(":")
    if kind == "trace":
        return _from_trace(Path(rest), number)
    shape = _shape(kind, rest, burstiness)
    if not rate > 0:
        raise ValueError(f"a request rate of {rate} has no arrivals")
    if math.isinf(rate):
        return [0.0] * number
    between = random.gamma(shape, 1 / (rate * shape), number)
    due: list[float] = between.cumsum().tolist()
    return due


def _shape(kind: str, rest: str, burstiness: float) -> float:
    """A Gamma distribution of shape k has the coefficient of variation k ** -0.5."""
    if kind == "poisson" and not rest:
        shape = burstiness
    elif kind == "gamma":
        shape = float(rest) ** -2
    else:
        raise ValueError(f"arrivals are poisson, gamma:CV or trace:FILE, not {kind}:{rest}")
    if not shape > 0:
        raise ValueError(f"a burstiness of {shape} is no shape of a Gamma distribution")
    return shape


def _from_trace(path: Path, number: int) -> list[float]:
    times = sorted(float(line) for line in path.read_text().split())[:number]
    if len(times) < number:
        raise ValueError(f"{path} has {len(times)} arrivals, {number} are asked for")
    return [time - times[0] for time in times] if times else []
