"""LoneLatency: what an edit takes alone, by its steps; objectives are multiples of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.load.client import Target, warm_up
from benchmarks.load.dataset import EditCall

LONE_EDITS = 5
"""Edits sent one by one with each of the least and the most steps."""


@dataclass(frozen=True)
class LoneLatency:
    """A line over the steps. Its points are medians of edits whose masks are alike."""

    seconds: float  # at no step
    per_step: float

    def of(self, steps: int) -> float:
        """Seconds that an edit with so many steps takes alone."""
        return self.seconds + self.per_step * steps

    def scaled(self, calls: Sequence[EditCall], scale: float) -> list[EditCall]:
        """These edits, each with `scale` times its own latency as its SLO, unless it has one."""
        return [replace(call, slo_ms=call.slo_ms or scale * 1e3 * self.of(call.steps)) for call in calls]


async def measure_lone(target: Target, calls: Sequence[EditCall], steps: Sequence[int]) -> LoneLatency:
    """Send the first LONE_EDITS of these edits with the least and with the most of these steps. Raises WarmUpError if
    one fails.
    """
    points = list[tuple[int, float]]()
    for number in sorted({min(steps), max(steps)}):
        run = await warm_up(target, [replace(call, steps=number) for call in calls[:LONE_EDITS]], 1)
        points.append((number, statistics.median(outcome.latency for outcome in run.outcomes)))
    (least, below), (most, above) = points[0], points[-1]
    per_step = (above - below) / (most - least) if most > least else 0.0
    return LoneLatency(below - per_step * least, per_step)
