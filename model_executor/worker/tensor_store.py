"""TensorStore: the tensors that pass from one stage of a request to the next, by name: all state of a request on a
worker.

The engine counts references and says what to free. One thread reads and writes the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.handles import ArrayRef, TensorKey, TensorRef


class SharedMemory(Protocol):
    """The part of `core.ipc.shared_array.Arena` that the store uses."""

    def view(self, ref: ArrayRef) -> npt.NDArray[np.generic]:
        """The array of a handle, writable, without a copy."""


class TensorStore:
    """(request, node, name) -> tensor, on one rank. Tensors move between ranks through `arena`."""

    def __init__(self, rank: int, device: torch.device, arena: SharedMemory) -> None:
        self._rank = rank
        self._device = device
        self._arena = arena
        self._tensors: dict[str, dict[tuple[str, str], Tensor]] = {}  # request_id -> (node, name) -> tensor

    def put(self, key: TensorKey, tensor: Tensor) -> TensorRef:
        """Store `tensor` under `key`, replacing what was there; returns a reference with its shape and dtype."""
        self._tensors.setdefault(key.request_id, {})[key.node, key.name] = tensor
        return TensorRef(key, self._rank, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def get(self, key: TensorKey) -> Tensor:
        """The tensor under `key`. Raises KeyError when there is none, which is a bug in the plan."""
        try:
            return self._tensors[key.request_id][key.node, key.name]
        except KeyError:
            raise KeyError(f"rank {self._rank} holds no tensor {key.node}.{key.name} of {key.request_id}") from None

    def put_series(self, key: TensorKey, tensors: Sequence[Tensor]) -> None:
        """Store a series of tensors under `key`, replacing the previous one; an empty series deletes it."""
        kept = self._tensors.setdefault(key.request_id, {})
        for place in self._series(key):
            del kept[place]
        kept.update({(key.node, f"{key.name}/{i}"): tensor for i, tensor in enumerate(tensors)})

    def get_series(self, key: TensorKey) -> tuple[Tensor, ...]:
        """The series stored under `key`; () if there is none."""
        return tuple(self._tensors[key.request_id][place] for place in self._series(key))

    def _series(self, key: TensorKey) -> list[tuple[str, str]]:
        """The keys of a series' tensors, in order."""
        kept, places = self._tensors.get(key.request_id, {}), (f"{key.name}/{i}" for i in count())
        return list(takewhile(kept.__contains__, ((key.node, name) for name in places)))

    def resolve(self, ref: TensorRef) -> Tensor:
        """An input for this rank: its own tensor, or another rank's, copied from shared memory."""
        if ref.rank == self._rank:
            return self.get(ref.key)
        if ref.handle is None:
            raise KeyError(
                f"{ref.key.node}.{ref.key.name} of {ref.key.request_id} lies on rank {ref.rank}, not exported"
            )
        return torch.from_numpy(self._arena.view(ref.handle).copy()).to(self._device)

    def export(self, ref: TensorRef) -> TensorRef:
        """Write a tensor of this rank to `ref.handle`, in the handle's dtype; returns the reference with its shape.

        Handles are float32, to which bfloat16 and float16 convert without loss, so a moved tensor gives the same bytes.
        Raises ValueError when shapes differ.
        """
        if ref.handle is None:
            raise ValueError(f"{ref.key.node}.{ref.key.name} of {ref.key.request_id}: nowhere to export to")
        tensor = self.get(ref.key)
        view = torch.from_numpy(self._arena.view(ref.handle))
        if view.shape != tensor.shape:
            raise ValueError(f"a tensor {tuple(tensor.shape)} does not fit a handle {tuple(view.shape)}")
        view.copy_(tensor)
        return TensorRef(ref.key, self._rank, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), ref.handle)

    def free(self, key: TensorKey) -> None:
        """Delete a tensor, or all of a request's when `node` and `name` are empty. Keys that are not on this rank are
        ignored, since every rank gets the same list."""
        if not key.node and not key.name:
            self._tensors.pop(key.request_id, None)
            return
        tensors = self._tensors.get(key.request_id, {})
        tensors.pop((key.node, key.name), None)
        if not tensors:
            self._tensors.pop(key.request_id, None)

    def __len__(self) -> int:
        return sum(len(tensors) for tensors in self._tensors.values())
