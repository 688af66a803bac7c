"""ModelSet: served models that consist of named components of given bytes, and how popular they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from benchmarks.simulation.scenario import MODEL
from core.handles import ModelKey
from core.model_info import ModelInfo

SHARED = ""
"""Content of components that all models of a set share."""


@dataclass(frozen=True)
class ModelSet:
    """models: name -> its components; those with equal keys are shared. sizes: bytes of each component. weights: of the
    requests to each model, in the order of `models`, above 0.
    """

    models: Mapping[str, tuple[ModelKey, ...]]
    sizes: Mapping[ModelKey, int]
    weights: Sequence[float]

    @classmethod
    def alike(
        cls, number: int, weights: Sequence[float], own: Mapping[str, int], shared: Mapping[str, int]
    ) -> ModelSet:
        """Models "0", "1", .. with components of their own and components that all of them share. own, shared: kind of
        component -> bytes.
        """
        common = [ModelKey(SHARED, kind) for kind in shared]
        models = {str(each): (*common, *(ModelKey(str(each), kind) for kind in own)) for each in range(number)}
        sizes = {key: (shared if key in common else own)[key.component] for keys in models.values() for key in keys}
        return cls(models, sizes, weights)

    @property
    def infos(self) -> dict[str, ModelInfo]:
        """Name -> facts, as a scheduler takes them."""
        return {name: msgspec.structs.replace(MODEL, name=name, components=keys) for name, keys in self.models.items()}

    def budget(self, number: int) -> int:
        """Bytes of the largest so many of these models together, on one rank."""
        by_size = sorted(self.models.values(), key=lambda keys: -sum(self.sizes[key] for key in keys))
        return sum(self.sizes[key] for key in {key for keys in by_size[:number] for key in keys})

    def draw(self, random: np.random.Generator, number: int) -> list[str]:
        """The models of so many requests."""
        weights = np.array(self.weights) / sum(self.weights)
        return [str(name) for name in random.choice(list(self.models), number, p=weights)]


def zipf(number: int, exponent: float) -> tuple[float, ...]:
    """Weights by Zipf's law, the first is the largest."""
    return tuple(rank**-exponent for rank in range(1, number + 1))
