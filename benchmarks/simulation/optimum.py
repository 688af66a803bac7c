"""The optimum of DDiT (section 4.2.2, Algorithm 1, appendix A): devices and a degree for every class of requests, so
that least device time is occupied, where all that comes is known before.

Where the printed algorithm is wrong, this differs:

- Line 19 takes a minimum over one value and so keeps the last choice of k and p; this keeps the least.
- Lines 3 and 4 begin with 0, which is the least of all; this begins with infinity.
- It gives every device behind the first class's to some class; this may leave any of them out.
- Equation 7 halves all of an M/M/c queue's time for M/D/c. Constant service halves the wait alone: the service itself
  takes its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import ceil, factorial, inf
from typing import NamedTuple


class Share(NamedTuple):
    """What one class gets."""

    num_devices: int
    degree: int
    num_instances: int


class Optimum(NamedTuple):
    """occupied: device-seconds, infinite where the devices cannot serve all."""

    occupied: float
    shares: tuple[Share, ...]  # by class


Occupy = Callable[[int, float, int], float]
"""(class, seconds of a request, instances) -> seconds for which each device of the class is occupied."""


def optimum(machines: Sequence[int], seconds: Sequence[Mapping[int, float]], occupy: Occupy) -> Optimum:
    """Algorithm 1. machines: devices of each machine. seconds: by class, degree -> of a request."""
    num_devices, starts = sum(machines), _starts(machines)
    best = [[inf] * (len(seconds) + 1) for _ in range(num_devices + 1)]
    choice: dict[tuple[int, int], Share] = {}
    for i in range(num_devices + 1):
        best[i][0] = 0.0
    for j, of_class in enumerate(seconds, start=1):
        for i in range(1, num_devices + 1):
            best[i][j] = best[i - 1][j]
            for k in range(1, i + 1):
                if best[i - k][j - 1] == inf:
                    continue
                for degree, of_request in of_class.items():
                    instances = partition(starts, i - k, i, degree)
                    if not instances:
                        continue
                    occupied = best[i - k][j - 1] + k * occupy(j - 1, of_request, instances)
                    if occupied < best[i][j]:
                        best[i][j], choice[i, j] = occupied, Share(k, degree, instances)
    return Optimum(best[num_devices][len(seconds)], _traced(choice, num_devices, len(seconds)))


def _traced(choice: Mapping[tuple[int, int], Share], num_devices: int, num_classes: int) -> tuple[Share, ...]:
    shares = list[Share]()
    for j in range(num_classes, 0, -1):
        while num_devices and (num_devices, j) not in choice:
            num_devices -= 1  # a device that is left out
        if not num_devices:
            return ()
        shares.append(share := choice[num_devices, j])
        num_devices -= share.num_devices
    return tuple(reversed(shares))


def _starts(machines: Sequence[int]) -> list[int]:
    """Where machines begin, and the last one ends."""
    starts = [0]
    for number in machines:
        starts.append(starts[-1] + number)
    return starts


def partition(starts: Sequence[int], first: int, end: int, degree: int) -> int:
    """BandwidthAwarePartition: how many groups of `degree` devices are in the devices from `first` to before `end`,
    where each is within one machine. starts: where machines begin, and the last one ends.
    """
    pairs = pairwise(starts)
    return sum(max(0, min(end, after) - max(first, before)) // degree for before, after in pairs)


def batch_model(numbers: Sequence[int]) -> Occupy:
    """All requests are there at the start (equation 3). numbers: of requests, by class."""
    return lambda index, seconds, instances: ceil(numbers[index] / instances) * seconds


def queue_model(rates: Sequence[float]) -> Occupy:
    """Requests come at random (equations 6 and 7): the mean time that one of them is there. rates: per second, by
    class.
    """
    return lambda index, seconds, instances: queue_seconds(rates[index], seconds, instances)


def queue_seconds(rate: float, seconds: float, servers: int) -> float:
    """Mean time in an M/D/c queue: the service, and half of the wait of M/M/c, which is exact for one server; infinite
    where requests come faster than they are served.
    """
    offered = rate * seconds
    load = offered / servers
    if load >= 1:
        return inf
    last = offered**servers / factorial(servers) / (1 - load)
    empty = 1 / (last + sum(offered**number / factorial(number) for number in range(servers)))
    return seconds + last * empty * seconds / servers / (1 - load) / 2
