"""ByteCache: keeps values within a byte budget, and evicts the least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteCache(Generic[Key, Value]):
    """Values by key."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()  # in order of last use, with their bytes
        self.nbytes = 0

    def get(self, key: Key) -> Value | None:
        """The value, which counts as used now; None: it is not there."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: Key, value: Value, nbytes: int) -> None:
        """Keep a value in the place of one with the same key, unless it exceeds the budget by itself. nbytes: that it
        takes."""
        self.nbytes -= self._values.pop(key, (value, 0))[1]
        if nbytes > self._max_bytes:
            return
        self._values[key] = value, nbytes
        self.nbytes += nbytes
        while self.nbytes > self._max_bytes:
            self.nbytes -= self._values.popitem(last=False)[1][1]
