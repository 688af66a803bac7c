"""WeightsRoom: refuses weights that cannot fit into a worker's memory, before they are read.

What it counts is the least that weights take: headers of files first, and where these say no, the layers that are kept,
which may be fewer. What else a server needs is measured once its first model is loaded (`probes/memory_probe.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from core.errors import ConfigError, OutOfMemoryError
from core.handles import LoadedComponent, ModelKey
from core.memory_budget import Room, at_one_time
from core.scheduling.ops.text_encode import TEXT_ENCODE
from model_executor.worker.loading.resident import ResidentModels


class WeightsRoom:
    """The room of one worker's models. Components that models share count once. Of those that lie in host memory, the
    largest set that is used at one time counts as on the device."""

    def __init__(
        self, models: ResidentModels, room: Room, host: Room | None = None, *, is_shared_in_turns: bool = False
    ) -> None:
        """room: on the device. host: in host memory, for weights that lie there; None: there are none.
        is_shared_in_turns: whether components are dropped for others, so that what is loaded now may not stay."""
        self._models = models
        self._room = room
        self._host = host
        self._is_shared_in_turns = is_shared_in_turns

    def check_models(self) -> None:
        """Raises ConfigError for a model that does not fit by itself."""
        for name in self._models.keys:
            if reason := self._why_not(name, self._models.needs(name)):
                raise ConfigError(reason)

    def check_next(self, key: ModelKey) -> None:
        """Raises OutOfMemoryError if a component does not fit beside those that are loaded; where these stay, also if
        every model that needs it lacks room for the rest of it. KeyError: it is of no model."""
        held = {each.key for each in self._models.loaded}
        users = self._models.users_of(key)
        alone = self._is_shared_in_turns or self._models.is_on_demand(key)
        wanted = {name: {key} if alone else {*self._models.needs(name)} - held for name in users}
        reasons = [self._why_not(name, keys, held) for name, keys in wanted.items()]
        if all(reasons):
            raise OutOfMemoryError(reasons[0])

    def _why_not(self, name: str, keys: Iterable[ModelKey], held: Collection[ModelKey] = ()) -> str:
        """Why components that a model needs do not fit beside those that are held; "": they do."""
        every = [*dict.fromkeys([*held, *keys])]
        for room, counted in ((self._room, self._on_device), (self._host, self._on_host)):
            if room is None or room.has(counted(self._expected(every))):
                continue
            if not room.has(least := counted(known := self._least(every))):
                away = [each for each in known if each not in least] if room is self._room else []
                theirs = [each for each in least if each.key in held]
                return room.why_not(name, [each for each in least if each not in theirs], theirs, away)
        return ""

    def _on_device(self, sizes: Iterable[LoadedComponent]) -> list[LoadedComponent]:
        return at_one_time(sizes, self._models.in_turn)

    def _on_host(self, sizes: Iterable[LoadedComponent]) -> list[LoadedComponent]:
        return [each for each in sizes if self._models.is_offloaded(each.key)]

    def _expected(self, keys: Iterable[ModelKey]) -> list[LoadedComponent]:
        """These components with their bytes: as they are loaded, or as files say."""
        return [self._models.find(key) or LoadedComponent(key, self._models.expected_bytes(key)) for key in keys]

    def _least(self, keys: Iterable[ModelKey]) -> list[LoadedComponent]:
        """These components with the least bytes that they may take."""
        return [self._known(key) or LoadedComponent(key, self._models.least_bytes(key)) for key in keys]

    def _known(self, key: ModelKey) -> LoadedComponent | None:
        """A loaded component whose bytes are what it keeps: families drop layers of text encoders."""
        return None if key.component == TEXT_ENCODE.component else self._models.find(key)
