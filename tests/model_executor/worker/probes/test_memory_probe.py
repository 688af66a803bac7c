"""The memory probe on a CPU: its batches run, and the tensors that they allocate are counted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from graph_simulator import SimulatedCapture
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.local_engine import LocalEngine
from core.config import CacheConfig, ModelConfig, SchedulerConfig
from core.errors import ConfigError
from core.memory_budget import DeviceMemory
from core.model_info import ModelInfo
from core.sampling_params import MAX_INFERENCE_STEPS, SamplingParams
from model_executor.graphs.step_graphs import MAX_GRAPHS, StepGraphs
from model_executor.kernels.gpu_operators import gpu_operators
from model_executor.models.base import Family, ModulationInputs
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.probes import memory_probe
from model_executor.worker.probes.cost_probe import Batches
from model_executor.worker.probes.memory_probe import (
    CudaGauge,
    device_page_bytes,
    gauge_of,
    graph_bytes,
    heaviest,
    measure,
)
from tools.random_checkpoints import make_sd3
from tools.random_unet_checkpoints import make_sd

LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=400)
MIB, GIB = 1024**2, 1024**3


class Counter(TorchDispatchMode):
    """Counts the bytes of live storages allocated in its context, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {storage._cdata for storage in _storages((args, kwargs))} | self._seen
        for storage in _storages(out):
            if storage._cdata not in known:
                self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if not tensor.is_mkldnn]  # packed weights have no storage


class CpuGauge:
    """A device of a given size, of which the model takes a known part; batches are really measured."""

    def __init__(self, total: int, taken: int = 0) -> None:
        self.total, self._taken = total, taken
        self.peaks: list[int] = []

    def taken(self) -> int:
        return self._taken

    def free(self) -> int:
        return self.total - self._taken

    def peak_of(self, run: Callable[[], object]) -> int:
        with Counter() as counter:
            run()
        self.peaks.append(counter.peak)
        return counter.peak


@torch.inference_mode()
def test_no_batch_within_the_limits_takes_more(family: Family, info: ModelInfo) -> None:
    gauge = CpuGauge(10**9)
    memory = measure(gauge, heaviest(Batches(family, info), LIMITS), 0)
    assert memory.peak == max(gauge.peaks)
    batches, others = Batches(family, info), CpuGauge(10**9)
    mixes = [(1.0,), (0.5,) * 4, (0.9, 0.1, 0.1), (0.7,) * 3, (1.0, 0.2, 0.2)]
    smaller = [*(batches.denoise(mix) for mix in mixes), batches.prime(1, 1.0), batches.prime(2, 0.5), *batches.all()]
    for _, work, run in smaller:
        if sum(work.queries) <= LIMITS.max_num_batched_tokens and len(work.queries) <= LIMITS.max_num_seqs:
            run()
            assert others.peak_of(run) <= memory.peak * 1.01, work
    assert len(others.peaks) > 10


@torch.inference_mode()
def test_higher_limits_take_more(family: Family, info: ModelInfo) -> None:
    """As long as tokens are the limit."""
    peaks = []
    for tokens in (2000, 4000, 8000):
        limits = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=tokens)
        peaks.append(measure(CpuGauge(10**9), heaviest(Batches(family, info), limits), 0).peak)
    assert peaks == sorted(set(peaks))


@torch.inference_mode()
def test_the_sizes_are_those_of_the_limits(family: Family, info: ModelInfo) -> None:
    sizes: list[int] = []

    class Recorder(Batches):
        def denoise(self, mix: Any) -> Any:
            sizes.append(len(mix))
            return super().denoise(mix)

    batches = Recorder(family, info)
    list(heaviest(batches, SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=3 * batches.num_row_tokens)))
    assert sizes[-2:] == [3, 6], "exact rows by the tokens, mask-aware ones by the requests"


@torch.inference_mode()
def test_guided_requests_have_two_rows(tmp_path: Path) -> None:
    config = ModelConfig(model=str(make_sd3(tmp_path / "sd3")), served_model_name="tiny", dtype="float32", device="cpu")
    models = ResidentModels.open([config])
    models.load_all()
    (info,) = models.ready(0).models
    assert info.is_guidance_cfg
    alone = msgspec.structs.replace(info, is_guidance_cfg=False)
    peaks = {}
    for each in (info, alone):
        gauge = CpuGauge(10**9)
        measure(gauge, heaviest(Batches(models.families["tiny"], each), SchedulerConfig(max_num_seqs=8)), 0)
        peaks[each.is_guidance_cfg] = max(gauge.peaks[-3:-1])
    assert peaks[True] > 1.5 * peaks[False]


