"""Do running edits feel a cold template? Time between their steps while one is primed, against a warm one coming in.

The scheduler and a real worker, without HTTP: every end of a running step is seen. Eight edits run; newcomers join them
one at a time, in turn with a template whose pages are there and with one that nobody has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.load.workload import IMAGE
from benchmarks.report import percentile, print_report
from benchmarks.serving.pipeline_loop import DTYPES
from core.config import EMBEDDED_MODEL, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from core.handles import PAGE_ARENA, ArrayRef
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages.engine import EditRequest
from core.messages.worker import BatchResult, PageCopied, StepPlan, TransferDone
from core.model_info import ModelInfo
from core.request import SamplingParams
from core.scheduler import StepScheduler
from engine.image_ops import content_id
from model_executor.executor import Executor

Pixels = npt.NDArray[np.uint8]

ENDLESS_STEPS = 200


@dataclass
class Gaps:
    """Seconds between two ends of steps of the running edits, while a newcomer's pages were on their way."""

    seconds: list[float] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)  # priming chunks of each newcomer


class Loop:
    """The engine's loop, with a clock on the running edits' steps."""

    def __init__(
        self,
        args: argparse.Namespace,
        executor: Executor,
        models: dict[str, ModelInfo],
        arena: Arena,
        cache: CacheConfig | None = None,
    ) -> None:
        self._args = args
        self._executor = executor
        self._results = executor.results()
        self._model = next(iter(models.values()))
        limits = SchedulerConfig(max_num_seqs=args.running + 1)
        self.scheduler = StepScheduler(limits, models, cache=cache)
        self._arena = arena
        self._allocator = ArenaAllocator(arena)
        self._ids = count()
        self.template = np.asarray(Image.open(IMAGE).convert("RGB"))

    def add(self, template: Pixels, steps: int, *, mask_aware: bool) -> str:
        """Submit an edit of a square in the middle; returns its id."""
        height, width, _ = template.shape
        token, side = self._model.token_size, self._args.mask_tokens
        rows, columns = height // token, width // token
        mask = np.zeros((height, width), np.uint8)
        top, left = (rows - side) // 2, (columns - side) // 2
        mask[top * token : (top + side) * token, left * token : (left + side) * token] = 1
        active = np.flatnonzero(mask[::token, ::token]).astype(np.int32)
        number = next(self._ids)
        edit = EditRequest(
            request_id=f"edit-{number}",
            model=self._model.name,
            prompt="a red striped shirt",
            sampling=SamplingParams(num_inference_steps=steps, guidance_scale=30.0, seed=number, full_steps=0),
            width=width,
            height=height,
            template=self._share(template),
            mask=self._share(mask),
            active=self._share(active),
            content_id=content_id(template),
            num_tokens=rows * columns,
            max_text_tokens=self._model.max_text_tokens,
            extra_text_tokens=self._model.extra_text_tokens,
            pixels=(self._share(np.zeros_like(template)),),
            latents=self._share(np.zeros((rows * columns, self._model.latent_width), np.float32)),
            arrival=time.monotonic(),
            is_mask_aware=mask_aware,
        )
        self.scheduler.add(edit)
        return edit.request_id

    def _share(self, array: npt.NDArray[Any]) -> ArrayRef:
        region = self._allocator.alloc(array.nbytes)
        ref = msgspec.structs.replace(region, shape=array.shape, dtype=array.dtype.name)
        self._arena.view(ref)[...] = array
        return ref

    async def step(self) -> float | None:
        """One iteration; when its denoising batch ended, if there was one."""
        plan = self.scheduler.schedule(time.monotonic())
        ended, awaited = None, 0 if plan is None else self._submit(plan)
        for _ in range(awaited):
            result = await anext(self._results)
            if isinstance(result, BatchResult):
                if any(
                    batch.stage == "denoise" and batch.id == result.batch_id for batch in (plan.batches if plan else ())
                ):
                    ended = time.perf_counter()
                self.scheduler.apply(result)
            elif isinstance(result, TransferDone):
                self.scheduler.apply_transfer(result)
            elif isinstance(result, PageCopied):
                self.scheduler.apply_copy(result)
            else:
                raise RuntimeError(f"the worker failed: {result}")
        return ended

    def _submit(self, plan: StepPlan) -> int:
        self._executor.submit(plan)
        return len(plan.batches) + len(plan.transfers) + len(plan.copies)

    async def finish(self, request_id: str) -> None:
        """Iterate until this edit has left."""
        await self.watch(request_id, Gaps())

    async def watch(self, newcomer: str, gaps: Gaps) -> None:
        """Iterate until the newcomer has left, noting the gaps until it took its first step."""
        last, before = None, self.scheduler.pages.num_chunks
        while True:
            ended = await self.step()
            if last is not None and ended is not None:
                gaps.seconds.append(ended - last)
            last = ended
            outputs = self.scheduler.take_outputs()
            if any(output.request_id == newcomer for output in outputs):
                gaps.chunks.append(self.scheduler.pages.num_chunks - before)
                return


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    for running_masked in (False, True):
        warm, cold = asyncio.run(_measure(args, running_masked))
        _report(args, running_masked, warm, cold)


