"""An engine's loop over a real worker, without HTTP, for benchmarks that look at single steps and choices."""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.load.workload import IMAGE, prompt
from core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from core.handles import PAGE_ARENA, ArrayRef
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages.engine import EditRequest
from core.messages.worker import BatchResult, PageCopied, TransferDone
from core.model_info import ModelInfo
from core.request import SamplingParams
from core.scheduler import StepScheduler
from engine.image_ops import content_id
from model_executor.executor import Executor

Pixels = npt.NDArray[np.uint8]

ARENA_BYTES = 2 * 1024**3


@dataclass
class Gaps:
    """seconds: between two ends of denoising batches. chunks: of priming, by newcomer."""

    seconds: list[float] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)


class EngineLoop:
    """The scheduler, with a clock on the ends of steps. mask_tokens: side of the masked square of every edit."""

    def __init__(
        self, executor: Executor, info: ModelInfo, arena: Arena, cache: CacheConfig, max_num_seqs: int, mask_tokens: int
    ) -> None:
        self.info = info
        self.template = np.asarray(Image.open(IMAGE).convert("RGB"))
        limits = SchedulerConfig(max_num_seqs=max_num_seqs)
        self.scheduler = StepScheduler(limits, {info.name: info}, cache=cache)
        self._executor = executor
        self._results = executor.results()
        self._arena = arena
        self._allocator = ArenaAllocator(arena)
        self._mask_tokens = mask_tokens
        self._ids = count()

    def add(self, template: Pixels, steps: int, *, mask_aware: bool = True) -> str:
        """Submit an edit of a square in the middle; returns its id."""
        height, width, _ = template.shape
        token, side = self.info.token_size, self._mask_tokens
        rows, columns = height // token, width // token
        mask = np.zeros((height, width), np.uint8)
        top, left = (rows - side) // 2, (columns - side) // 2
        mask[top * token : (top + side) * token, left * token : (left + side) * token] = 1
        number = next(self._ids)
        edit = EditRequest(
            request_id=f"edit-{number}",
            model=self.info.name,
            prompt=prompt(0),
            sampling=SamplingParams(num_inference_steps=steps, guidance_scale=30.0, seed=number, full_steps=0),
            width=width,
            height=height,
            template=self._share(template),
            mask=self._share(mask),
            active=self._share(np.flatnonzero(mask[::token, ::token]).astype(np.int32)),
            content_id=content_id(template),
            num_tokens=rows * columns,
            max_text_tokens=self.info.max_text_tokens,
            extra_text_tokens=self.info.extra_text_tokens,
            pixels=(self._share(np.zeros_like(template)),),
            latents=self._share(np.zeros((rows * columns, self.info.latent_width), np.float32)),
            arrival=time.monotonic(),
            is_mask_aware=mask_aware,
        )
        self.scheduler.add(edit)
        return edit.request_id

    async def watch(self, newcomer: str, gaps: Gaps | None = None) -> Gaps:
        """Iterate until this edit has left; notes the gaps meanwhile."""
        gaps = gaps or Gaps()
        last, before = None, self.scheduler.pages.num_chunks
        while True:
            ended = await self._step()
            if last is not None and ended is not None:
                gaps.seconds.append(ended - last)
            last = ended
            if any(output.request_id == newcomer for output in self.scheduler.take_outputs()):
                gaps.chunks.append(self.scheduler.pages.num_chunks - before)
                return gaps

    async def _step(self) -> float | None:
        """One iteration; when its denoising batch ended, if there was one."""
        plan = self.scheduler.schedule(time.monotonic())
        if plan is None:
            return None
        self._executor.submit(plan)
        denoising = {batch.id for batch in plan.batches if batch.stage == "denoise"}
        ended = None
        for _ in range(len(plan.batches) + len(plan.transfers) + len(plan.copies)):
            result = await anext(self._results)
            if isinstance(result, BatchResult) and result.batch_id in denoising:
                ended = time.perf_counter()
            self._apply(result)
        return ended

    def _apply(self, result: object) -> None:
        match result:
            case BatchResult():
                self.scheduler.apply(result)
            case TransferDone():
                self.scheduler.apply_transfer(result)
            case PageCopied():
                self.scheduler.apply_copy(result)
            case _:
                raise RuntimeError(f"the worker failed: {result}")

    def _share(self, array: npt.NDArray[Any]) -> ArrayRef:
        region = self._allocator.alloc(array.nbytes)
        ref = msgspec.structs.replace(region, shape=array.shape, dtype=array.dtype.name)
        self._arena.view(ref)[...] = array
        return ref


@asynccontextmanager
async def engine_loop(
    args: argparse.Namespace, cache: CacheConfig, max_num_seqs: int, num_templates: int | None = None
) -> AsyncIterator[EngineLoop]:
    """With a worker of its own. num_templates: how many of the example fit into memory; None: as `cache` says."""
    config = EngineConfig(models=(ModelConfig(model=args.model, dtype=args.dtype, threads=args.threads),), cache=cache)
    arena, pages = Arena.create(0, ARENA_BYTES), Arena.create(PAGE_ARENA, cache.host_bytes)
    async with Executor(config, arena.id, arena.fd, pages.id, pages.fd) as executor:
        (info,) = (await executor.ready()).values()
        if num_templates is not None:
            cache = msgspec.structs.replace(cache, host_bytes=num_templates * _template_bytes(info))
        yield EngineLoop(executor, info, arena, cache, max_num_seqs, args.mask_tokens)


def _template_bytes(info: ModelInfo) -> int:
    assert info.page_scheme is not None
    with Image.open(IMAGE) as image:
        tokens = info.num_image_tokens(*image.size)
    return info.page_scheme.template_bytes(tokens, len(info.page_scheme.keyframes))


def unseen(template: Pixels, seed: int) -> Pixels:
    """The template with a little noise: another one, as far as the cache knows."""
    noise = np.random.default_rng(seed).integers(-2, 3, template.shape, np.int16)
    pixels: Pixels = (template + noise).clip(0, 255).astype(np.uint8)
    return pixels
