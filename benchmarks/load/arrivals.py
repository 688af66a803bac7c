"""When edits are due, in seconds after the start: drawn beforehand, so that answers have no influence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np


def due_times(arrivals: str, number: int, rate: float, burstiness: float, random: np.random.Generator) -> list[float]:
    """`number` ascending times.

    arrivals: `poisson`; or, without regard to rate and burstiness, `trace:FILE`, one time a line, or
    `windows:RATE/CV/SECONDS,..`, see `_in_windows`. rate: edits per second; infinite: all at once. burstiness: shape k
    of the Gamma distribution of the times between arrivals, whose coefficient of variation is k ** -0.5; 1 is a Poisson
    process, less comes in bursts. Raises ValueError.
    """
    kind, _, rest = arrivals.partition(":")
    if kind == "trace":
        return _from_trace(Path(rest), number)
    if kind == "windows":
        return _in_windows([_window(part) for part in rest.split(",")], number, random)
    if arrivals != "poisson":
        raise ValueError(f"arrivals are poisson, windows:RATE/CV/SECONDS,.. or trace:FILE, not {arrivals}")
    if not (burstiness > 0 and rate > 0):
        raise ValueError(f"there are no arrivals of rate {rate} and burstiness {burstiness}: both must be above 0")
    if math.isinf(rate):
        return [0.0] * number
    between = random.gamma(burstiness, 1 / (rate * burstiness), number)
    due: list[float] = between.cumsum().tolist()
    return due


class Window(NamedTuple):
    """A time with arrivals of one kind."""

    rate: float  # per second
    cv: float  # coefficient of variation of the times between them
    seconds: float  # its length


def _window(text: str) -> Window:
    values = [float(value) for value in text.split("/")]
    if len(values) != len(Window._fields) or min(values) <= 0 or math.inf in values:
        raise ValueError(f"a window of arrivals is RATE/CV/SECONDS, three finite numbers above 0, not {text}")
    return Window(*values)


def _in_windows(windows: Sequence[Window], number: int, random: np.random.Generator) -> list[float]:
    """Gamma arrivals of a rate and burstiness of their own in each window; after the last window the first follows
    (AlpaServe and NeuStream make such traces from counts of real ones by hour and by minute).
    """
    due, start = list[float](), 0.0
    for window in cycle(windows):
        end, shape = start + window.seconds, window.cv**-2
        time = start + random.gamma(shape, 1 / (window.rate * shape))
        while time < end and len(due) < number:
            due.append(time)
            time += random.gamma(shape, 1 / (window.rate * shape))
        if len(due) == number:
            break
        start = end
    return due


def _from_trace(path: Path, number: int) -> list[float]:
    times = sorted(float(line) for line in path.read_text().split())[:number]
    if len(times) < number:
        raise ValueError(f"{path} has {len(times)} arrivals, {number} are asked for")
    return [time - times[0] for time in times] if times else []
