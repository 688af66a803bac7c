"""WeightsRoom: refuses weights that cannot fit into a worker's memory, before they are read.

What it counts is the least that weights take: headers of files first, and where these say no, the layers that are kept,
which may be fewer. What else a server needs is measured once its first model is loaded (`probes/memory_probe.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from core.errors import ConfigError, OutOfMemoryError
from core.handles import LoadedComponent, ModelKey
from core.memory_budget import Room
from core.scheduling.ops.text_encode import TEXT_ENCODE
from model_executor.worker.loading.resident import ResidentModels


class WeightsRoom:
    """The room of one worker's models. Components that models share count once."""

    def __init__(self, models: ResidentModels, room: Room, *, is_shared_in_turns: bool = False) -> None:
        """is_shared_in_turns: whether components are dropped for others, so that what is loaded now may not stay."""
        self._models = models
        self._room = room
        self._is_shared_in_turns = is_shared_in_turns

    def check_models(self) -> None:
        """Raises ConfigError for a model that does not fit by itself."""
        for name in self._models.keys:
            if not self._room.has(needed := self._sizes(self._models.needs(name))):
                raise ConfigError(self._room.why_not(name, needed))

    def check_next(self, key: ModelKey) -> None:
        """Raises OutOfMemoryError if a component does not fit beside those that are loaded; where these stay, also if
        every model that needs it lacks room for the rest of it. KeyError: it is of no model."""
        held = {each.key for each in self._models.loaded}
        users = self._models.users_of(key)
        wanted = {name: {key} if self._is_shared_in_turns else {*self._models.needs(name)} - held for name in users}
        if not any(self._room.has(self._sizes([*held, *keys])) for keys in wanted.values()):
            name, keys = next(iter(wanted.items()))
            raise OutOfMemoryError(self._room.why_not(name, self._least(keys), self._least(held)))

    def _sizes(self, keys: Iterable[ModelKey]) -> list[LoadedComponent]:
        """These components with their bytes: as they are loaded, or as files say; if that is too much, the least they
        may take."""
        distinct = dict.fromkeys(keys)
        sizes = [self._models.find(key) or LoadedComponent(key, self._models.expected_bytes(key)) for key in distinct]
        return sizes if self._room.has(sizes) else self._least(distinct)

    def _least(self, keys: Iterable[ModelKey]) -> list[LoadedComponent]:
        return [self._known(key) or LoadedComponent(key, self._models.least_bytes(key)) for key in keys]

    def _known(self, key: ModelKey) -> LoadedComponent | None:
        """A loaded component whose bytes are what it keeps: families drop layers of text encoders."""
        return None if key.component == TEXT_ENCODE.component else self._models.find(key)
