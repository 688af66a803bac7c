"""UserClasses: the objects of users' classes that a worker has loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

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
    """One per worker. Classes of one path and dtype share their object."""

    def __init__(self, configs: Iterable[RunClass] = ()) -> None:
        """configs: of all classes, loaded or not."""
        self.configs = {each.name: each for each in configs}
        self._loaded: dict[ModelKey, tuple[UserClass, LoadedComponent]] = {}

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
