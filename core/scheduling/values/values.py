"""ValueTable: the tensors of running requests: which ranks have them, how many nodes still read them, and where in
shared memory they are.

A value is immutable. A value that a loop replaces at every round has a version per round: a step reads version v and
makes v + 1. A value is freed when its last reader is done. It moves to another rank through the engine's own arena,
whose space the table allocates; several values of a request may move at once, in any dtype and shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import msgspec

from core.free_list import FreeList
from core.handles import VALUE_ARENA, ArrayRef, TensorKey, TensorRef
from core.messages.worker import Free, Transfer

VALUE_BYTES = 1 << 32
"""Size of the arena for values on their way between ranks. Only address space: memory is taken when written."""


@dataclass(slots=True)
class Value:
    """A tensor, or a series of tensors, that a node has made."""

    ref: TensorRef  # as described by the worker that made it
    ranks: frozenset[int]  # the ranks that have it
    readers_left: int  # how often nodes will still read it
    handle: ArrayRef | None = None  # uint8; its space in the arena, from `move` on
    is_moving: bool = False  # a worker is writing it to the handle
    is_pinned: bool = False  # it stays when it has no reader left

    @property
    def exported(self) -> ArrayRef | None:
        """Its place in shared memory; None until it is there."""
        return None if self.is_moving else self.handle


class ValueTable:
    """The values of one engine, by key; owned by its scheduler."""

    def __init__(self, num_bytes: int = VALUE_BYTES) -> None:
        """num_bytes: size of the arena."""
        self._values: dict[str, dict[TensorKey, Value]] = {}  # request id -> its values
        self._space = FreeList(num_bytes)
        self._freed: list[Free] = []

    @property
    def num_bytes(self) -> int:
        """Size of the arena."""
        return self._space.size

    def get(self, key: TensorKey) -> Value | None:
        """A value; None if it is not made yet or freed."""
        return self._values.get(key.request_id, {}).get(key)

    def keys(self, request_id: str) -> list[TensorKey]:
        """Keys of all values of a request."""
        return list(self._values.get(request_id, ()))

    def add(self, ref: TensorRef, ranks: Iterable[int], readers: int) -> None:
        """Note that a node has made a value on these ranks. It replaces a value with the same key, and is freed at once
        if it has no readers.
        """
        if self.get(ref.key) is not None:
            self._drop(ref.key)
        self._values.setdefault(ref.key.request_id, {})[ref.key] = Value(ref, frozenset(ranks), readers)
        if not readers:
            self._free(ref.key)

    def done_reading(self, key: TensorKey) -> None:
        """Note that one reader of a value is done. A value that was never made is ignored: a sampler without a state
        makes none.
        """
        value = self._values.get(key.request_id, {}).get(key)
        if value is None:
            return
        value.readers_left -= 1
        self._free_if_unused(value)

    def note_copy(self, key: TensorKey, ranks: Iterable[int]) -> None:
        """Note that these ranks have got a copy of a value. A value that is freed already is ignored."""
        value = self.get(key)
        if value is not None:
            value.ranks |= frozenset(ranks)

    def renew(self, key: TensorKey, readers: int) -> None:
        """Change how often nodes will still read a value; 0 frees it."""
        value = self._values[key.request_id][key]
        value.readers_left = readers
        self._free_if_unused(value)

    def pin(self, keys: Iterable[TensorKey]) -> None:
        """Keep values even when they have no reader left."""
        for key in keys:
            self._values[key.request_id][key].is_pinned = True

    def unpin(self, keys: Iterable[TensorKey]) -> None:
        """Undo `pin`. Values that are gone are ignored."""
        for key in keys:
            value = self.get(key)
            if value is not None:
                value.is_pinned = False
                self._free_if_unused(value)

    def discard(self, keys: Iterable[TensorKey]) -> None:
        """Free values that will not be read any more. None of them may be moving."""
        for key in keys:
            self._free(key)

    def forget(self, request_id: str) -> None:
        """Drop all values of a request that has ended. The workers free its tensors by a single order."""
        for key in self.keys(request_id):
            self._drop(key)
        self._freed = [free for free in self._freed if free.key.request_id != request_id]

    def lose(self, rank: int) -> list[TensorKey]:
        """Note that a rank has died with everything that it had, after `fail_move` for the values that it was writing.
        Values that are nowhere else are dropped; returns the keys of those among them that nodes would still read.
        """
        lost = []
        for value in [value for values in self._values.values() for value in values.values() if rank in value.ranks]:
            value.ranks -= {rank}
            if not value.ranks and value.handle is None:
                self._drop(value.ref.key)
                lost += [value.ref.key] if value.readers_left else []
        return lost

    def clear(self) -> None:
        """Drop everything: the workers are gone."""
        for request_id in list(self._values):
            for value in self._values[request_id].values():
                value.is_moving = False
            self.forget(request_id)
        self._freed.clear()

    def take_freed(self) -> list[Free]:
        """Orders to free the tensors of values that were freed since the last call."""
        freed, self._freed = self._freed, []
        return freed

    # ------------------------------------------------------------------------------------------------- moving

    def move(self, keys: Sequence[TensorKey], ranks: Set[int], leave: int = 0) -> list[Transfer] | None:
        """Begin to move values into shared memory: all of them or, if there is no room, none (None). Values that are
        there or on their way are left out. ranks: the ranks that may copy them; each value is on one of these. leave:
        bytes of the arena that have to stay free.
        """
        values = self._not_in_arena(keys)
        places = self._allocate(_sizes(values), leave)
        if places is None:
            return None
        pairs = zip(values, places, strict=True)
        return [self._begin_move(value, place, min(value.ranks & ranks)) for value, place in pairs]

    def end_move(self, key: TensorKey) -> None:
        """Note that a value has arrived in shared memory. It is freed if its last reader is done meanwhile."""
        value = self._values[key.request_id][key]
        value.is_moving = False
        self._free_if_unused(value)

    def fail_move(self, key: TensorKey) -> None:
        """Note that a value will not arrive in shared memory, because the rank that was to write it has died."""
        value = self._values[key.request_id][key]
        assert value.handle is not None
        self._give_back(value.handle)
        value.handle, value.is_moving = None, False
        self._free_if_unused(value)

    def leave_arena(self, request_id: str) -> list[TensorKey]:
        """Free the space in the arena that a request's values take. Values that no rank has are dropped; returns their
        keys. None of the values may be moving, pinned, or an input of a batch in flight.
        """
        lost = []
        for key, value in list(self._values.get(request_id, {}).items()):
            if value.handle is None:
                continue
            if value.ranks:
                self._give_back(value.handle)
                value.handle = None
            else:
                self._drop(key)
                lost.append(key)
        return lost

    def is_in_arena(self, request_id: str) -> bool:
        """Whether any value of a request takes space in the arena."""
        return any(value.handle is not None for value in self._values.get(request_id, {}).values())

    @property
    def pinned(self) -> set[TensorKey]:
        """Keys of all pinned values."""
        return {key for values in self._values.values() for key, value in values.items() if value.is_pinned}

    @property
    def num_moving(self) -> int:
        return sum(value.is_moving for values in self._values.values() for value in values.values())

    def check_integrity(self, request_ids: Iterable[str]) -> None:
        """Raise AssertionError unless every value is needed and belongs to one of these requests, and the space taken
        in the arena is exactly that of the values in it.
        """
        values = [value for values in self._values.values() for value in values.values()]
        assert all(value.readers_left > 0 or value.is_moving or value.is_pinned for value in values)
        assert set(self._values) <= set(request_ids)
        handles = [value.handle for value in values if value.handle is not None]
        self._space.check_integrity((ref.offset, ref.offset + self._space.extent(ref.size)) for ref in handles)

    def _allocate(self, sizes: Sequence[int], leave: int) -> list[int] | None:
        """Places for values of these sizes in the arena; None, with none taken, if there is no room for all of them."""
        if self._space.used_bytes + sum(map(self._space.extent, sizes)) > self._space.size - leave:
            return None
        places: list[int] = []
        for nbytes in sizes:
            place = self._space.alloc(nbytes)
            if place is None:
                self._take_back(places, sizes)
                return None
            places.append(place)
        return places

    def _take_back(self, places: Sequence[int], sizes: Sequence[int]) -> None:
        """Free the first places of `_allocate`. sizes: as for it."""
        for place, size in zip(places, sizes, strict=False):
            self._space.free(place, place + self._space.extent(size))

    def _not_in_arena(self, keys: Iterable[TensorKey]) -> list[Value]:
        """These values, without those that are in shared memory or on their way there."""
        return [value for key in keys if (value := self._values[key.request_id][key]).handle is None]

    def _begin_move(self, value: Value, place: int, source: int) -> Transfer:
        value.handle, value.is_moving = ArrayRef(VALUE_ARENA, place, (max(1, value.ref.nbytes),), "uint8"), True
        return Transfer(msgspec.structs.replace(value.ref, handle=value.handle), source)

    def _free_if_unused(self, value: Value) -> None:
        if not value.readers_left and not value.is_moving and not value.is_pinned:
            self._free(value.ref.key)

    def _free(self, key: TensorKey) -> None:
        value = self._drop(key)
        if value is not None:
            self._freed.append(Free(key, tuple(value.ranks)))

    def _drop(self, key: TensorKey) -> Value | None:
        values = self._values.get(key.request_id, {})
        value = values.pop(key, None)
        if value is None:
            return None
        assert not value.is_moving, f"{key} is freed while a worker writes it to shared memory"
        if value.handle is not None:
            self._give_back(value.handle)
        if not values:
            del self._values[key.request_id]
        return value

    def _give_back(self, handle: ArrayRef) -> None:
        self._space.free(handle.offset, handle.offset + self._space.extent(handle.size))


def _sizes(values: Iterable[Value]) -> list[int]:
    """Bytes that these values take in the arena."""
    return [max(1, value.ref.nbytes) for value in values]
