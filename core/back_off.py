"""Back-off: waits that double, before what has failed is tried again."""

from __future__ import annotations


def doubled(first: float, longest: float, times: int) -> float:
    """The wait after something has failed `times` times, from 1: `first`, doubled for every further time, but at most
    `longest`. All in seconds.
    """
    return min(longest, first * 2.0 ** min(times - 1, 64))
