"""How much is measured: the sizes of a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.baselines.systems import SYSTEMS

AREAS = {"public": 0.19, "flashps-prod": 0.11}
"""Distributions of mask areas and their means."""


@dataclass(frozen=True)
class Plan:
    """Edits, arrivals and rates. Loads are shares of what diffusers serves one at a time. *_edits: of systems that
    compute every token, whose edits are all alike; times `aware_share` of those that do not. headline_*: the comparison
    at `headline_load`. window: seconds that arrivals of the rate sweep take.
    """

    concurrency: int = 16
    throughput_edits: int = 16
    many_steps_edits: int = 8
    aware_share: int = 4
    warm_ups: int = 8
    headline_warm_ups: int = 20
    headline_load: float = 0.95
    headline_edits: int = 300
    headline_seeds: int = 3
    keep_up_loads: tuple[float, ...] = (1.6,)
    keep_up_edits: int = 120
    loads: tuple[float, ...] = (0.5, 1.4)
    window: float = 9.0
    quality_edits: int = 200
    batch_edits: int = 8
    large_edits: int = 3
    steps: int = 8
    many_steps: int = 28

    def number_of(self, system: str, number: int) -> int:
        """Edits that `system` is given where one that computes every token gets `number`."""
        return number * self.aware_share if SYSTEMS[system].is_mask_aware else number


FULL = Plan()
SHORT = Plan(
    throughput_edits=8,
    many_steps_edits=4,
    aware_share=2,
    warm_ups=4,
    headline_warm_ups=4,
    headline_edits=12,
    headline_seeds=1,
    keep_up_edits=8,
    loads=(0.5, 1.4),
    window=5.0,
    quality_edits=8,
    batch_edits=8,
    large_edits=1,
)
"""To see that all of it works; its figures mean nothing."""
