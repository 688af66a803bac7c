"""Whole edits through an engine's own scheduler, runner and page store, at FLUX.1-dev's shape.

An edit here pays for all that a worker does: the plan of every step, the wait for the device after it, tables, stored
tensors. What is missing of a server is the way between processes (section `overhead`) and images on their way in and
out.
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.gpu.bench import Bench, Call
from benchmarks.gpu.boxes import box_at
from benchmarks.gpu.correctness import soft_picture
from benchmarks.gpu.flux import PIXELS
from benchmarks.gpu.flux_runs import ALIGNMENT
from benchmarks.gpu.local_engine import LocalEngine
from benchmarks.gpu.random_flux import RandomFlux
from benchmarks.gpu.report import Figures
from core.config import CacheConfig
from core.messages.worker import Batch, BatchResult
from core.sampling_params import SamplingParams

WARM_RATIO, COLD_RATIO = 0.2, 0.1
"""Mask ratios of a later edit of a picture, and of its first one."""
ROUNDS = 2
NEW_PICTURES = ROUNDS + 3
"""New pictures: one is edited before the comparison, one does not count in it, and the batches of one are counted."""
TEMPLATES = 2
"""Pictures whose pages the cache has room for: the one that is edited again, and a new one."""
GUIDANCE = 3.5
SPARE = 12 * 10**9
"""Bytes that steps, the VAE and the text encoders take beside weights and pages."""


def page_bytes(bench: Bench, entry: int) -> int:
    """Bytes of the cache. entry: bytes of one keyframe's pages; a picture's clean latents count as one more."""
    return TEMPLATES * (bench.size.flux.keyframes + 1) * -(-entry // ALIGNMENT) * ALIGNMENT


def needed_bytes(bench: Bench, weights: int, entry: int) -> int:
    """Bytes of a GPU's memory that are needed. weights, entry: bytes of the transformer and of one keyframe's pages."""
    return weights + page_bytes(bench, entry) + SPARE


def run(bench: Bench, entry_bytes: int) -> None:
    """A lone exact edit, a later edit of a picture eagerly and with CUDA graphs, and the first edit of a new picture,
    in turns. entry_bytes: of one keyframe's pages."""
    pages, is_cuda = page_bytes(bench, entry_bytes), bench.device.type == "cuda"
    cache = CacheConfig(device_bytes=pages) if is_cuda else CacheConfig(device_bytes=0, host_bytes=pages)
    parts = RandomFlux(bench)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = parts.save(Path(folder) / "flux")
        with closing(Edits(bench, checkpoint, cache, parts)) as edits:
            edits.put_all()


class Edits(LocalEngine):
    """Edits of one picture, and first edits of others. ops, ms: of the batches that have run since they were cleared,
    their number and milliseconds by op."""

    def __init__(self, bench: Bench, checkpoint: Path, cache: CacheConfig, parts: RandomFlux) -> None:
        self.ops: Counter[str] = Counter()
        self.ms: defaultdict[str, float] = defaultdict(float)
        self._bench, self._size = bench, bench.size.flux
        self._side = self._size.side * PIXELS
        self._known = soft_picture(self._side, 0)
        self._new = [soft_picture(self._side, seed) for seed in range(1, NEW_PICTURES + 1)]
        self._places = count()
        dtype = str(bench.dtype).removeprefix("torch.")
        super().__init__(checkpoint, str(bench.device), dtype, cache, make=parts.make, graphs=bench.graphs)

    def put_all(self) -> None:
        put = partial(self._bench.report.put, "engine_edits")
        put(steps=self._size.steps, warm_ratio=WARM_RATIO, cold_ratio=COLD_RATIO)
        self.cold()  # compiles kernels and embeds the prompt
        self.edit([self._known], self._sampling(is_mask_aware=True))  # makes the pages of later edits
        calls: dict[str, Call] = {"exact": self.graphs.replayed(self.exact), "warm": self.graphs.eager(self.warm)}
        if self.graphs.works:
            calls["warm_graph"] = self.graphs.replayed(self.warm)
        calls["cold"] = self.graphs.replayed(self.cold)
        seconds = self._bench.medians(calls, ROUNDS)
        put(**{f"{name}_s": taken for name, taken in seconds.items()}, graphs=self.graphs.figures())
        edits = {"exact": self.exact, "warm": self.warm, "cold": self.cold}
        put(ops={name: self._counted(edit) for name, edit in edits.items()})

    def exact(self) -> None:
        """An edit that computes every token."""
        self.edit([self._known], self._sampling(is_mask_aware=False), box_at(0, WARM_RATIO, self._size.side))

    def warm(self) -> None:
        """A later edit of the picture, with the mask at another place than before. Raises RuntimeError if its pages are
        not there: it would be a first edit."""
        self.ops.clear()
        box = box_at(next(self._places), WARM_RATIO, self._size.side)
        self.edit([self._known], self._sampling(is_mask_aware=True), box)
        if self.ops["prime"]:
            raise RuntimeError("the pages of an earlier edit were not found")

    def cold(self) -> None:
        """The first edit of a new picture."""
        picture = self._new.pop()
        box = box_at(next(self._places), COLD_RATIO, self._size.side)
        self.edit([picture], self._sampling(is_mask_aware=True), box)

    def run(self, batch: Batch) -> BatchResult:
        result = super().run(batch)
        self.ops[batch.op] += 1
        self.ms[batch.op] += 1e3 * result.seconds
        return result

    def _counted(self, call: Call) -> Figures:
        """The number of batches of a call, and their milliseconds, by op."""
        self.ops.clear()
        self.ms.clear()
        call()
        return {op: {"batches": number, "ms": self.ms[op]} for op, number in self.ops.items()}

    def _sampling(self, *, is_mask_aware: bool) -> SamplingParams:
        return SamplingParams(
            num_inference_steps=self._size.steps, guidance_scale=GUIDANCE, seed=7, mask_aware=is_mask_aware
        )
