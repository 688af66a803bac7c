"""MemoryTier: the places of entries in one in-memory tier of the activation cache, and the order of eviction.

It knows keys and byte counts, not an entry's state or why it is held. In the host tier an entry is a region of the page
arena; in device memory only bytes are counted, since a worker's own allocator places them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Protocol

from core.free_list import FreeList
from core.handles import Tier


class Space(Protocol):
    """What `MemoryTier` needs of a `FreeList`."""

    used_bytes: int

    def copy(self) -> Space: ...

    def extent(self, nbytes: int) -> int: ...

    def alloc(self, nbytes: int) -> int | None: ...

    def retake(self, start: int, end: int) -> bool: ...

    def free(self, start: int, end: int) -> tuple[int, int]: ...

    def check_integrity(self, chunks: Iterable[tuple[int, int]]) -> None: ...


class ByteCount:
    """Space that only counts bytes: a chunk fits if the sum does, and its offset is always 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used_bytes = 0

    def copy(self) -> ByteCount:
        other = ByteCount(self.size)
        other.used_bytes = self.used_bytes
        return other

    def extent(self, nbytes: int) -> int:
        return nbytes

    def alloc(self, nbytes: int) -> int | None:
        if self.used_bytes + nbytes > self.size:
            return None
        self.used_bytes += nbytes
        return 0

    def retake(self, start: int, end: int) -> bool:
        """Count end - start bytes again, if there is room."""
        return self.alloc(end - start) is not None

    def free(self, start: int, end: int) -> tuple[int, int]:
        """Give end - start bytes back; returns a range as long as all free bytes."""
        self.used_bytes -= end - start
        return 0, self.size - self.used_bytes

    def check_integrity(self, chunks: Iterable[tuple[int, int]]) -> None:
        assert self.used_bytes == sum(end - start for start, end in chunks) <= self.size, "used_bytes is wrong"


PROVEN_SHARE = 0.8
"""Share of the budget for idle proven entries; beyond it the oldest become ordinary, and are evicted sooner."""


