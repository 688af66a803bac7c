"""Measures how much of a device's memory is left for cached pages: runs the largest batches, and keeps the peak of what
they took free.

No batch can be larger, because pictures have at most the native area. If one does not fit after all, since another
process took memory meanwhile, it is run in halves (`model_executor/worker/halving.py`).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol

import msgspec
import torch

from core.config import CacheConfig, SchedulerConfig
from core.errors import ConfigError
from core.handles import ModelKey
from core.memory_budget import REMEDIES, DeviceMemory, describe, page_bytes
from core.model_info import ModelInfo
from core.scheduling.ops.denoise import DENOISE
from model_executor.device_failures import is_out_of_memory
from model_executor.graphs.step_graphs import MAX_GRAPHS
from model_executor.models.base import Family
from model_executor.models.controlnet.controlnet import ControlNet
from model_executor.worker.probes.cost_probe import GPU_CALLS, Batches

logger = logging.getLogger("stencil.worker")

Run = Callable[[], object]

GRAPH_SHARES = (1.0, 0.9, 0.5)
"""Active tokens of the steps whose graphs are measured, as shares of all, large ones first; 1 is an exact step."""

EXACT_SHARES = (1.0,)
"""The same of models whose steps are exact: one size, so another graph is reckoned to take as much as the first."""


class Gauge(Protocol):
    """Reads a device's memory use, in bytes. Create it before weights are loaded."""

    @property
    def total(self) -> int: ...

    def taken(self) -> int:
        """Bytes taken by this process since the gauge was created, after its allocator's unused memory is released."""

    def free(self) -> int:
        """Bytes that no process has taken."""

    def peak_of(self, run: Run) -> int:
        """Peak bytes that a call takes beyond those taken before it."""


class CudaGauge:
    """Reads the driver's counters, which include memory of libraries, and the memory that the allocator reserves, which
    includes fragmentation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_before, self.total = torch.cuda.mem_get_info(device)

    def taken(self) -> int:
        return self._free_before - self.free()

    def free(self) -> int:
        self._give_back()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_of(self, run: Run) -> int:
        self._give_back()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before

    def _give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def gauge_of(device: torch.device) -> Gauge | None:
    """The gauge of a device; None for a CPU, whose pages lie in shared memory."""
    return CudaGauge(device) if device.type == "cuda" else None


def device_page_bytes(
    gauge: Gauge | None,
    families: Mapping[str, Family],
    infos: Sequence[ModelInfo],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    to_come: int = 0,
    controlnets: Mapping[str, Mapping[str, ControlNet]] = MappingProxyType({}),
) -> int:
    """Bytes of device memory for pages: what the configuration asks for, else what is left. 0 without a gauge (on a
    CPU), and if no model has pages. families: the models that are loaded, of which batches are measured. to_come: bytes
    of weights that may be loaded later. controlnets: model -> its own, by name. Raises ConfigError if nothing is left.
    """
    loaded = [info for info in infos if info.name in families and not info.parent]
    schemes = [(info, info.page_scheme) for info in infos if info.page_scheme is not None and not info.parent]
    if cache.device_bytes is not None or gauge is None or not schemes:
        return cache.device_bytes or 0
    # Batches are made anew for each model, so that their tensors are freed before the gauge reads what weights take.
    runs = (run for info in loaded for run in _heaviest_of(families[info.name], info, scheduler))
    with room_for("what a request keeps beside the model"):
        # A plan frees what the results before it have made useless; plans that are under way have theirs still.
        num_states = scheduler.max_plans_in_flight + 1
        kept = scheduler.max_num_seqs * max(
            _with_most_references(families[info.name], info, controlnets.get(info.name, {}).values()).kept_bytes(
                num_states
            )
            for info in loaded
        )
    with _without_graphs(families.values()):
        memory = measure(gauge, runs, kept)
    with room_for("CUDA graphs of steps beside the model", f"turn them off (--cuda-graphs off), or {REMEDIES}"):
        graphs = all_graph_bytes(gauge, [info for info in infos if not info.parent], families)
    memory = msgspec.structs.replace(memory, graphs=graphs, to_come=to_come)
    least = max(scheme.template_bytes(_native_tokens(info), len(scheme.keyframes) or 2) for info, scheme in schemes)
    pages = page_bytes(memory, cache.gpu_memory_utilization, least)
    logger.info("%s", describe(memory, pages))
    return pages


def _heaviest_of(family: Family, info: ModelInfo, limits: SchedulerConfig) -> Iterator[Run]:
    """The largest batches of requests without references, and of those with most: either may be larger."""
    yield from heaviest(Batches(family, info), limits)
    if info.references is not None:
        yield from heaviest(_with_most_references(family, info), limits)


def _with_most_references(family: Family, info: ModelInfo, controlnets: Collection[ControlNet] = ()) -> Batches:
    most = 0 if info.references is None else info.references.most
    return Batches(family, info, references=most, controlnets=controlnets)


@contextmanager
def room_for(what: str, remedies: str = REMEDIES) -> Iterator[None]:
    """Turns out-of-memory errors in its body into a ConfigError that names `what` and the remedies."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"the device has no room for {what}; {remedies}") from error


