"""How much is measured: the sizes of a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.baselines.systems import SYSTEMS


@dataclass(frozen=True)
class Plan:
    """Loads are shares of the throughput of diffusers one at a time."""

    # Closed loops; the numbers of edits are for systems that compute every token.
    concurrency: int = 16
    throughput_edits: int = 16
    many_steps_edits: int = 8
    aware_share: int = 4  # times as many edits for mask-aware systems, whose edits differ
    warm_ups: int = 8
    # Closed loops of edits that leave out steps
    steps_clients: int = 8
    steps_edits: int = 16
    steps_rounds: int = 2
    steps_quality_edits: int = 12
    # Poisson arrivals, diffusers against Stencil
    headline_warm_ups: int = 20
    headline_load: float = 0.95
    headline_edits: int = 300
    headline_seeds: int = 3
    # Poisson arrivals, Stencil alone
    keep_up_loads: tuple[float, ...] = (1.6,)
    keep_up_edits: int = 120
    # Other parts
    quality_edits: int = 200
    large_edits: int = 3
    steps: int = 8
    many_steps: int = 28

    def number_of(self, system: str, number: int) -> int:
        """Edits for `system`, where one that computes every token gets `number`."""
        return number * self.aware_share if SYSTEMS[system].is_mask_aware else number


FULL = Plan()
SHORT = Plan(
    throughput_edits=8,
    many_steps_edits=4,
    aware_share=2,
    warm_ups=4,
    steps_edits=4,
    steps_rounds=1,
    steps_quality_edits=2,
    headline_warm_ups=4,
    headline_edits=12,
    headline_seeds=1,
    keep_up_edits=8,
    quality_edits=8,
    large_edits=1,
)
"""Only shows that it works: the figures mean nothing."""
