"""UserClasses: the objects of users' classes that a worker has loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from core.class_users import ClassUsers
from core.handles import LoadedComponent, ModelKey
from core.run_class import RunClass
from core.validation import shorten

MAX_WORDS = 2000
"""Most characters of an error of a user's class that are passed on: a message carries them."""


class UserClass(Protocol):
    """What a class of a user has, see `core.run_class.RunClass`."""

    def load(self, device: str, dtype: torch.dtype) -> object: ...
    def execute(self, **inputs: object) -> object: ...


class UserClasses:
    """One per worker. Classes of one path and dtype share their object. Changed in the loader's thread alone."""

    def __init__(
        self, configs: Iterable[RunClass] = (), users: Mapping[str, Collection[str]] = MappingProxyType({})
    ) -> None:
        """configs: of all classes, loaded or not. users: see ClassUsers."""
        self._users = ClassUsers(configs, users)
        self._loaded: dict[ModelKey, tuple[UserClass, LoadedComponent]] = {}

    @property
    def configs(self) -> Mapping[str, RunClass]:
        """Name -> class, loaded or not."""
        return self._users.by_name

    def add(self, workflow: str, configs: Iterable[RunClass]) -> None:
        """Note a further workflow, with all classes that it names."""
        self._users.add(workflow, configs)

    def forget(self, workflow: str) -> list[RunClass]:
        """Forget a workflow, and the classes that no other one names, which are returned."""
        return self._users.drop(workflow)

    def of(self, name: str) -> UserClass:
        """The object of a class that is loaded. Raises KeyError for another."""
        return self._loaded[self.configs[name].key][0]

    def find(self, key: ModelKey) -> LoadedComponent | None:
        """A class, if it is loaded."""
        found = self._loaded.get(key)
        return None if found is None else found[1]

    def put(self, made: UserClass, loaded: LoadedComponent) -> None:
        """Put a class that was just loaded in use."""
        self._loaded[loaded.key] = made, loaded

    def drop(self, key: ModelKey) -> None:
        """Drop a class, with all that it has; nothing if it is not loaded."""
        self._loaded.pop(key, None)


def in_words(error: BaseException) -> str:
    """What a user's class has raised. Its own text may fail, too."""
    try:
        return f"{type(error).__name__}: {shorten(str(error), MAX_WORDS)}"
    except Exception:
        return type(error).__name__
