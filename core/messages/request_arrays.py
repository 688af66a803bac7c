"""The arrays of a request that an engine reads and writes, and the request with its arrays at other places.

An engine of another machine has an arena of its own: it gets copies of what it reads, and its results are copied back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from core.handles import ArrayRef
from core.messages.engine import EngineRequest, PrimeTemplate
from core.messages.specs import EditSpec, MaskSpec

T = TypeVar("T")

WRITTEN = ("outputs", "previews", "kept_states")
"""Fields of specs that hold memory for results; all other arrays are read."""


def arrays_read(message: EngineRequest | PrimeTemplate) -> list[ArrayRef]:
    """What an engine reads for a request and does not write itself, each place once."""
    return _read(message, arrays_written(message))


def _read(message: EngineRequest | PrimeTemplate, written: Sequence[ArrayRef]) -> list[ArrayRef]:
    offsets = {ref.offset for ref in written}
    return [ref for ref in _largest(_refs(message)) if ref.offset not in offsets]


def arrays_written(message: EngineRequest | PrimeTemplate) -> list[ArrayRef]:
    """Memory for what an engine makes for a request, each place once."""
    if isinstance(message, PrimeTemplate):
        return []
    spec = message.spec
    results = [ref for name in WRITTEN for ref in _refs(getattr(spec, name, ()))]
    if isinstance(spec, EditSpec | MaskSpec) and spec.search is not None:  # the mask is found, and its tokens counted
        results += [spec.mask, msgspec.structs.replace(spec.active, shape=(spec.num_tokens,))]
    return _largest(results)


class Copied(NamedTuple):
    """Bytes that are copied for a request of an engine of another machine."""

    read: int  # before it begins
    written: int  # once it is done


def copied(message: EngineRequest | PrimeTemplate) -> Copied:
    """At most: previews that are never made are not copied."""
    written = arrays_written(message)
    return Copied(sum(map(_nbytes, _read(message, written))), sum(map(_nbytes, written)))


def moved(message: T, offsets: Mapping[int, int]) -> T:
    """A message with the same arrays at other places. offsets: offset of each array -> its new one."""
    return cast(T, _moved(message, offsets))


def _largest(refs: Iterable[ArrayRef]) -> list[ArrayRef]:
    """Each place once, with the largest array there; empty ones are nowhere."""
    found: dict[int, ArrayRef] = {}
    for ref in refs:
        if ref.size and (ref.offset not in found or _nbytes(found[ref.offset]) < _nbytes(ref)):
            found[ref.offset] = ref
    return list(found.values())


def _nbytes(ref: ArrayRef) -> int:
    return ref.size * np.dtype(ref.dtype).itemsize


_PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of most fields."""


def _refs(value: object) -> list[ArrayRef]:
    found: list[ArrayRef] = []
    _collect(value, found)
    return found


def _collect(value: object, found: list[ArrayRef]) -> None:
    """Add all that are in a value. For every request to another machine, before it is routed."""
    if isinstance(value, ArrayRef):
        found.append(value)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if type(each := getattr(value, name)) not in _PLAIN:
                _collect(each, found)
    elif isinstance(value, tuple):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)


def _moved(value: object, offsets: Mapping[int, int]) -> object:
    match value:
        case ArrayRef():
            return msgspec.structs.replace(value, offset=offsets[value.offset]) if value.size else value
        case msgspec.Struct():
            fields = {name: getattr(value, name) for name in value.__struct_fields__}
            changed = {name: new for name, old in fields.items() if (new := _moved(old, offsets)) is not old}
            return msgspec.structs.replace(value, **changed) if changed else value
        case tuple() if value:
            news = [_moved(each, offsets) for each in value]
            return value if all(new is old for new, old in zip(news, value, strict=True)) else tuple(news)
        case dict() if value:
            new = {name: _moved(each, offsets) for name, each in value.items()}
            return value if all(new[name] is value[name] for name in value) else new
        case _:
            return value
