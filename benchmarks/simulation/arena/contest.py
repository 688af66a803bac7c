"""Contest: a load on a machine that several policies serve, and what is measured of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.simulation.compared import FORMER


class Metric(NamedTuple):
    """What is measured of a run."""

    name: str
    is_more_better: bool = False
    is_judged: bool = True  # whether a policy must not fall behind by it


IN_TIME = Metric("in time", is_more_better=True)
"""Share of the requests with an objective."""
MEAN, P95, P99 = Metric("mean latency"), Metric("P95 latency"), Metric("P99 latency")
"""In seconds."""

Values = Mapping[Metric, float]
Play = Callable[[str, int], Values]
"""(policy, seed) -> what is measured. Equal arguments give equal values."""


@dataclass(frozen=True)
class Contest:
    """play: can be sent to another process. policies: names that `play` takes. A policy is worse if it falls behind by
    more than the confidence interval, the share and the number together allow: the largest of the three counts.
    """

    name: str
    play: Play
    policies: tuple[str, ...]
    metrics: tuple[Metric, ...]
    most_seeds: int | None = None  # more than these take too long, or change nothing
    share: float = 0.02  # of the best former policy's mean
    number: float = 0.0  # in the metric's unit

    @property
    def former(self) -> tuple[str, ...]:
        """The policies that ours is compared with."""
        return tuple(name for name in self.policies if name in FORMER)


Results = Mapping[str, list[Values]]
"""Policy -> what is measured, by seed."""
