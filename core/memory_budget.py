"""Computes how much device memory is left for cached pages beside the models and their largest batches, and whether
models fit into a budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from core.errors import ConfigError
from core.handles import LoadedComponent, ModelKey

_GIB = 1024**3
_WHOLE = 1024**2
"""Budgets are rounded down to a multiple of this many bytes."""

_LESS = "have less run together (--max-num-seqs, --max-num-batched-tokens), quantise the weights (--quantization)"
REMEDIES = f"{_LESS}, allow more of the device (--gpu-memory-utilization), or cache nothing (--no-mask-aware)"
CPU_REMEDIES = f"{_LESS}, or cache nothing (--no-mask-aware)"


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A device's memory as measured by a worker, in bytes."""

    total: int
    taken: int  # by this worker: weights and libraries
    peak: int  # additionally needed by its largest batch
    kept: int  # needed by requests between their steps, for the most that may run
    graphs: int = 0  # needed by CUDA graphs of steps, for the most that are kept
    free: int  # not taken by any program

    @property
    def needed(self) -> int:
        """Bytes needed beside the model and pages."""
        return self.peak + self.kept + self.graphs


def check_fits(models: Mapping[str, Iterable[ModelKey]], sizes: Iterable[LoadedComponent], budget: int) -> None:
    """Raises ConfigError for a model that exceeds a budget of bytes by itself. models: name -> components. sizes: of
    all of these. budget: 0: none.
    """
    nbytes = {each.key: each.nbytes for each in sizes}
    for name, keys in models.items():
        needed = sum(nbytes[key] for key in set(keys))
        if budget and needed > budget:
            raise ConfigError(f"--model-bytes {budget}: the weights of {name} alone take {needed}; give at least that")


def bytes_to_come(sizes: Iterable[LoadedComponent], loaded: Iterable[LoadedComponent], budget: int) -> int:
    """Bytes of weights that may be loaded later. sizes: of all components. budget: 0: none."""
    every = sum(each.nbytes for each in sizes)
    return max(0, min(every, budget or every) - sum(each.nbytes for each in loaded))


def page_bytes(memory: DeviceMemory, utilization: float, least: int) -> int:
    """Bytes that pages may take: what is left of `utilization` (0..1) of the device, at most what is free.

    As in vLLM the share is this worker's own: two workers may take 0.45 each of one device. Raises ConfigError if the
    result is less than `least`, the pages of one picture, without which no edit can be mask-aware.
    """
    allowed = int(memory.total * utilization) - memory.taken - memory.needed
    room = min(allowed, memory.free - memory.needed) // _WHOLE * _WHOLE
    if room < least:
        raise ConfigError(_why(memory, utilization, least, is_others=allowed >= least))
    return room


def _why(memory: DeviceMemory, utilization: float, least: int, is_others: bool) -> str:
    own = (
        f"the model takes {_gib(memory.taken)}, its largest batch {_gib(memory.peak)}, graphs of steps "
        f"{_gib(memory.graphs)} and what requests keep between their steps {_gib(memory.kept)}"
    )
    if is_others:
        return (
            f"no device memory is left for pages: {own}, one picture's pages {_gib(least)}, and {_gib(memory.free)} is "
            f"free beside the model: other programs have the rest of {_gib(memory.total)}"
        )
    return (
        f"no device memory is left for pages: {own}, and of {_gib(memory.total)} x --gpu-memory-utilization "
        f"{utilization:g} there must remain {_gib(least)} for one picture's pages; keep fewer keyframes "
        f"(--cache-keyframes), {REMEDIES}"
    )


def describe(memory: DeviceMemory, pages: int) -> str:
    """One line for the log."""
    return (
        f"device memory: {_gib(memory.total)}, of which the model takes {_gib(memory.taken)}, its largest batch "
        f"{_gib(memory.peak)}, graphs of steps {_gib(memory.graphs)}, what requests keep between their steps "
        f"{_gib(memory.kept)}, pages {_gib(pages)}"
    )


def _gib(nbytes: int) -> str:
    return f"{max(0, nbytes) / _GIB:.2f} GiB"