@torch.inference_mode()
def measure(gauge: Gauge, runs: Iterable[Run], kept: int) -> DeviceMemory:
    """Measure the device with the models loaded. Every run is done twice, since the first call also creates what later
    ones reuse. kept: bytes that running requests keep, as in `DeviceMemory`. Raises ConfigError if a run does not
    fit.
    """
    with room_for("the largest batch beside the model"):
        peak = _peak(gauge, runs)  # its tensors are freed when it returns
    return DeviceMemory(total=gauge.total, taken=gauge.taken(), peak=peak, kept=kept, free=gauge.free())


@contextmanager
def _without_graphs(families: Iterable[Family]) -> Iterator[None]:
    """Has steps run kernel by kernel in its body: what they take then is what a batch of several requests takes."""
    known = list(families)
    for family in known:
        family.use_graphs(False)
    try:
        yield
    finally:
        for family in known:
            family.use_graphs(True)


def all_graph_bytes(gauge: Gauge, infos: Sequence[ModelInfo], families: Mapping[str, Family]) -> int:
    """Bytes that the CUDA graphs of all models take: those of each denoiser that is loaded, and for each that may be
    loaded later as much as the largest. infos: of all models, without adapters. families: of those that are loaded."""
    denoisers = {_denoiser(info): info for info in infos if info.name in families}
    taken = [graph_bytes(gauge, _with_most_references(families[info.name], info)) for info in denoisers.values()]
    to_come = {_denoiser(info) for info in infos} - denoisers.keys()
    return sum(taken) + len(to_come) * max(taken, default=0)


def _denoiser(info: ModelInfo) -> ModelKey | str:
    """What models that share a denoiser have in common; their name where components are not known."""
    return next((key for key in info.components if key.component == DENOISE.component), info.name)


@torch.inference_mode()
def graph_bytes(gauge: Gauge, batches: Batches) -> int:
    """Bytes that a model's CUDA graphs take when there are most of them: those of the largest, whose memory all share,
    and what each further one adds. 0 where steps are not captured."""
    before = gauge.taken()
    taken = []
    for share in GRAPH_SHARES if batches.info.page_scheme is not None else EXACT_SHARES:
        step = batches.of_one_request(share)
        for _ in range(GPU_CALLS):
            step()
        taken.append(gauge.taken() - before)
    batches.family.drop_graphs()
    *first, last = taken
    shared = first[-1] if first else last
    return max(0, shared) + (MAX_GRAPHS - 1) * max(0, last - shared if first else last)


def _peak(gauge: Gauge, runs: Iterable[Run]) -> int:
    peak = 0
    for run in runs:
        run()
        peak = max(peak, gauge.peak_of(run))
    return peak


def heaviest(batches: Batches, limits: SchedulerConfig) -> Iterator[Run]:
    """The largest batches of every op that the scheduler's limits allow, at the native size."""
    yield from (run for op, _, run in batches.all() if op.sharing == "single")
    info, tokens = batches.info, batches.num_row_tokens
    most_rows = limits.max_num_seqs * batches.most_rows
    yield batches.denoise((1.0,) * _within(limits.max_num_batched_tokens // tokens, most_rows))[2]
    if info.page_scheme is None:
        return
    share = batches.share_of(limits.max_num_batched_tokens / most_rows)
    yield batches.denoise((min(0.9, share),) * most_rows)[2]
    keyframes = len(info.page_scheme.keyframes) or 2
    yield batches.prime(_within(limits.max_num_batched_tokens // tokens, keyframes), 1.0)[2]


def _within(number: int, most: int) -> int:
    return max(1, min(number, most))


def _native_tokens(info: ModelInfo) -> int:
    return (info.native_size // info.token_size) ** 2
