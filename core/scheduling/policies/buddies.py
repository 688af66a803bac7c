"""Buddies: which ranks of an engine are free, in sets of ranks that may compute a step together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from core.handles import RankIds


class Buddies:
    """A buddy allocator (Knowlton, 1965) over ranks.

    A set has 1, 2, 4, ... ranks, all alive, and begins at a multiple of its size: {0, 1, 2, 3}, {0, 1}, {2, 3}, {0},
    ... The two halves of a set are buddies. Two sets are disjoint, or one contains the other. So M ranks form at most
    2 M - 1 sets, and no more process groups are ever made (DDiT, section 5).

    Where only some ranks have a model, sets for it are made of these in the same way, as if they were numbered anew.
    Their number has no such bound where models move. `able`: these ranks, ascending; (): all have it.
    """

    def __init__(self, ranks: Iterable[int], allow: Callable[[RankIds], bool] | None = None) -> None:
        """ranks: those that live and are free, in any order; none below 0. allow: whether a set may be used; None: all
        may.
        """
        self._allow = allow
        self._free = _mask(ranks)
        self._end = 1 << (self._free.bit_length() - 1).bit_length() if self._free else 0
        self._all = tuple(range(self._end))

    @property
    def num_free(self) -> int:
        return self._free.bit_count()

    def take(self, size: int) -> RankIds | None:
        """Take a free set of this size; None if there is none. The choice keeps larger free sets whole where possible,
        and among equally good sets it is the lowest. size: a power of two.
        """
        whole = size
        while whole <= self._end:
            for first in range(0, self._end, whole):
                if self._is_free(first, whole) and not self._is_free(first & -2 * whole, 2 * whole):
                    return self.take_this(first, size)
            whole *= 2
        return None

    def take_at_most(self, size: int, able: RankIds = ()) -> RankIds | None:
        """Take the largest free set of at most `size` ranks, a power of two; None if no rank is free."""
        while size:
            taken = next(self.sets(size, able), None) if able else self.take(size)
            if taken is not None:
                self._free &= ~_mask(taken)
                return taken
            size //= 2
        return None

    def take_this(self, first: int, size: int) -> RankIds:
        """Take the set of `size` ranks that begins at rank `first`. Raises AssertionError unless it is a free set."""
        assert first % size == 0, f"no set of {size} ranks begins at rank {first}"
        assert self._is_free(first, size), f"{size} ranks from {first} are no free set"
        self._free &= ~_range(first, size)
        return tuple(range(first, first + size))

    def give(self, ranks: Iterable[int]) -> None:
        """Free ranks that are held. Raises AssertionError if one of them is free already."""
        mask = _mask(ranks)
        assert not mask & self._free, f"a rank of {tuple(ranks)} is free already"
        self._free |= mask

    def hold(self, ranks: Iterable[int]) -> None:
        """Note that ranks are in use. Raises AssertionError if one of them is in use already."""
        mask = _mask(ranks)
        assert not mask & ~self._free, f"a rank of {tuple(ranks)} is not free"
        self._free &= ~mask

    def are_free(self, ranks: Iterable[int]) -> bool:
        return not _mask(ranks) & ~self._free

    def sets(self, size: int, able: RankIds = ()) -> Iterator[RankIds]:
        """All free sets of a size, the lowest first."""
        able = able or self._all
        for first in range(0, len(able), size):
            if ranks := self._usable(able[first : first + size], size):
                yield ranks

    def around(self, rank: int, size: int, able: RankIds = ()) -> RankIds:
        """The set of this size that contains a rank; () if it is not free, or the rank is not able."""
        able = able or self._all
        if rank not in able:
            return ()
        first = able.index(rank) & -size
        return self._usable(able[first : first + size], size)

    def _usable(self, ranks: RankIds, size: int) -> RankIds:
        """These ranks, if they are a set of this size that is free and may be used; else ()."""
        is_free = len(ranks) == size and self.are_free(ranks)
        return ranks if is_free and (self._allow is None or self._allow(ranks)) else ()

    def _is_free(self, first: int, size: int) -> bool:
        return not _range(first, size) & ~self._free


def power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`, which is above 0."""
    return 1 << (number.bit_length() - 1)


def _range(first: int, size: int) -> int:
    return ((1 << size) - 1) << first


def _mask(ranks: Iterable[int]) -> int:
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask
