"""HostWeights: weights of modules in host memory, which are copied to the device while the modules are used.

On both sides they are one block of memory. A use is one allocation and one transfer, from memory that is registered
(pinned) with CUDA. Nothing is copied back: weights do not change. The copy is queued on the computing stream, before
the kernels that read it, and its memory goes back to that stream's pool, so what is queued later cannot overtake them.

The block is this process's own. The keeper's memory is mapped privately, and the kernel copies the pages of a private
mapping that are pinned, so registering that memory would save none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core.errors import ConfigError
from core.free_list import round_up
from model_executor.mapping import map_own

ALIGNMENT = 512
"""Bytes, as of memory that PyTorch allocates on a GPU: by alignment, libraries choose kernels, which round
differently."""


class Weights:
    """Weights that stay on the device."""

    nbytes: int = 0
    """Bytes that lie in host memory between uses."""

    def on_device(self) -> AbstractContextManager[None]:
        """Has the weights on the device in its body."""
        return nullcontext()

    def held(self) -> AbstractContextManager[None]:
        """Has weights that come to the device in its body stay there until its end. By itself it copies none."""
        return nullcontext()


ON_DEVICE = Weights()


class HostWeights(Weights):
    """The weights of modules that are used together. One thread uses it."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Move the modules' parameters and buffers to host memory. modules: their tensors are plain, on any device.
        device: to use them on. Raises ConfigError if there is no such memory, or CUDA cannot pin it."""
        found = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
        tensors = {id(each): each for each in found}
        self._tensors = list(tensors.values())
        self._places, self.nbytes = _places(self._tensors)
        self._device = device
        try:
            memory = map_own(max(1, self.nbytes))
        except OSError as error:
            raise ConfigError(f"--offload host: no host memory for {_gib(self.nbytes)} of weights") from error
        self._host = torch.frombuffer(memory, dtype=torch.uint8)[: self.nbytes]
        for tensor, place in zip(self._tensors, self._places, strict=True):
            place.flat(self._host).copy_(torch.as_strided(tensor, (place.length,), (1,)))
        if device.type == "cuda":
            self._pin()
        self._num_uses = self._num_holds = 0
        self._leave()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        self._num_uses += 1
        try:
            if not self._is_there:
                self._come()
            yield
        finally:
            self._num_uses -= 1
            self._leave_unless_wanted()

    @contextmanager
    def held(self) -> Iterator[None]:
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
            self._leave_unless_wanted()

    def _come(self) -> None:
        copy = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        copy.copy_(self._host, non_blocking=True)
        self._is_there = True
        self._point_to(copy)

    def _leave_unless_wanted(self) -> None:
        if self._is_there and not self._num_uses and not self._num_holds:
            self._leave()

    def _leave(self) -> None:
        self._is_there = False
        self._point_to(self._host)

    def _point_to(self, memory: Tensor) -> None:
        """Have the modules compute with these bytes. Their tensors stay the same objects: a module's twins have them,
        too."""
        for tensor, place in zip(self._tensors, self._places, strict=True):
            tensor.data = place.of(memory)

    def _pin(self) -> None:
        runtime = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(self._host.data_ptr(), self.nbytes, 0))
        if error:
            what = f"{_gib(self.nbytes)} of host memory"
            raise ConfigError(f"--offload host: CUDA cannot pin {what} (cudaError {error})")
        # Before the memory is unmapped: this object refers to it.
        weakref.finalize(self, runtime.cudaHostUnregister, self._host.data_ptr()).atexit = False


def _gib(nbytes: int) -> str:
    return f"{nbytes / 1024**3:.1f} GiB"


class JointWeights(Weights):
    """Weights that lie in several places, and are used together."""

    def __init__(self, members: Sequence[Weights]) -> None:
        self._members = members
        self.nbytes = sum(member.nbytes for member in members)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        with ExitStack() as stack:
            for member in self._members:
                stack.enter_context(member.on_device())
            yield

    @contextmanager
    def held(self) -> Iterator[None]:
        with ExitStack() as stack:
            for member in self._members:
                stack.enter_context(member.held())
            yield


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) from a tensor's first number to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
    return tensor.data_ptr(), span * tensor.itemsize


class _Place(NamedTuple):
    """A tensor in a block of memory."""

    offset: int
    length: int  # numbers from its first to its last
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def flat(self, memory: Tensor) -> Tensor:
        """Its numbers, as they lie there. memory: uint8 [bytes]."""
        return memory[self.offset : self.offset + self.length * self.dtype.itemsize].view(self.dtype)

    def of(self, memory: Tensor) -> Tensor:
        return torch.as_strided(self.flat(memory), self.shape, self.stride)


def _places(tensors: Sequence[Tensor]) -> tuple[list[_Place], int]:
    """(a place for each tensor, bytes of them all); tensors that are the same memory have one place."""
    offsets: dict[tuple[int, int], int] = {}  # address and bytes -> offset
    places, end = [], 0
    for tensor in tensors:
        memory = memory_of(tensor)
        if memory not in offsets:
            offsets[memory] = end
            end = round_up(end + memory[1], ALIGNMENT)
        length, shape, stride = memory[1] // tensor.itemsize, tuple(tensor.shape), tuple(tensor.stride())
        places.append(_Place(offsets[memory], length, tensor.dtype, shape, stride))
    return places, end
