"""Setup: what a soak starts, and how it disturbs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.soak.faults import FAULTS, Act, kill_one_worker, take_weights_away
from benchmarks.soak.machine_faults import MACHINE_FAULTS
from tools.random_checkpoints import make_flux_fill


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
    num_models: int = 0  # small ones with random weights, which take turns; 0: the embedded model alone
    num_places: int = 0  # models that a worker has room for
    is_on_ray: bool = False  # each engine on a machine of a Ray cluster

    def make_checkpoints(self, folder: Path) -> dict[str, Path]:
        """Model -> its checkpoint, for the models that take turns."""
        return {f"m{seed}": make_flux_fill(folder / f"m{seed}", seed=seed) for seed in range(self.num_models)}

    def flags(self, checkpoints: Mapping[str, Path]) -> tuple[str, ...]:
        """The server's."""
        sizes = {
            "--data-parallel-size": self.num_engines,
            "--workers-per-engine": self.num_ranks,
            "--degree": self.degree,
        }
        flags = [str(word) for flag in sizes.items() for word in flag]
        if checkpoints:
            nbytes = max(
                sum(file.stat().st_size for file in each.glob("*/*.safetensors")) for each in checkpoints.values()
            )
            flags += ["--model-bytes", str(self.num_places * nbytes)]
        return (*flags, *(word for name, path in checkpoints.items() for word in ("--model", f"{name}={path}")))

    def __str__(self) -> str:
        engines = "one engine" if self.num_engines == 1 else f"{self.num_engines} engines"
        ranks = "" if self.num_ranks == 1 else f" with {self.num_ranks} workers"
        ranks += "" if self.degree == 1 else f", {self.degree} for each step"
        models = f", {self.num_models} models with room for {self.num_places} on each" if self.num_models else ""
        machines = " on machines of a Ray cluster" if self.is_on_ray else ""
        return f"{engines}{ranks}{machines}{models}, a fault every {self.fault_seconds:g} s"


ENGINES = Setup(2, 1, 30.0, 15.0, FAULTS, may_restart=True)
"""Every fault, on two engines."""

SINGLE_DEATHS = Setup(1, 2, 20.0, 10.0, {"one worker killed": kill_one_worker}, may_restart=False)
"""One of two workers is killed, while the other goes on."""

TURNS = replace(
    SINGLE_DEATHS,
    faults={"one worker killed": kill_one_worker, "weights gone": take_weights_away},
    num_models=5,
    num_places=1,
)
"""Single deaths on an engine with more models than fit, whose weights cannot always be read: models take turns, and
loads fail."""

ON_RAY = replace(ENGINES, fault_seconds=60.0, faults=MACHINE_FAULTS, is_on_ray=True)
"""Two engines on two machines of a Ray cluster, each of which may die or stop."""