class MemoryTier:
    """Entries are held or idle; idle ones are evicted, least recently used first, when room is needed.

    Proven entries (used more than once) are evicted after all others: a segmented LRU (Karedla, Love and Wherry,
    "Caching strategies to improve disk system performance", 1994). So templates that are edited once do not displace
    those that are edited repeatedly.
    """

    def __init__(self, name: Tier, nbytes: int) -> None:
        self.name = name
        self.budget_bytes = nbytes
        self._proven_limit = int(PROVEN_SHARE * nbytes)
        self._space: Space = self._empty_space()
        self._places: dict[str, tuple[int, int]] = {}  # key -> (start, end)
        # key -> bytes taken; idle entries, least recently used first
        self._ordinary: OrderedDict[str, int] = OrderedDict()
        self._proven: OrderedDict[str, int] = OrderedDict()
        self._idle_bytes = self._proven_bytes = 0  # of both, of the proven ones

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries, alignment included; never above the budget."""
        return self._space.used_bytes

    def offset(self, key: str) -> int:
        """Where an entry starts, in bytes from the arena's start; always 0 in device memory."""
        return self._places[key][0]

    def is_idle(self, key: str) -> bool:
        return key in self._ordinary or key in self._proven

    def hold(self, key: str) -> None:
        """Protect an entry from eviction."""
        nbytes = self._ordinary.pop(key, 0)
        if not nbytes:
            nbytes = self._proven.pop(key, 0)
            self._proven_bytes -= nbytes
        self._idle_bytes -= nbytes

    def let_go(self, key: str, is_proven: bool) -> None:
        """Make an entry evictable, as the most recently used one."""
        if key in self._ordinary or key in self._proven:
            self.hold(key)
        start, end = self._places[key]
        self._idle_bytes += end - start
        if not is_proven:
            self._ordinary[key] = end - start
            return
        self._proven[key] = end - start
        self._proven_bytes += end - start
        while self._proven_bytes > self._proven_limit:
            oldest, nbytes = self._proven.popitem(last=False)
            self._proven_bytes -= nbytes
            self._ordinary[oldest] = nbytes

    def remove(self, key: str) -> None:
        """Take an entry out, held or not."""
        self.hold(key)
        self._space.free(*self._places.pop(key))

    def fits_empty(self, sizes: Mapping[str, int]) -> bool:
        """Whether these entries (key -> bytes) would fit into the empty tier."""
        space = self._empty_space()
        return all(space.alloc(nbytes) is not None for _, nbytes in _largest_first(sizes))

    def put(self, sizes: Mapping[str, int], spared: Collection[str]) -> list[str] | None:
        """Place all these new entries (key -> bytes > 0), held, or none. Returns the keys evicted for them; None, with
        nothing changed, if they would not fit even with all idle entries except `spared` evicted.

        When the free space is fragmented, more is evicted than the bytes alone require.
        """
        need = sum(self._space.extent(nbytes) for nbytes in sizes.values())
        spared_bytes = sum(self._taken(key) for key in spared if self.is_idle(key))
        if self.used_bytes - self._idle_bytes + spared_bytes + need > self.budget_bytes:
            return None
        space = self._space.copy()
        victims = (key for key in chain(self._ordinary, self._proven) if key not in spared)
        evicted: list[str] = []
        places: dict[str, tuple[int, int]] = {}
        for key, nbytes in _largest_first(sizes):
            start = self._make_room(space, nbytes, victims, evicted)
            if start is None:
                return None
            places[key] = start, start + space.extent(nbytes)
        # With fragmented space some were evicted without need: they stay.
        evicted = [key for key in reversed(evicted) if not space.retake(*self._places[key])]
        self._space = space
        for key in evicted:
            self.hold(key)
            del self._places[key]
        self._places.update(places)
        return evicted

    def clear(self) -> list[str]:
        """Evict all entries, none of which may be held. Returns their keys."""
        assert not self.is_held, "entries are held"
        evicted = list(self._places)
        for key in evicted:
            self.remove(key)
        return evicted

    @property
    def is_held(self) -> bool:
        """Whether any entry is held."""
        return len(self._ordinary) + len(self._proven) < len(self._places)

    def check_integrity(self) -> None:
        """Raise AssertionError unless places, free ranges, idle entries and sums agree and the budget is kept."""
        self._space.check_integrity(self._places.values())
        assert self.used_bytes <= self.budget_bytes, f"{self.name}: {self.used_bytes} of {self.budget_bytes} bytes"
        idle = {**self._ordinary, **self._proven}
        assert len(idle) == len(self._ordinary) + len(self._proven), "idle twice"
        assert all(key in self._places and self._taken(key) == nbytes for key, nbytes in idle.items()), "idle, nowhere"
        assert self._idle_bytes == sum(idle.values()), "idle bytes are wrong"
        assert self._proven_bytes == sum(self._proven.values()), "proven bytes are wrong"
        assert self._proven_bytes <= self._proven_limit, "too much is proven"

    def _make_room(self, space: Space, nbytes: int, victims: Iterator[str], evicted: list[str]) -> int | None:
        """Offset of a chunk in `space`, after freeing as many victims as needed; None if all of them do not suffice."""
        start, extent = space.alloc(nbytes), space.extent(nbytes)
        while start is None:
            victim = next(victims, None)
            if victim is None:
                return None
            evicted.append(victim)
            free_start, free_end = space.free(*self._places[victim])
            if free_end - free_start >= extent:
                start = space.alloc(nbytes)
        return start

    def _taken(self, key: str) -> int:
        start, end = self._places[key]
        return end - start

    def _empty_space(self) -> Space:
        return FreeList(self.budget_bytes) if self.name == "host" else ByteCount(self.budget_bytes)


def _largest_first(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Items by falling size, since large chunks fit in fewer places."""
    return sorted(sizes.items(), key=lambda item: -item[1])
