"""What a step launches, it launches without a wait for the GPU: each wait lets the GPU run dry.

`TRITON_INTERPRET=0 python -m pytest -m gpu`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.compare.checkpoints import MAKERS
from benchmarks.gpu.local_engine import LocalEngine
from core.config import CacheConfig
from core.messages.worker import Item, ItemResult
from core.sampling_params import SamplingParams
from core.scheduling.ops.denoise import DENOISE, Denoise
from model_executor.worker.ops import HANDLERS
from model_executor.worker.ops.context import WorkerContext

GIB = 2**30
STEPS = 5
BEFORE = 2
"""Steps that may wait: they upload what all later ones read, and make kernels and plans of attention."""


@contextmanager
def no_waits() -> Iterator[None]:
    """Operations that wait for the GPU raise RuntimeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not every wait is noticed
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["flux", "flux_fill", "sd3", "sdxl"])
@pytest.mark.parametrize("is_mask_aware", [True, False])
def test_a_step_does_not_wait(
    family: str, is_mask_aware: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    steps, handle = list[int](), HANDLERS[DENOISE.name]

    def watched(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
        (work,) = [item.work for item in items]
        assert isinstance(work, Denoise)
        assert (work.active is not None) == is_mask_aware
        if work.step < BEFORE:
            return handle(context, items)
        steps.append(work.step)
        with no_waits():
            return handle(context, items)

    monkeypatch.setitem(HANDLERS, DENOISE.name, watched)
    cache = CacheConfig(device_bytes=GIB, host_bytes=GIB)
    picture = np.random.default_rng(1).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    sampling = SamplingParams(num_inference_steps=STEPS, seed=7, mask_aware=is_mask_aware)
    with closing(LocalEngine(MAKERS[family](tmp_path / family), "cuda:0", "bfloat16", cache)) as engine:
        engine.edit([picture], sampling)
    assert steps == list(range(BEFORE, STEPS))