async def _measure(args: argparse.Namespace, running_masked: bool) -> tuple[Gaps, Gaps]:
    model = ModelConfig(model=args.model, dtype=args.dtype, threads=args.threads)
    config = EngineConfig(models=(model,))
    arena, pages = Arena.create(0, 2 * 1024**3), Arena.create(PAGE_ARENA, config.cache.host_bytes)
    async with Executor(config, arena.id, arena.fd, pages.id, pages.fd) as executor:
        loop = Loop(args, executor, await executor.ready(), arena)
        running = [loop.add(loop.template, ENDLESS_STEPS, mask_aware=running_masked) for _ in range(args.running)]
        gaps = Gaps(), Gaps()
        await loop.watch(loop.add(loop.template, 8, mask_aware=True), Gaps())
        for number in range(args.rounds):
            for template, kind in ((loop.template, gaps[0]), (unseen(loop.template, number), gaps[1])):
                await loop.watch(loop.add(template, args.steps, mask_aware=True), kind)
        loop.scheduler.abort(running)
    return gaps


def unseen(template: Pixels, seed: int) -> Pixels:
    """The template with a little noise: another one, as far as the cache knows."""
    noise = np.random.default_rng(seed).integers(-2, 3, template.shape, np.int16)
    pixels: Pixels = (template + noise).clip(0, 255).astype(np.uint8)
    return pixels


def _report(args: argparse.Namespace, running_masked: bool, warm: Gaps, cold: Gaps) -> None:
    p99 = {name: percentile(gaps.seconds, 0.99) for name, gaps in (("warm", warm), ("cold", cold))}
    medians = {name: statistics.median(gaps.seconds) for name, gaps in (("warm", warm), ("cold", cold))}
    kind = "mask-aware" if running_masked else "exact"
    print_report(
        f"{args.running} running {kind} edits, newcomers of {args.steps} steps, {args.dtype}, {args.rounds} rounds",
        [
            ("gap with a warm newcomer, median / p99", f"{medians['warm'] * 1e3:.1f} / {p99['warm'] * 1e3:.1f} ms"),
            ("gap with a cold newcomer, median / p99", f"{medians['cold'] * 1e3:.1f} / {p99['cold'] * 1e3:.1f} ms"),
            ("p99 ratio", f"{p99['cold'] / p99['warm']:.2f}"),
            ("chunks of a cold newcomer", f"{statistics.median(cold.chunks):.0f}"),
        ],
        {
            "benchmark": "prime_gap",
            "running": kind,
            "warm_gap_p99_ms": p99["warm"] * 1e3,
            "cold_gap_p99_ms": p99["cold"] * 1e3,
            "p99_ratio": p99["cold"] / p99["warm"],
            "chunks": statistics.median(cold.chunks),
        },
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers checkpoint")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute type")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the worker")
    parser.add_argument("--running", type=int, default=8, help="edits that run all the time")
    parser.add_argument("--mask-tokens", type=int, default=5, help="side of the masked square in tokens")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps of a newcomer")
    parser.add_argument("--rounds", type=int, default=6, help="newcomers of each kind")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
