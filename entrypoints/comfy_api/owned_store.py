"""OwnedStore: values of several owners in memory, within limits, of which the oldest are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The most that one owner may have, and all together: numbers of values, and their bytes."""

    number: int
    nbytes: int
    number_in_all: int
    nbytes_in_all: int


class OwnedStore(Generic[K, V]):
    """Keys are of their owner alone. A value that replaces another one counts as new."""

    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self._values: dict[tuple[str, K], tuple[V, int]] = {}  # -> (value, bytes)
        self._nbytes = 0
        self._of_owner: dict[str, OrderedDict[K, int]] = {}  # owner -> key -> bytes, the oldest first
        self._nbytes_of: dict[str, int] = {}

    def put(self, owner: str, key: K, value: V, nbytes: int) -> bool:
        """Keep a value; forget the owner's oldest ones, and then those of who has most beside it, until it fits. False:
        it is too large for an owner; nothing has changed.
        """
        if nbytes > min(self._limits.nbytes, self._limits.nbytes_in_all):
            return False
        self.remove(owner, key)
        self._values[owner, key] = value, nbytes
        self._of_owner.setdefault(owner, OrderedDict())[key] = nbytes
        self._nbytes += nbytes
        self._nbytes_of[owner] = self._nbytes_of.get(owner, 0) + nbytes
        limits = self._limits
        while len(self._of_owner.get(owner, ())) > limits.number or self._nbytes_of.get(owner, 0) > limits.nbytes:
            self.remove(owner, next(iter(self._of_owner[owner])))
        while len(self._values) > limits.number_in_all or self._nbytes > limits.nbytes_in_all:
            greediest = max(self._nbytes_of, key=lambda other: self._nbytes_of[other] - nbytes * (other == owner))
            self.remove(greediest, next(iter(self._of_owner[greediest])))
        return True

    def use(self, owner: str, key: K) -> V | None:
        """As `get`; the value counts as new."""
        if (found := self._values.get((owner, key))) is None:
            return None
        self._of_owner[owner].move_to_end(key)
        return found[0]

    def get(self, owner: str, key: K) -> V | None:
        """None: the owner has none of this key."""
        found = self._values.get((owner, key))
        return None if found is None else found[0]

    def remove(self, owner: str, key: K) -> None:
        """Forget a value, if there is one."""
        found = self._values.pop((owner, key), None)
        if found is None:
            return
        self._nbytes -= found[1]
        self._nbytes_of[owner] -= found[1]
        del self._of_owner[owner][key]
        if not self._of_owner[owner]:
            del self._of_owner[owner], self._nbytes_of[owner]

    def of(self, owner: str) -> Iterator[tuple[K, V]]:
        """An owner's values, the oldest first."""
        for key in tuple(self._of_owner.get(owner, ())):
            yield key, self._values[owner, key][0]
