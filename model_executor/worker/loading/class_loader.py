"""ClassLoader: imports the classes of users, and makes and loads their objects."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import ConfigError
from core.handles import LoadedComponent, ModelKey
from core.run_class import RunClass
from model_executor.device_failures import is_out_of_memory
from model_executor.worker.loading.resident import weight_bytes
from model_executor.worker.stores.time_limits import TimeLimits
from model_executor.worker.stores.user_classes import UserClass, UserClasses, in_words


class ClassLoader:
    """classes: where they are put in use. device: that they are loaded on. limits: of the time that loads take."""

    def __init__(self, classes: UserClasses, device: torch.device, limits: TimeLimits) -> None:
        """Imports all classes. Raises ConfigError for one that cannot be used."""
        self._classes, self._device, self._limits = classes, device, limits
        self._types = {each.key: _imported(each) for each in classes.configs.values()}

    def add(self, config: RunClass) -> None:
        """Import one more class. Raises as the constructor."""
        with self._limits.of_import(config):
            self._types[config.key] = _imported(config)

    def forget(self, gone: Iterable[RunClass]) -> None:
        """Forget classes that nobody names any more, and the texts that they alone are in."""
        kept, kept_modules = set[ModelKey](), set[str]()
        for each in list(self._classes.configs.values()):
            kept.add(each.key)
            kept_modules.add(each.module)
        for config in gone:
            if config.key not in kept:
                self._types.pop(config.key, None)
            if config.source and config.module not in kept_modules:
                sys.modules.pop(config.module, None)

    def load(self, key: ModelKey) -> LoadedComponent:
        """Load a class, unless it is loaded. Raises ConfigError that names it, whatever it raises, but for a lack of
        memory."""
        if (known := self._classes.find(key)) is not None:
            return known
        alike = [each for each in list(self._classes.configs.values()) if each.key == key]
        if not alike:
            raise ConfigError("a worker that was restarted could not import it again; the log says why")
        config = max(alike, key=lambda each: each.load_seconds)
        try:
            with self._limits.of_load(config):
                made: UserClass = self._types[key](**config.settings)
                told = made.load(str(self._device), getattr(torch, config.dtype))
            loaded = LoadedComponent(key, told if type(told) is int and told >= 0 else _attribute_bytes(made))
        except BaseException as error:  # a user's class may raise anything; panics of Rust are no Exceptions
            if is_out_of_memory(error):
                raise
            raise ConfigError(f"{config.name} ({config.path}): {in_words(error)}") from error
        self._classes.put(made, loaded)
        return loaded

    def unload(self, key: ModelKey) -> None:
        """Drop a class, with all that it has."""
        self._classes.drop(key)


def _imported(config: RunClass) -> type[Any]:
    """Raises ConfigError that names the class and the remedy."""
    path, _, name = config.path.partition(":")
    try:
        found = getattr(_module_of_text(path, config) if config.source else import_module(path), name)
    except BaseException as error:  # a user's module may raise anything
        remedy = "" if config.source else "; workers import it, so its folder must be on PYTHONPATH"
        why = f"{in_words(error)}{remedy}"
        raise ConfigError(f"classes: {config.name}: path {config.path}: {why}") from error
    if not isinstance(found, type) or inspect.isabstract(found):
        raise ConfigError(f"classes: {config.name}: path {config.path} is no class that can be made; name another")
    for method in ("load", "execute"):
        if not callable(getattr(found, method, None)):
            raise ConfigError(f"classes: {config.name}: path {config.path} has no method {method}; define it")
    return found


def _module_of_text(name: str, config: RunClass) -> ModuleType:
    """The module of a text that no import finds; it is run once, whichever of its classes are used."""
    if (known := sys.modules.get(name)) is not None:
        return known
    module = ModuleType(name)
    module.__file__ = config.file
    sys.modules[name] = module  # before it runs, as with an import: what it defines may look itself up
    try:
        exec(compile(config.source, config.file or name, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _attribute_bytes(made: object) -> int:
    """Bytes of an object that is a module, or of the tensors and modules that are its attributes."""
    if isinstance(made, nn.Module):
        return weight_bytes(made)
    held = {id(each): each for each in vars(made).values()} if hasattr(made, "__dict__") else {}
    tensors = sum(each.nbytes for each in held.values() if isinstance(each, Tensor))
    return tensors + sum(weight_bytes(each) for each in held.values() if isinstance(each, nn.Module))
