"""A loaded module as bytes in a memfd, from which other processes make the same module over the same memory.

    tensors, each at a multiple of 64 bytes | structure
                                            ^ Image.start

The structure is the pickled module without its tensors, in which their places stand: some kilobytes, made again in
milliseconds. Everything is as the loader left it: tied weights, buffers that no file contains, layers that were
replaced, tensors that are plain attributes, weights that were packed for the CPU (`linear_groups.py`,
`cpu_layers.py`). Both ends are our own processes; nothing from a checkpoint is unpickled.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.free_list import round_up
from model_executor.checkpoint.libraries import register_classes
from model_executor.host_weights import memory_of
from model_executor.mapping import map_private
from model_executor.weights import opaque

_ALIGNMENT = 64


class Image(NamedTuple):
    """Where an image's parts are in its memfd."""

    start: int  # bytes of tensors, padding included
    nbytes: int  # of the whole


class _Place(NamedTuple):
    """A tensor in an image."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_parameter: bool
    description: bytes  # of its order, for weights in oneDNN's


def write_image(module: nn.Module) -> tuple[int, Image]:
    """(memfd, image) of a module on the CPU, which must not be used any more: its memory is freed tensor by tensor. The
    caller owns the descriptor. Raises OSError if there is no memory."""
    places = _Places()
    structure = io.BytesIO()
    _take_off_recorders(module)
    _Pickler(structure, places).dump(module)
    content = pickle.dumps((places.listed, structure.getvalue()), pickle.HIGHEST_PROTOCOL)
    image = Image(places.nbytes, places.nbytes + len(content))
    fd = os.memfd_create("stencil-weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, image.nbytes)
        memory = mmap.mmap(fd, image.nbytes)
        _take(fd, image.start, len(content))
        memory[image.start :] = content
        buffer = (ctypes.c_ubyte * image.nbytes).from_buffer(memory)
        for place, tensor in zip(places.listed, places.tensors, strict=True):
            _take(fd, place.offset, place.nbytes)
            _write(buffer, place, tensor)
    except BaseException:
        os.close(fd)
        raise
    return fd, image


def read_image(fd: int, image: Image) -> tuple[nn.Module, Any]:
    """(module, its mapping). The tensors are views of the mapping, see `map_private`, which ends with the last of
    them."""
    memory = map_private(fd, image.nbytes)
    listed, structure = pickle.loads(memoryview(memory)[image.start :])
    module: nn.Module = _Unpickler(structure, memory, listed).load()
    register_classes(module)
    return module, memory


def _take_off_recorders(module: nn.Module) -> None:
    """Remove the hooks with which transformers records hidden states, and which cannot be pickled. Its backbones have
    them from the start, its other models from their first pass, at which they come back."""
    for each in module.modules():
        each.__dict__.pop("_output_capturing_hooks_installed", None)
        for key, hook in list(each._forward_hooks.items()):
            if hook.__module__ == "transformers.utils.output_capturing":
                del each._forward_hooks[key]


def _take(fd: int, offset: int, nbytes: int) -> None:
    """Have memory for a part, just before it is written: with all from the start, a module would be there twice. Fails
    instead of ending the process at the write."""
    if nbytes:
        os.posix_fallocate(fd, offset, nbytes)


def _write(buffer: Any, place: _Place, tensor: Tensor) -> None:
    if place.description:
        opaque.copy_to(tensor, ctypes.addressof(buffer) + place.offset)
        return
    flat = _flat(buffer, place)
    flat.copy_(torch.as_strided(tensor, flat.shape, (1,)))
    tensor.data = tensor.new_empty(0)


class _Places:
    """Gives each tensor its place. Tensors that are one object, or exactly the same memory, get one."""

    def __init__(self) -> None:
        self.listed: list[_Place] = []
        self.tensors: list[Tensor] = []
        self.nbytes = 0
        self._numbers: dict[int, int] = {}  # id of a tensor -> its number
        self._offsets: dict[tuple[int, int], int] = {}  # (address, bytes) -> offset

    def number(self, tensor: Tensor) -> int:
        """Number of a tensor's place."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.listed.append(self._place(tensor))
        return self._numbers[id(tensor)]

    def _place(self, tensor: Tensor) -> _Place:
        is_opaque = opaque.is_opaque(tensor)
        stride = () if is_opaque else tuple(tensor.stride())
        key = _opaque_memory(tensor) if is_opaque else memory_of(tensor)
        if key not in self._offsets:
            self._offsets[key] = self.nbytes
            self.nbytes = round_up(self.nbytes + key[1], _ALIGNMENT)
        kind = tensor.dtype, tuple(tensor.shape), stride, type(tensor) is nn.Parameter
        return _Place(self._offsets[key], key[1], *kind, opaque.description(tensor) if is_opaque else b"")


def _opaque_memory(tensor: Tensor) -> tuple[int, int]:
    return torch.ops.mkldnn.data_ptr(tensor), opaque.size_of(tensor)


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, places: _Places) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self._places = places

    def persistent_id(self, obj: Any) -> int | None:
        """Plain tensors with memory; a quantised one is a class of its own that consists of plain ones."""
        is_plain = type(obj) in (Tensor, nn.Parameter) and not obj.is_meta
        return self._places.number(obj) if is_plain else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, memory: Any, listed: list[_Place]) -> None:
        super().__init__(io.BytesIO(structure))
        self._memory = memory
        self._listed = listed
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, number: int) -> Tensor:
        if number not in self._made:
            self._made[number] = self._make(self._listed[number])
        return self._made[number]

    def _make(self, place: _Place) -> Tensor:
        if place.description:
            return opaque.over(self._memory, place.offset, place.shape, place.dtype, place.description)
        tensor = torch.as_strided(_flat(self._memory, place), place.shape, place.stride)
        return nn.Parameter(tensor, requires_grad=False) if place.is_parameter else tensor


def _flat(memory: Any, place: _Place) -> Tensor:
    """The memory of a place, one number after the other."""
    if not place.nbytes:
        return torch.empty(0, dtype=place.dtype)
    count = place.nbytes // place.dtype.itemsize
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset)
