"""Time of a step of eight edits before its first kernel: scheduler, the plan's way to the worker, and runner.

While a step runs that takes longer than its scheduling, the next plan comes to the worker ahead (`max_ahead_ms`). After
such a step the device waits until the worker has told its result, read that plan, and the runner what it names; the
last two are measured together, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.graphs import GraphChoice
from benchmarks.gpu.local_engine import LocalEngine
from benchmarks.micro.overheads import BATCH, step_seconds
from core.config import EMBEDDED_MODEL, CacheConfig
from core.messages.codec import MessageDecoder, encode
from core.messages.worker import Batch, BatchResult, StepPlan
from core.sampling_params import SamplingParams
from model_executor.models.base import Family, Row
from model_executor.parallel.group import Group

SIDE = 256
STEPS = 24
"""Most steps of an edit; in most of them the batch is full."""
WARM_UP = 5
PAGE_BYTES = 2**30
_PLAN: MessageDecoder[StepPlan] = MessageDecoder(StepPlan)


def run(bench: Bench) -> None:
    """Scheduler and ring, to another process and back; then the runner, up to the first kernel."""
    scheduling = statistics.median(step_seconds(bench.size.overhead_steps))
    bench.report.put("overhead", batch=BATCH, schedule_ring_apply_ms=1e3 * scheduling)
    cache = CacheConfig(device_bytes=PAGE_BYTES if bench.device.type == "cuda" else 0, host_bytes=PAGE_BYTES)
    with closing(Watched(Path(EMBEDDED_MODEL), str(bench.device), cache, bench.graphs)) as engine:
        pictures = [np.full((SIDE, SIDE, 3), 127, np.uint8)] * BATCH  # one template, so that all begin together
        steps = min(STEPS, bench.size.overhead_steps)
        engine.edit(pictures, SamplingParams(num_inference_steps=steps, seed=1))
    runner, ahead = (statistics.median(each[WARM_UP:] or each) for each in (engine.to_kernels, engine.from_plans))
    bench.report.put(
        "overhead", runner_ms=1e3 * runner, total_ms=1e3 * (scheduling + runner), plan_is_there_ms=1e3 * ahead
    )


class Watched(LocalEngine):
    """Records how long a full step's batch was in the runner before the forward pass began, and how long its plan was
    in the worker. to_kernels, from_plans: seconds."""

    def __init__(self, checkpoint: Path, device: str, cache: CacheConfig, graphs: GraphChoice) -> None:
        self.to_kernels: list[float] = []
        self.from_plans: list[float] = []
        self._came = self._began = 0.0
        super().__init__(checkpoint, device, "auto", cache, self._watched, graphs=graphs)

    def run(self, batch: Batch) -> BatchResult:
        plan = encode(StepPlan(batch.id, batches=(batch,)))
        self._came = time.perf_counter()
        (received,) = _PLAN.decode(plan).batches
        self._began = time.perf_counter()
        return super().run(received)

    def _watched(self, family: Family) -> Family:
        return cast(Family, _Noting(family, self._note))

    def _note(self, rows: Sequence[Row]) -> None:
        if len(rows) == BATCH:
            now = time.perf_counter()
            self.to_kernels.append(now - self._began)
            self.from_plans.append(now - self._came)


class _Noting:
    """A family that calls `note` before each prediction."""

    def __init__(self, family: Family, note: Callable[[Sequence[Row]], None]) -> None:
        self._family, self._note = family, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def predict(self, rows: Sequence[Row], group: Group | None = None) -> list[Tensor]:
        self._note(rows)
        return self._family.predict(rows, group)
