"""The least mean latency of a burst: a bound that no policy can be below.

Every schedule uses at most D devices. So let a device have a price at every time: what all requests pay for devices
together is at most D times the sum of all prices. If each of them alone chooses when it computes, on how many devices,
so that its latency plus what it pays is least, the sum over all, less D times the prices, is at most the sum of the
latencies of any schedule (Lagrange duality). This holds with any prices; those of `_prices` make it large.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from benchmarks.simulation.video_load import VideoLoad

BINS = 400
"""Prices are constant for so many parts of the time that is looked at."""

Array = npt.NDArray[np.float64]


def least_mean(load: VideoLoad, num_devices: int, names: Iterable[str]) -> float:
    """Seconds. names: the class of each request, of one or more; all come at once."""
    numbers = {name: number for name, number in Counter(names).items() if number}
    classes = sorted(numbers, key=lambda name: load.request_seconds(name, 1))
    best = 0.0
    for degrees in product(*(_efficient(load.speed[name]) for name in classes)):
        taken = [_device_seconds(load, name, degree) for name, degree in zip(classes, degrees, strict=True)]
        prices = _prices(load, num_devices, [(numbers[name], each) for name, each in zip(classes, taken, strict=True)])
        paid = sum(number * _least(load, name, prices) for name, number in numbers.items())
        best = max(best, paid - num_devices * prices.total)
    return best / sum(numbers.values())


@dataclass(frozen=True)
class Prices:
    """Of a device, by time."""

    of_bin: Array  # of a second of one device, in seconds of latency; it never rises
    width: float  # seconds of a bin

    @property
    def total(self) -> float:
        return float(self.of_bin.sum()) * self.width

    def until(self, seconds: Array) -> Array:
        """The sum of all prices up to these times."""
        edges = np.arange(len(self.of_bin) + 1) * self.width
        total: Array = np.interp(seconds, edges, np.concatenate([[0.0], np.cumsum(self.of_bin) * self.width]))
        return total


def _prices(load: VideoLoad, num_devices: int, queue: Sequence[tuple[int, float]]) -> Prices:
    """Where one after the other is served on all devices as on one, a second of all of them delays each that is left by
    a second: with every request that ends the price falls by one for each device. queue: (requests, device-seconds of
    one) by class, in the order in which they are served.
    """
    ends = np.cumsum([number * taken for number, taken in queue]) / num_devices
    longest = max(min(load.request_seconds(name, degree) for degree in of) for name, of in load.speed.items())
    # Later than this none has to end: devices cost nothing in the last bins, which are long enough for any request.
    width = float(ends[-1] + longest) / (BINS - 2)
    middles = (np.arange(BINS) + 0.5) * width
    of_class = np.searchsorted(ends, middles)
    falls = np.where(of_class < len(queue), 1.0 / np.array([*(taken for _, taken in queue), np.inf])[of_class], 0.0)
    after = np.cumsum(falls[::-1])[::-1] * width
    return Prices(after - falls * width / 2, width)


def _least(load: VideoLoad, name: str, prices: Prices) -> float:
    """The least sum of a request's latency and of what it pays. Steps that end within a bin may use all of it, and
    count as done at its beginning, so that this is never too much.
    """
    bins = len(prices.of_bin)
    pieces = _pieces(load.speed[name])
    cost = np.concatenate([prices.of_bin * devices / speed for devices, speed in pieces])  # of a unit of work
    work = np.concatenate([np.full(bins, speed * prices.width) for _, speed in pieces])
    of_bin = np.tile(np.arange(bins), len(pieces))
    cheapest = np.argsort(cost, kind="stable")
    cost, work, of_bin = cost[cheapest], work[cheapest], of_bin[cheapest]
    needed = load.steps * load.step_seconds(name, 1) * load.speed[name][1]
    ends: Array = np.linspace(prices.width, bins * prices.width, bins)
    decode = load.decode_seconds(name)
    after = prices.until(ends + decode) - prices.until(ends) + ends - prices.width + decode
    return min(_paid(cost, np.where(of_bin <= last, work, 0.0), needed) + float(after[last]) for last in range(bins))


def _paid(cost: Array, work: Array, needed: float) -> float:
    """Of so much work, the cheapest first; infinite if there is not so much."""
    before = np.cumsum(work) - work
    done = np.clip(needed - before, 0.0, work)
    return float(done @ cost) if done.sum() >= needed * (1 - 1e-9) else np.inf


def _pieces(speed: Mapping[int, float]) -> list[tuple[int, float]]:
    """(devices, speed) that are added one after the other, each adding less by device than the one before: the concave
    hull of the speeds by degree, since one may be used for part of the time, and another for the rest.
    """
    hull = [(0, 0.0)]
    for point in sorted(speed.items()):
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], point):
            hull.pop()
        hull.append(point)
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(hull) if b[1] > a[1]]


def _gain(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def _efficient(speed: Mapping[int, float]) -> list[int]:
    """Degrees at which a device does at least half of what one alone does: with others bounds are low."""
    return [degree for degree, of in speed.items() if of >= degree / 2]


def _device_seconds(load: VideoLoad, name: str, degree: int) -> float:
    """Of a request whose steps have this degree."""
    return load.steps * degree * load.step_seconds(name, degree) + load.decode_seconds(name)
