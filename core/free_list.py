"""FreeList: a first-fit allocator of offsets in a range of bytes, which merges neighbouring free ranges.

Bookkeeping of numbers only; the bytes belong to its users (`core.ipc.shared_array` for arenas of pictures,
`core.cache.memory_tier` for cached activations).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
_LARGE_PAGES = 16  # chunks of at least this many memory pages take whole pages (waste below 1/16)


class FreeList:
    """The free ranges of bytes [0, size).

    First fit in address order: live chunks gather at the low end, and free neighbours are always merged. Small chunks
    are multiples of 64 bytes; large ones (16 memory pages and more) are whole memory pages. The ranges are a sorted
    list, so an operation costs its length: tens of entries for hundreds of chunks.
    """

    def __init__(self, size: int, memory_page: int = 4096) -> None:
        """size: bytes, from 0 on. memory_page: bytes of the kernel's pages."""
        self.size = size
        self.used_bytes = 0  # of all chunks, rounding included
        self._memory_page = memory_page
        self._starts: list[int] = [0] if size else []  # sorted
        self._ends: dict[int, int] = {0: size} if size else {}  # start of a free range -> its end

    def copy(self) -> FreeList:
        """An independent copy, for trying out allocations."""
        other = FreeList(0, self._memory_page)
        other.size, other.used_bytes = self.size, self.used_bytes
        other._starts, other._ends = self._starts.copy(), self._ends.copy()
        return other

    def alignment(self, nbytes: int) -> int:
        """Alignment in bytes of the start and the length of a chunk of `nbytes`."""
        return self._memory_page if nbytes >= _LARGE_PAGES * self._memory_page else _ALIGNMENT

    def extent(self, nbytes: int) -> int:
        """Bytes that a chunk of `nbytes` takes, with rounding."""
        return round_up(nbytes, self.alignment(nbytes))

    def alloc(self, nbytes: int) -> int | None:
        """Offset of a new chunk of `extent(nbytes)` bytes, nbytes > 0; None if no free range is long enough."""
        alignment = self.alignment(nbytes)
        extent, ends = round_up(nbytes, alignment), self._ends
        for index, free_start in enumerate(self._starts):
            start = -(-free_start // alignment) * alignment  # round_up, which costs more than the rest of the loop
            if start + extent <= ends[free_start]:
                self._cut(index, start, start + extent)
                return start
        return None

    def retake(self, start: int, end: int) -> bool:
        """Allocate exactly [start, end); False if it is not entirely free."""
        index = bisect_right(self._starts, start) - 1
        if index < 0 or end > self._ends[self._starts[index]]:
            return False
        self._cut(index, start, end)
        return True

    def free(self, start: int, end: int) -> tuple[int, int]:
        """Free [start, end), which must be allocated; returns the free range that it is now part of."""
        self.used_bytes -= end - start
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends.pop(self._starts.pop(index))
        if index > 0 and self._ends[self._starts[index - 1]] == start:
            start = self._starts.pop(index - 1)
        self._ends[start] = end
        insort(self._starts, start)
        return start, end

    def check_integrity(self, chunks: Iterable[tuple[int, int]]) -> None:
        """Raise AssertionError unless the free ranges and these chunks, (start, end), tile the whole range, without
        adjacent free ranges.
        """
        used = [(start, end, "used") for start, end in chunks]
        free = [(start, self._ends[start], "free") for start in self._starts]
        position, before = 0, "used"
        for start, end, kind in sorted(used + free):
            assert start == position < end, f"gap or overlap at {position}: next range is {start}..{end}"
            assert (kind, before) != ("free", "free"), f"unmerged free ranges at {start}"
            position, before = end, kind
        assert position == self.size, f"ranges end at {position} of {self.size}"
        assert len(free) == len(self._ends), "free list and free ranges differ"
        assert self.used_bytes == sum(end - start for start, end, _ in used), "used_bytes is wrong"

    def _cut(self, index: int, start: int, end: int) -> None:
        """Cut [start, end) out of a free range; the remainders before and after it stay free."""
        free_start = self._starts[index]
        free_end = self._ends.pop(free_start)
        rests = [(s, e) for s, e in ((free_start, start), (end, free_end)) if s < e]
        self._ends.update(rests)
        self._starts[index : index + 1] = [s for s, _ in rests]
        self.used_bytes += end - start


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
