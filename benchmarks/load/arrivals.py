"""When edits are due, in seconds after the start: drawn beforehand, so that answers have no influence."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np


def due_times(arrivals: str, number: int, rate: float, burstiness: float, random: np.random.Generator) -> list[float]:
    """`number` ascending times.

    arrivals: `poisson`, or `trace:FILE`, one time a line, to which rate and burstiness do not apply. rate: edits per
    second; infinite: all at once. burstiness: shape k of the Gamma distribution of the times between arrivals, whose
    coefficient of variation is k ** -0.5; 1 is a Poisson process, less comes in bursts. Raises ValueError.
    """
    kind, _, rest = arrivals.partition(":")
    if kind == "trace":
        return _from_trace(Path(rest), number)
    if arrivals != "poisson":
        raise ValueError(f"arrivals are poisson or trace:FILE, not {arrivals}")
    if not (burstiness > 0 and rate > 0):
        raise ValueError(f"there are no arrivals of rate {rate} and burstiness {burstiness}: both must be above 0")
    if math.isinf(rate):
        return [0.0] * number
    between = random.gamma(burstiness, 1 / (rate * burstiness), number)
    due: list[float] = between.cumsum().tolist()
    return due


def _from_trace(path: Path, number: int) -> list[float]:
    times = sorted(float(line) for line in path.read_text().split())[:number]
    if len(times) < number:
        raise ValueError(f"{path} has {len(times)} arrivals, {number} are asked for")
    return [time - times[0] for time in times] if times else []
