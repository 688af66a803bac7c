"""WeightsRoom: refuses weights that cannot fit into a worker's memory, before they are read.

What it counts is the least that weights take: headers of files first, and where these say no, the layers that are kept,
which may be fewer. What else a server needs is measured once its first model is loaded (`probes/memory_probe.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from core.errors import ConfigError, OutOfMemoryError
from core.handles import LoadedComponent, ModelKey
from core.memory_budget import Room
from model_executor.worker.loading.resident import ResidentModels


class WeightsRoom:
    """The room of one worker's models. Components that models share count once."""

    def __init__(self, models: ResidentModels, room: Room) -> None:
        self._models = models
        self._room = room

    def check_models(self) -> None:
        """Raises ConfigError for a model that does not fit by itself."""
        for name in self._models.keys:
            if not self._room.has(needed := self._sizes(self._models.needs(name))):
                raise ConfigError(self._room.why_not(name, needed))

    def check_next(self, key: ModelKey) -> None:
        """Raises OutOfMemoryError if a component does not fit beside those that are loaded; KeyError for a component of
        no model."""
        held = [each.key for each in self._models.loaded]
        if not self._room.has(together := self._sizes([*held, key])):
            needed = [each for each in together if each.key == key]
            others = [each for each in together if each.key != key]
            raise OutOfMemoryError(self._room.why_not(self._models.user_of(key), needed, others))

    def _sizes(self, keys: Iterable[ModelKey]) -> list[LoadedComponent]:
        """These components with their bytes: as files say, or if that is too much, the least they may take."""
        distinct = dict.fromkeys(keys)
        sizes = [LoadedComponent(key, self._models.expected_bytes(key)) for key in distinct]
        if self._room.has(sizes):
            return sizes
        return [LoadedComponent(key, self._models.least_bytes(key)) for key in distinct]
