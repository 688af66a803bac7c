"""ModelMachine: a Machine whose ranks load components beside their steps, and are restarted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.simulation.machine import Machine
from core.handles import ModelKey

BESIDE_A_LOAD = 38 / 34
"""What a step takes beside a load on its rank, as a multiple of what it takes alone: docs/results/model_load.json."""


@dataclass(frozen=True)
class ModelMachine(Machine):
    """sizes: bytes of each component. restart: seconds from a death until the rank serves again, after the wait before
    it, with its first model.
    """

    sizes: Mapping[ModelKey, int] = field(default_factory=dict)
    load_bytes_per_second: float = 5e9
    restart: float = 20.0

    def load_seconds(self, key: ModelKey) -> float:
        return self.sizes[key] / self.load_bytes_per_second

    def load_slowness(self) -> float:
        return BESIDE_A_LOAD

    def start_seconds(self) -> float:
        return self.restart
