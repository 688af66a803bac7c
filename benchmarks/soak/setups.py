"""Setup: what a soak starts, and how it disturbs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.soak.faults import FAULTS, Act, kill_one_worker


@dataclass(frozen=True)
class Setup:
    """calm_seconds: least time from the end of a fault to the next. A request that is in three deaths is given up, so
    there must be time for requests to finish. may_restart: whether the faults end engines.
    """

    num_engines: int
    num_ranks: int  # workers of each engine
    fault_seconds: float  # from one fault to the next
    calm_seconds: float
    faults: Mapping[str, Act]
    may_restart: bool
    degree: int = 1  # workers that compute each step together

    @property
    def flags(self) -> tuple[str, ...]:
        """The server's."""
        sizes = {
            "--data-parallel-size": self.num_engines,
            "--workers-per-engine": self.num_ranks,
            "--degree": self.degree,
        }
        return tuple(str(word) for flag in sizes.items() for word in flag)

    def __str__(self) -> str:
        engines = "one engine" if self.num_engines == 1 else f"{self.num_engines} engines"
        ranks = "" if self.num_ranks == 1 else f" with {self.num_ranks} workers"
        ranks += "" if self.degree == 1 else f", {self.degree} for each step"
        return f"{engines}{ranks}, a fault every {self.fault_seconds:g} s"


ENGINES = Setup(2, 1, 30.0, 15.0, FAULTS, may_restart=True)
"""Every fault, on two engines."""

SINGLE_DEATHS = Setup(1, 2, 20.0, 10.0, {"one worker killed": kill_one_worker}, may_restart=False)
"""One of two workers is killed, while the other goes on."""
