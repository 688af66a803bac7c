"""TensorStore: the tensors that pass from one stage of a request to the next, by name: all state of a request on a
worker.

The engine counts references and says what to free. One thread reads and writes the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.handles import ArrayRef, TensorKey, TensorRef


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
        self._rank = rank
        self._device = device
        self._arena = arena
        self._tensors: dict[str, dict[TensorKey, Tensor]] = {}  # request id -> key -> tensor
        self._series: dict[str, dict[TensorKey, tuple[Tensor, ...]]] = {}  # likewise, of series

    def put(self, key: TensorKey, tensor: Tensor) -> TensorRef:
        """Store `tensor` under `key`, replacing what was there; returns a reference that describes it."""
        self._tensors.setdefault(key.request_id, {})[key] = tensor
        return TensorRef(key, self._rank, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)

    def get(self, key: TensorKey) -> Tensor:
        """The tensor under `key`. Raises MissingValueError if there is none."""
        try:
            return self._tensors[key.request_id][key]
        except KeyError:
            name = f"{key.node}.{key.name} version {key.version} of {key.request_id}"
            raise MissingValueError(f"rank {self._rank} holds no tensor {name}") from None

    def put_series(self, key: TensorKey, tensors: Sequence[Tensor]) -> TensorRef:
        """Store a series of tensors under `key`, replacing the previous one; returns a reference that describes it."""
        self._series.setdefault(key.request_id, {})[key] = tuple(tensors)
        return TensorRef(key, self._rank, (len(tensors),), "series", sum(tensor.nbytes for tensor in tensors))

    def get_series(self, key: TensorKey) -> tuple[Tensor, ...]:
        """The series stored under `key`; () if there is none."""
        return self._series.get(key.request_id, {}).get(key, ())

    def resolve(self, ref: TensorRef) -> Tensor:
        """An input for this rank: its own tensor, or another rank's, copied from shared memory."""
        if ref.rank == self._rank:
            return self.get(ref.key)
        if ref.handle is None:
            raise KeyError(
                f"{ref.key.node}.{ref.key.name} of {ref.key.request_id} lies on rank {ref.rank}, not exported"
            )
        there = torch.from_numpy(self._arena.view(ref.handle))[: ref.nbytes].clone()
        return there.view(getattr(torch, ref.dtype)).view(ref.shape).to(self._device)

    def export(self, ref: TensorRef) -> TensorRef:
        """Write the bytes of a tensor of this rank to `ref.handle`; returns `ref`. Raises ValueError if they do not fit
        there, or if it is a series.
        """
        if ref.handle is None:
            raise ValueError(f"{ref.key.node}.{ref.key.name} of {ref.key.request_id}: nowhere to export to")
        if ref.dtype == "series":
            raise ValueError(f"{ref.key.node}.{ref.key.name} of {ref.key.request_id} is a series, which cannot move")
        tensor = self.get(ref.key)
        if tensor.nbytes > ref.handle.size:
            raise ValueError(f"a tensor of {tensor.nbytes} bytes does not fit {ref.handle.size}")
        there = torch.from_numpy(self._arena.view(ref.handle))
        there[: tensor.nbytes].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        return ref

    def free(self, key: TensorKey) -> None:
        """Delete what is under a key, or all of a request's when `node` and `name` are empty. Keys that are not on this
        rank are ignored, since every rank gets the same list.
        """
        kinds: tuple[dict[str, Any], ...] = (self._tensors, self._series)
        for kept in kinds:
            mine = kept.get(key.request_id, {})
            if key.node or key.name:
                mine.pop(key, None)
            if not mine or not (key.node or key.name):
                kept.pop(key.request_id, None)

    def __len__(self) -> int:
        series = (each for kept in self._series.values() for each in kept.values())
        return sum(len(tensors) for tensors in self._tensors.values()) + sum(map(len, series))
