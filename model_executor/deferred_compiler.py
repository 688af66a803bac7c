"""Has TorchDynamo, PyTorch's compiler front end, imported when something is compiled, and not with every process.

diffusers and transformers import it to mark functions that it must not look into. That takes a quarter of the time of
importing these libraries, and most processes compile nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

NAME = "torch._dynamo"

ALONE = frozenset({f"{NAME}._trace_wrapped_higher_order_op"})
"""Submodules that transformers uses, and that need nothing of the package."""

T = TypeVar("T")


def defer_compiler() -> None:
    """Defer the import of TorchDynamo; call it before diffusers and transformers are imported. Functions that they mark
    until then are not marked: a process that is to compile them should not call this.
    """
    if NAME in sys.modules:
        return
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.submodule_search_locations is None:
        return
    module = sys.modules[NAME] = _Deferred(NAME)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__path__, module.__package__ = spec.submodule_search_locations, NAME
    module.__dict__.update(_MARKS)
    sys.meta_path.insert(0, _Submodules(module))


class _Deferred(ModuleType):
    """The package, of which only the marks below and some submodules can be used without executing it. Whatever else is
    asked for executes it, in this object, as if it had just been imported.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.execute()
        return getattr(self, name)

    def execute(self) -> None:
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]
        for mark in _MARKS:
            del self.__dict__[mark]
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Submodules)]
        spec.loader.exec_module(self)


class _Submodules(MetaPathFinder):
    """Executes the package before its submodules, which count on that."""

    def __init__(self, package: _Deferred) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{NAME}.") or fullname in ALONE:
            return None
        self._package.execute()
        there = sys.modules.get(fullname)
        return None if there is None else ModuleSpec(fullname, _There(there))


class _There(Loader):
    """ "Loads" a module that is loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _unmarked(function: T) -> T:
    return function


def _not_disabled(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return _unmarked if function is None else function


_MARKS: dict[str, Callable[..., Any]] = {
    "allow_in_graph": _unmarked,
    "assume_constant_result": _unmarked,
    "disable": _not_disabled,
}
"""What decorates functions at import, for the compiler alone."""
