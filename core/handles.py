"""Handles that messages carry instead of data: arrays in shared memory, model components, tensors of a worker."""

from __future__ import annotations

from typing import Literal

import msgspec

Tier = Literal["device", "host", "disk"]
"""Tiers of cached activations, fastest first. On a CPU the host tier is the compute tier, and there is no device tier
unless it is configured.
"""

CacheResult = Literal["hit", "miss", "own", "off"]
"""Where the pages that a request read came from. hit: all were cached. miss: some had to be primed. own: from its own
full steps. off: it read none, as in an exact run.
"""

RankIds = tuple[int, ...]
"""Ranks of one engine, ascending."""

PAGE_ARENA = 1
"""Id of the arena with an engine's cached pages; 0 is the arena of its client."""

VALUE_ARENA = 2
"""Id of the arena in which values move between an engine's ranks."""


class ArrayRef(msgspec.Struct, frozen=True):
    """A handle on an array in a shared arena."""

    arena: int  # id
    offset: int  # bytes from the arena's start
    shape: tuple[int, ...]
    dtype: str  # numpy's name

    @property
    def size(self) -> int:
        """Number of elements."""
        n = 1
        for side in self.shape:
            n *= side
        return n


Media = Literal["picture", "mask", "value"]
"""Kinds of what requests make. picture: uint8 [height, width, 3], RGB; mask: uint8 [height, width], 1 = edit; value: of
a user's class, uint8 [most bytes]."""


class Artefact(msgspec.Struct, frozen=True):
    """Memory for something that a request makes."""

    array: ArrayRef
    media: Media = "picture"


NOWHERE = ArrayRef(0, 0, (0,), "uint8")
"""No memory, where none is needed or taken yet."""


class ModelKey(msgspec.Struct, frozen=True):
    """A component of a model, the unit that workers load. Served models with equal keys share it."""

    content: str  # hex digest of its weights, its configuration, and the form in which it is loaded
    component: str  # its kind, which ops name: text_encoder, transformer (a UNet, too), vae, segmenter, controlnet


class LoadedComponent(msgspec.Struct, frozen=True):
    """A component that a worker has loaded."""

    key: ModelKey
    nbytes: int  # of its weights


class TensorKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor's name in a worker's tensor store."""

    request_id: str
    node: str  # the node of the workflow that made it
    name: str
    version: int = 0  # of what a loop replaces at every round: the number of rounds done


class TensorRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """The place of a tensor."""

    key: TensorKey
    rank: int  # a worker that has it, or will have it
    # Set by the worker that made it.
    shape: tuple[int, ...] = ()  # of a series of tensors: its length
    dtype: str = ""  # PyTorch's name; "series" for a series
    nbytes: int = 0
    # Set by the scheduler.
    handle: ArrayRef | None = None  # uint8 [nbytes], its place in shared memory
    port: str = ""  # the reader's input that gets it; "": the one named as the value
    is_deferred: bool = False  # another rank sends it, perhaps while the reader already runs
    # Set by the worker: of a series, (PyTorch's dtype, shape, whether it is in host memory) of each tensor.
    parts: tuple[tuple[str, tuple[int, ...], bool], ...] = ()
    stays_on_host: bool = False  # set by a worker on a GPU: a tensor in host memory, and so on every rank

    @property
    def input(self) -> str:
        """Name of the reader's input."""
        return self.port or self.key.name


class EntryRef(msgspec.Struct, frozen=True):
    """An entry of the activation cache that a worker reads or fills: a template's pages at one keyframe, or its clean
    latents.
    """

    key: str
    nbytes: int
    host: ArrayRef | None  # uint8 [nbytes] in the page arena; None: it is in device memory, under `key`
