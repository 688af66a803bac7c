"""useful_degree: up to which number more ranks are useful to a step."""

from __future__ import annotations

from collections.abc import Mapping

MIN_REDUCTION = 1 / 3
"""Least share of a step's time that a doubling of its ranks must save for the ranks to be useful."""


def useful_degree(seconds: Mapping[int, float]) -> int:
    """The largest degree 1, 2, 4, ... up to which every doubling saves at least a share MIN_REDUCTION of a step's time,
    z of equation 4 of DDiT (section 4.2.3). seconds: degree -> seconds of a step, 0 if unknown; degree 1 is among
    them.

    DDiT prints another rule: the degree whose z is largest. With the speeds that its text gives, this is 2 for 144p
    (where 2 ranks are slower than one), 240p and 360p; its own values are 1, 2 and 4, which a threshold gives.
    """
    degree = 1
    while (now := seconds[degree]) and (after := seconds.get(2 * degree)) and 1 - after / now >= MIN_REDUCTION:
        degree *= 2
    return degree
