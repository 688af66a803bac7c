"""TensorStore: the tensors that pass from one node of a request to the next, by name: all state of a request on a
worker.

The engine counts references and says what to free. One thread reads and writes the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.handles import ArrayRef, TensorKey, TensorRef

Parts = tuple[tuple[str, tuple[int, ...], bool], ...]
"""(PyTorch's dtype, shape, whether it belongs in host memory) of tensors whose bytes lie one after the other, each
aligned to ALIGNMENT. A random generator's state, part of some samplers', is in host memory on any device, and so are
numbers that steps read on the host, such as the lengths of prompts: reading them on a GPU waits for it.
"""

ALIGNMENT = 64  # bytes

SERIES = "series"
"""In place of a dtype, in references to series."""


class SharedMemory(Protocol):
    """The part of `core.ipc.shared_array.Arena` that the store uses."""

    def view(self, ref: ArrayRef) -> npt.NDArray[np.generic]:
        """The array of a handle, writable, without a copy."""


class MissingValueError(KeyError):
    """A batch reads a value that this rank does not have: the batch that was to make it failed after this one had been
    sent.
    """


class TensorStore:
    """Key -> tensor or series of tensors, on one rank. They move between ranks through `arena`, as bytes."""

    def __init__(self, rank: int, device: torch.device, arena: SharedMemory) -> None:
        self.rank = rank
        self.device = device
        self._arena = arena
        self._tensors: dict[str, dict[TensorKey, Tensor]] = {}  # request id -> key -> tensor
        self._series: dict[str, dict[TensorKey, tuple[Tensor, ...]]] = {}  # likewise, of series
        self._kept: dict[str, dict[str, dict[str, Any]]] = {}  # request id -> node -> see `kept`

    # ------------------------------------------------------------------------------------------------ its own

    def put(self, key: TensorKey, tensor: Tensor) -> TensorRef:
        """Store `tensor` under `key`, replacing what was there; returns a reference that describes it."""
        self._tensors.setdefault(key.request_id, {})[key] = tensor
        return self._ref(key, tensor)

    def get(self, key: TensorKey) -> Tensor:
        """The tensor under `key`. Raises MissingValueError if there is none."""
        try:
            return self._tensors[key.request_id][key]
        except KeyError:
            raise self._missing(key) from None

    def put_series(self, key: TensorKey, tensors: Sequence[Tensor]) -> TensorRef:
        """Store a series of tensors under `key`, replacing the previous one; returns a reference that describes it."""
        series = self._series.setdefault(key.request_id, {})[key] = tuple(tensors)
        return self.describe(key, series)

    def get_series(self, key: TensorKey) -> tuple[Tensor, ...]:
        """The series stored under `key`; () if there is none."""
        return self._series.get(key.request_id, {}).get(key, ())

    def find(self, key: TensorKey) -> TensorRef | None:
        """A reference that describes what is stored under `key`, a tensor or a series; None if there is none."""
        tensor = self._tensors.get(key.request_id, {}).get(key)
        if tensor is not None:
            return self._ref(key, tensor)
        series = self.get_series(key)
        return self.describe(key, series) if series else None

    def free(self, key: TensorKey) -> None:
        """Delete what is under a key, or all of a request's when `node` and `name` are empty. Keys that are not on this
        rank are ignored: a batch that was to make a value may have failed.
        """
        if not (key.node or key.name):
            for all_of_it in (self._tensors, self._series, self._kept):
                all_of_it.pop(key.request_id, None)
            return
        kinds: tuple[dict[str, Any], ...] = (self._tensors, self._series)
        for kind in kinds:
            mine = kind.get(key.request_id, {})
            mine.pop(key, None)
            if not mine:
                kind.pop(key.request_id, None)

    def kept(self, request_id: str, node: str) -> dict[str, Any]:
        """What a node keeps here from one round of its loop to the next, by names of its own. The engine does not know
        of it. It goes with the request.
        """
        return self._kept.setdefault(request_id, {}).setdefault(node, {})

    def drop_kept(self, request_id: str, node: str) -> None:
        """Delete what a node has kept, after the last round."""
        mine = self._kept.get(request_id, {})
        mine.pop(node, None)
        if not mine:
            self._kept.pop(request_id, None)

    def __len__(self) -> int:
        series = (each for mine in self._series.values() for each in mine.values())
        kept = (names for nodes in self._kept.values() for names in nodes.values())
        return sum(len(tensors) for tensors in self._tensors.values()) + sum(map(len, chain(series, kept)))

    # ------------------------------------------------------------------------------------------------ of all ranks

    def resolve(self, ref: TensorRef) -> Tensor:
        """An input: this rank's tensor, or a copy of another rank's from shared memory. Raises MissingValueError if
        neither is there.
        """
        if ref.handle is None or ref.key in self._tensors.get(ref.key.request_id, {}):
            return self.get(ref.key)
        (tensor,) = self._copies(ref.handle, ((ref.dtype, ref.shape, ref.stays_on_host),))
        return tensor

    def resolve_series(self, ref: TensorRef) -> tuple[Tensor, ...]:
        """The same for a series; () if there is none."""
        if ref.handle is None or ref.key in self._series.get(ref.key.request_id, {}):
            return self.get_series(ref.key)
        return self._copies(ref.handle, ref.parts)

    def export(self, ref: TensorRef) -> TensorRef:
        """Write the bytes of a value of this rank to `ref.handle`; returns `ref`. Raises ValueError if they do not fit
        there, MissingValueError if it is not there.
        """
        if ref.handle is None:
            raise ValueError(f"{_name(ref.key)}: nowhere to export to")
        self.write(ref.key, self._arena.view(ref.handle))
        return ref

    def write(self, key: TensorKey, there: npt.NDArray[Any]) -> None:
        """Write a value of this rank to an array of uint8, of at least its reference's `nbytes`. Raises
        MissingValueError if it is not there.
        """
        ref = self.find(key)
        if ref is None:
            raise self._missing(key)
        if ref.nbytes > there.size:
            raise ValueError(f"a value of {ref.nbytes} bytes does not fit {there.size}")
        target, start = torch.from_numpy(there), 0
        for tensor in self.get_series(key) if ref.parts else (self.get(key),):
            target[start : start + tensor.nbytes].copy_(_bytes_of(tensor))
            start += _padded(tensor.nbytes)

    @staticmethod
    def packed(tensors: Iterable[Tensor]) -> list[npt.NDArray[np.uint8]]:
        """The bytes of tensors, one after the other as in `Parts`, without a copy of what is in host memory."""
        chunks: list[npt.NDArray[np.uint8]] = []
        for tensor in tensors:
            chunks.append(_bytes_of(tensor).cpu().numpy())
            if padding := _padded(tensor.nbytes) - tensor.nbytes:
                chunks.append(np.zeros(padding, np.uint8))
        return chunks

    def put_bytes(self, ref: TensorRef, there: npt.NDArray[Any]) -> None:
        """Store another rank's tensor, of the bytes in an array of uint8, which it may keep."""
        self.put(ref.key, *self._tensors_of(torch.from_numpy(there), ((ref.dtype, ref.shape, ref.stays_on_host),)))

    def read(self, ref: TensorRef, there: npt.NDArray[Any]) -> tuple[Tensor, ...]:
        """The tensors of another rank's series, of the bytes in an array of uint8, which they may keep."""
        return self._tensors_of(torch.from_numpy(there), ref.parts)

    def _copies(self, handle: ArrayRef, parts: Parts) -> tuple[Tensor, ...]:
        """Tensors from shared memory, whose place other values take later."""
        return self._tensors_of(torch.from_numpy(self._arena.view(handle)), parts, are_copied=True)

    def _tensors_of(self, source: Tensor, parts: Parts, *, are_copied: bool = False) -> tuple[Tensor, ...]:
        """A generator's state, of bytes, has memory of its own: torch takes it from the beginning of that."""
        tensors, start = list[Tensor](), 0
        for name, shape, is_in_host_memory in parts:
            dtype: torch.dtype = getattr(torch, name)
            nbytes = prod(shape) * dtype.itemsize
            memory = source[start : start + nbytes]
            tensor = (memory.clone() if are_copied or dtype == torch.uint8 else memory).view(dtype).view(shape)
            tensors.append(tensor if is_in_host_memory else tensor.to(self.device))
            start += _padded(nbytes)
        return tuple(tensors)

    # ------------------------------------------------------------------------------------------------ descriptions

    def _ref(self, key: TensorKey, tensor: Tensor) -> TensorRef:
        dtype, shape, is_in_host_memory = _part(tensor)
        stays_on_host = is_in_host_memory and self.device.type != "cpu"
        return TensorRef(key, self.rank, shape, dtype, tensor.nbytes, stays_on_host=stays_on_host)

    def describe(self, key: TensorKey, series: Sequence[Tensor]) -> TensorRef:
        """A reference that describes a series, or a part of one."""
        parts = tuple(_part(tensor) for tensor in series)
        nbytes = sum(_padded(tensor.nbytes) for tensor in series)
        return TensorRef(key, self.rank, (len(series),), SERIES, nbytes, parts=parts)

    def _missing(self, key: TensorKey) -> MissingValueError:
        name = f"{key.node}.{key.name} version {key.version} of {key.request_id}"
        return MissingValueError(f"rank {self.rank} holds no tensor {name}")


def _part(tensor: Tensor) -> tuple[str, tuple[int, ...], bool]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type == "cpu"


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _name(key: TensorKey) -> str:
    return f"{key.node}.{key.name} of {key.request_id}"
