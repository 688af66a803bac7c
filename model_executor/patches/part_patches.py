"""PartPatches: the adapters in use in one loaded part of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from model_executor.patches.adapters import Adapter, Layers

Prepared = TypeVar("Prepared")


class PartPatches(ABC, Generic[Prepared]):
    """Prepared: an adapter that fits the part, ready to be put in use at once."""

    @abstractmethod
    def prepare(self, adapter: Adapter, layers: Layers) -> Prepared:
        """Fit an adapter. layers: those of it that are this part's. Changes nothing: any thread may call it. Raises
        ConfigError if it changes a layer that is not there or has another size."""

    @abstractmethod
    def put(self, patch: str, prepared: Prepared) -> None:
        """Use an adapter for the requests with this patch."""

    @abstractmethod
    def drop(self, patch: str) -> None:
        """Drop a patch's adapter, if it has one here. No request uses it; others' passes may run meanwhile."""


AnyPatches = PartPatches[Any]
