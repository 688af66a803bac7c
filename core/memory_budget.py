"""Computes how much device memory is left for cached pages beside the models and their largest batches, and whether
models fit into a budget, or into the memory there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from core.errors import ConfigError
from core.handles import LoadedComponent, ModelKey

_GIB = 1024**3
_WHOLE = 1024**2
"""Budgets are rounded down to a multiple of this many bytes."""

_LESS = "have less run together (--max-num-seqs, --max-num-batched-tokens), quantise the weights (--quantization)"
_OFFLOAD = "keep text encoders and VAE in host memory (--offload host)"
REMEDIES = (
    f"{_LESS}, {_OFFLOAD}, allow more of the device (--gpu-memory-utilization), or cache nothing (--no-mask-aware)"
)
CPU_REMEDIES = f"{_LESS}, or cache nothing (--no-mask-aware)"

SMALLER_WEIGHTS = "quantise the denoiser (--quantization), take a smaller --dtype, or give weights more memory"
WITHOUT_OFFLOAD = "take a smaller --dtype, or leave --offload host out"
FEWER_WEIGHTS = "serve fewer models, or have them take turns (--model-bytes)"


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A device's memory as measured by a worker, in bytes."""

    total: int
    taken: int  # by this worker: weights and libraries
    peak: int  # additionally needed by its largest batch
    kept: int  # needed by requests between their steps, for the most that may run
    graphs: int = 0  # needed by CUDA graphs of steps, for the most that are kept
    to_come: int = 0  # weights that may be loaded later
    free: int  # not taken by any program

    @property
    def needed(self) -> int:
        """Bytes needed beside the model and pages."""
        return self.peak + self.kept + self.graphs + self.to_come


def check_fits(models: Mapping[str, Iterable[ModelKey]], sizes: Iterable[LoadedComponent], budget: int) -> None:
    """Raises ConfigError for a model that exceeds a budget of bytes by itself. models: name -> components. sizes: of
    all of these. budget: 0: none.
    """
    nbytes = {each.key: each for each in sizes}
    for name, keys in models.items():
        its = [nbytes[key] for key in set(keys)]
        if budget and (needed := total_bytes(its)) > budget:
            what = f"the weights of {name} alone take {needed} ({_by_kind(its)})"
            raise ConfigError(f"--model-bytes {budget}: {what}; give at least that")


class Room(msgspec.Struct, frozen=True):
    """Memory that the weights of a worker may take at most."""

    nbytes: int
    why: str  # how it is computed, for messages
    remedy: str = SMALLER_WEIGHTS  # for a model that exceeds it by itself

    @classmethod
    def of_device(cls, total: int, utilization: float) -> Room:
        """The room on a GPU with this many bytes of memory. utilization: the share of them that may be taken, 0..1."""
        why = f"{_gib(total)} x --gpu-memory-utilization {utilization:g}"
        return cls(int(total * utilization), why, f"{_OFFLOAD}, {SMALLER_WEIGHTS}")

    @classmethod
    def of_host(cls, limit: int) -> Room:
        """The room on a CPU, where all processes together may take this many bytes."""
        return cls(limit, "all memory here")

    @classmethod
    def of_offloaded(cls, limit: int, num_workers: int) -> Room:
        """The room in host memory for weights that are used on a GPU. limit: as for `of_host`. num_workers: that share
        it."""
        share = f", shared by {num_workers} workers" if num_workers > 1 else ""
        return cls(limit // num_workers, f"all memory of the host{share}", WITHOUT_OFFLOAD)

    def has(self, sizes: Iterable[LoadedComponent]) -> bool:
        """Whether these components fit."""
        return total_bytes(sizes) <= self.nbytes

    def why_not(
        self,
        name: str,
        needed: Iterable[LoadedComponent],
        held: Iterable[LoadedComponent] = (),
        elsewhere: Iterable[LoadedComponent] = (),
    ) -> str:
        """Why components that a model needs do not fit beside those that the worker holds. elsewhere: those that lie in
        host memory while these are on the device."""
        needed, held = [*needed], [*held]
        what = f"{name} does not fit: its weights take {_gib(total_bytes(needed))} ({_by_kind(needed)})"
        remedy = self.remedy
        if there := total_bytes(elsewhere):
            what, remedy = f"{what} while {_gib(there)} are in host memory (--offload host)", SMALLER_WEIGHTS
        has = f"{_gib(self.nbytes)} ({self.why})"
        if not held:
            return f"{what}, and there may be {has}; {remedy}"
        return f"{what}, and models hold {_gib(total_bytes(held))} of {has}; {FEWER_WEIGHTS}"


def at_one_time(
    components: Iterable[LoadedComponent], in_turn: Iterable[Collection[ModelKey]]
) -> list[LoadedComponent]:
    """Those of these components that are on a device at one time, at most: those that stay there, and the largest set
    of those that come in turn. in_turn: the sets; a component of several comes with each of them."""
    staying, turn = _at_one_time(components, in_turn)
    return staying + turn


def _at_one_time(
    components: Iterable[LoadedComponent], in_turn: Iterable[Collection[ModelKey]]
) -> tuple[list[LoadedComponent], list[LoadedComponent]]:
    """(those that stay, the largest set of those that come in turn), see `at_one_time`."""
    known, sets = [*components], [*in_turn]
    come = {key for keys in sets for key in keys}
    together = ([each for each in known if each.key in keys] for keys in sets)
    return [each for each in known if each.key not in come], max(together, key=total_bytes, default=[])


def total_bytes(components: Iterable[LoadedComponent]) -> int:
    """Bytes of components together."""
    return sum(each.nbytes for each in components)


def _by_kind(components: Iterable[LoadedComponent]) -> str:
    """What components of each kind take, largest first."""
    kinds = Counter[str]()
    for each in components:
        kinds[each.key.component] += each.nbytes
    return ", ".join(f"{kind} {_gib(nbytes)}" for kind, nbytes in kinds.most_common())


def bytes_to_come(
    sizes: Iterable[LoadedComponent],
    loaded: Iterable[LoadedComponent],
    budget: int,
    in_turn: Sequence[Collection[ModelKey]] = (),
) -> int:
    """Bytes of a device that weights may take later. sizes: of all components. budget: of those that are loaded; 0:
    none. in_turn: as for `at_one_time`; what comes in turn makes no room for what stays when it is dropped."""
    every, held = ([*each] for each in (sizes, loaded))
    (staying, turn), (staying_now, turn_now) = (_at_one_time(each, in_turn) for each in (every, held))
    most = total_bytes(staying)
    more = max(0, min(most, budget or most) - total_bytes(staying_now))
    return more + max(0, total_bytes(turn) - total_bytes(turn_now))


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
        f"{_gib(memory.graphs)} and what requests keep between their steps {_gib(memory.kept)}{_later(memory)}"
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
        f"{_gib(memory.kept)}{_later(memory)}, pages {_gib(pages)}"
    )


def _later(memory: DeviceMemory) -> str:
    return f", weights that are loaded later {_gib(memory.to_come)}" if memory.to_come else ""


def _gib(nbytes: int) -> str:
    return f"{max(0, nbytes) / _GIB:.2f} GiB"