def test_the_bytes_kept_per_request_equal_those_in_the_tensor_store(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(LocalEngine(tiny_checkpoint, "cpu", "float32", CacheConfig(host_bytes=GIB))) as engine,
    ):
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        info = engine.info
        picture = np.zeros((info.native_size, info.native_size, 3), np.uint8)
        engine.begin(picture, SamplingParams(num_inference_steps=MAX_INFERENCE_STEPS))
        while not any(batch.op == "denoise" for batch in engine.step()):
            pass
        store = engine.runner._context.store
        ((request_id, tensors),) = store._tensors.items()
        assert not store._series, "its sampler has no state"
        leaves = tree_leaves([list(tensors.values()), store.kept(request_id, "denoise")])
        held = {each.untyped_storage().data_ptr(): each for each in leaves if isinstance(each, torch.Tensor)}
        kept = Batches(engine.family, info).kept_bytes(num_states=2)
        assert 0.99 < kept / sum(tensor.untyped_storage().nbytes() for tensor in held.values()) <= 1.0


def test_modulation_tables_count_up_to_their_limit(
    family: Family, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the default number of steps is: a request may ask for more of them."""
    of_most = Batches(family, info).kept_bytes()
    assert Batches(family, msgspec.structs.replace(info, default_num_inference_steps=2)).kept_bytes() == of_most
    text = family.encode_nothing(info.max_text_tokens, torch.zeros(64, 64, 3, dtype=torch.uint8))
    of_step = family.modulation(ModulationInputs(text.pooled_prompt_embeds, 1.0, torch.ones(1), 1))
    assert of_step is not None
    monkeypatch.setattr("model_executor.models.transformer.denoiser.MODULATION_BYTES", 10 * of_step.nbytes)
    rows = Batches(family, info).most_rows
    assert of_most - Batches(family, info).kept_bytes() == (MAX_INFERENCE_STEPS * rows - 10) * of_step.nbytes


def test_a_mask_aware_run_of_a_unet_keeps_the_templates_latents_and_noise(tmp_path: Path) -> None:
    """On the device from its first step to its last: otherwise every step would upload them."""
    with closing(LocalEngine(make_sd(tmp_path / "sd"), "cpu", "float32", CacheConfig(host_bytes=GIB))) as engine:
        engine.begin(np.zeros((256, 256, 3), np.uint8), SamplingParams(num_inference_steps=4))
        store, seen = engine.runner._context.store, list[tuple[int, ...]]()
        for _ in range(100):
            if any(batch.op == "denoise" for batch in engine.step()):
                kept = [nodes["denoise"] for nodes in store._kept.values()]
                seen.append(tuple(tensor.data_ptr() for each in kept for tensor in each.get("template", ())))
        assert len(seen) == 4
        assert len(set(seen[:3])) == 1
        assert len(seen[0]) == 3, "the template's, those of no references, and the noise"
        assert seen[3] == ()


def page_bytes(models: ResidentModels, info: ModelInfo, gauge: CpuGauge | None, cache: CacheConfig) -> int:
    return device_page_bytes(gauge, models.families, [info], cache, LIMITS)


def test_what_batches_keep_is_freed_before_what_weights_take_is_read(
    models: ResidentModels, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, alive = list[weakref.ref[Batches]](), list[int]()

    class Noted(Batches):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(weakref.ref(self))

    class Watchful(CpuGauge):
        def taken(self) -> int:
            gc.collect()  # as a CUDA gauge does
            alive.append(sum(each() is not None for each in made))
            return super().taken()

    monkeypatch.setattr(memory_probe, "Batches", Noted)
    page_bytes(models, info, Watchful(1000 * MIB), CacheConfig())
    assert made
    assert alive[0] == 0


def test_pages_get_what_the_model_and_its_batches_leave(models: ResidentModels, info: ModelInfo) -> None:
    gauge = CpuGauge(1000 * MIB, taken=100 * MIB)
    room = page_bytes(models, info, gauge, CacheConfig())
    assert room % MIB == 0
    kept = LIMITS.max_num_seqs * Batches(models.families["tiny"], info).kept_bytes(LIMITS.max_plans_in_flight + 1)
    assert 0 <= 800 * MIB - max(gauge.peaks) - kept - room < MIB
    half = page_bytes(models, info, CpuGauge(1000 * MIB, taken=100 * MIB), CacheConfig(gpu_memory_utilization=0.5))
    assert room - half == 400 * MIB


def test_a_configured_size_is_used_as_it_is(models: ResidentModels, info: ModelInfo) -> None:
    gauge = CpuGauge(1000 * MIB)
    assert page_bytes(models, info, gauge, CacheConfig(device_bytes=5)) == 5
    assert page_bytes(models, info, gauge, CacheConfig(device_bytes=0)) == 0
    assert page_bytes(models, info, None, CacheConfig()) == 0, "a CPU"
    assert page_bytes(models, msgspec.structs.replace(info, page_scheme=None), gauge, CacheConfig()) == 0
    assert gauge.peaks == [], "nothing was measured for it"
    assert gauge_of(torch.device("cpu")) is None


def test_no_room_is_an_error_with_its_remedy(models: ResidentModels, info: ModelInfo) -> None:
    with pytest.raises(ConfigError, match="--no-mask-aware"):
        page_bytes(models, info, CpuGauge(100 * MIB, taken=90 * MIB), CacheConfig())

    class Full(CpuGauge):
        def peak_of(self, run: Callable[[], object]) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError, match=r"no room for the largest batch .*--max-num-batched-tokens"):
        page_bytes(models, info, Full(100 * MIB), CacheConfig())


class Driver:
    """A GPU of 100 bytes, of which other processes use 10, as the CUDA driver and PyTorch's allocator report it.
    reserved: by the allocator; idle: the part of it that no tensor uses.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved = self.idle = self.peak = 0
        for name in ("mem_get_info", "empty_cache", "reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.peak)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 90 - self.reserved, 100

    def empty_cache(self) -> None:
        self.reserved, self.idle = self.reserved - self.idle, 0

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.reserved

    def synchronize(self, device: torch.device) -> None:
        """Nothing is under way."""

    def take(self, nbytes: int) -> None:
        self.reserved += max(0, nbytes - self.idle)
        self.idle = max(0, self.idle - nbytes)
        self.peak = max(self.peak, self.reserved)

    def give_back(self, nbytes: int) -> None:
        self.idle += nbytes


def test_a_gpu_is_read_by_what_its_driver_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    gauge = CudaGauge(torch.device("cuda", 0))
    driver.take(40)  # weights
    driver.take(20)
    driver.give_back(20)  # what loading them took besides

    def batch() -> None:
        driver.take(15)
        driver.give_back(15)

    assert gauge.peak_of(batch) == 15
    assert (gauge.total, gauge.taken(), gauge.free()) == (100, 40, 50)
    assert measure(gauge, [batch], 3) == DeviceMemory(total=100, taken=40, peak=15, kept=3, free=50)


class Graphs:
    """Batches whose steps are captured in their second call, which takes `shared` bytes once and `each` every time."""

    def __init__(self, shared: int, each: int, *, has_pages: bool = True) -> None:
        self.info = SimpleNamespace(page_scheme=object() if has_pages else None)
        self.family = SimpleNamespace(drop_graphs=self._drop)
        self._shared, self._each, self._calls = shared, each, dict[float, int]()

    def of_one_request(self, share: float) -> Callable[[], None]:
        def step() -> None:
            self._calls[share] = self._calls.get(share, 0) + 1

        return step

    def taken(self) -> int:
        number = sum(calls > 1 for calls in self._calls.values())
        return 100 + (self._shared if number else 0) + number * self._each

    def _drop(self) -> None:
        self._calls.clear()


@pytest.mark.parametrize("has_pages", [True, False])
def test_room_is_left_for_the_most_graphs(has_pages: bool) -> None:
    graphs: Any = Graphs(500, 3, has_pages=has_pages)
    least = 500 + MAX_GRAPHS * 3
    assert graph_bytes(graphs, graphs) >= least
    if has_pages:
        assert graph_bytes(graphs, graphs) == least + 3, "two are captured before the one that tells what each adds"
    assert graphs.taken() == 100
    none: Any = Graphs(0, 0)
    assert graph_bytes(none, none) == 0


def test_the_steps_that_are_measured_on_a_gpu_are_those_that_are_captured(family: Family, info: ModelInfo) -> None:
    denoiser: Any = family._denoiser  # type: ignore[attr-defined]
    twin = denoiser.computing_with(gpu_operators(torch.device("cpu")))
    twin.graphs = StepGraphs(SimulatedCapture())
    batches = Batches(family, msgspec.structs.replace(info, device="cuda"))
    for share in (0.9, 0.5, 0.05):
        assert twin._is_captured([batches._row(share)])
    assert not twin._is_captured([Batches(family, info)._row(0.5)])
