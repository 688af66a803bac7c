"""Names that messages carry instead of data: arrays in shared memory, model components, tensors in a worker's store."""

from __future__ import annotations

from typing import Literal

import msgspec

Tier = Literal["device", "host", "disk"]
"""Where cached activations lie, fastest first. On a CPU the host's memory is what computes, and there is no device
tier unless it is asked for.
"""


PAGE_ARENA = 1
"""Id of the arena that holds an engine's cached pages; 0 is its client's."""


class ArrayRef(msgspec.Struct, frozen=True):
    """A handle on an array in a shared arena: `dtype` is numpy's name, `offset` is in bytes from the arena's start."""

    arena: int
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        n = 1
        for side in self.shape:
            n *= side
        return n


class ModelKey(msgspec.Struct, frozen=True):
    """One loadable component of a served model, such as ("stencil-dressing-room", "transformer")."""

    model: str
    component: str


class TensorKey(msgspec.Struct, frozen=True):
    """A tensor's name in a worker's tensor store: whose, made by which node of the stage graph, called what."""

    request_id: str
    node: str
    name: str


class TensorRef(msgspec.Struct, frozen=True):
    """A tensor by name: on which rank it lies and, once exported, where in shared memory. Shapes are filled by the
    worker that made it.
    """

    key: TensorKey
    rank: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    handle: ArrayRef | None = None


class EntryRef(msgspec.Struct, frozen=True):
    """An entry of the activation cache that a worker reads or fills: a template's pages at one keyframe, or its clean
    latents.

    host: uint8 [nbytes] in the page arena; None where it lies in device memory, under `key`.
    """

    key: str
    nbytes: int
    host: ArrayRef | None
