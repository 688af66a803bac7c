"""Load or prime: edits whose pages lie on disk, under the cost model's choice and with either choice forced.

The scheduler and a real worker, without HTTP. Memory holds one template, and edits of two take turns, so that every
edit finds its pages on disk only. Whatever is chosen, the picture is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

from benchmarks.report import print_report
from benchmarks.serving.pipeline_loop import DTYPES
from benchmarks.serving.prime_gap import Loop, Pixels, unseen
from core.config import EMBEDDED_MODEL, CacheConfig, EngineConfig, ModelConfig
from core.handles import PAGE_ARENA, Tier
from core.ipc.shared_array import Arena
from core.priming import TemplateInfo
from model_executor.executor import Executor

DISK_BYTES = 1024**3
TOKENS = 256
"""Of the example picture."""


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    with tempfile.TemporaryDirectory() as directory:
        _report(args, asyncio.run(_measure(args, directory)))


async def _measure(args: argparse.Namespace, directory: str) -> dict[str, list[float]]:
    """Choice -> seconds of each edit."""
    model = ModelConfig(model=args.model, dtype=args.dtype, threads=args.threads)
    room = CacheConfig(disk_bytes=DISK_BYTES, directory=directory)
    config = EngineConfig(models=(model,), cache=room)
    arena, pages = Arena.create(0, 1024**3), Arena.create(PAGE_ARENA, room.host_bytes)
    async with Executor(config, arena.id, arena.fd, pages.id, pages.fd) as executor:
        models = await executor.ready()
        (info,) = models.values()
        assert info.page_scheme is not None
        one = info.page_scheme.template_bytes(TOKENS, len(info.page_scheme.keyframes))
        tight = CacheConfig(host_bytes=one, disk_bytes=DISK_BYTES, directory=directory)
        loop = Loop(args, executor, models, arena, tight)
        templates = [unseen(loop.template, seed) for seed in (1, 2)]
        for template in (templates[0], templates[0], templates[1], templates[1]):  # used twice: they go to disk
            await _edit(args, loop, template)
        return await _take_turns(args, loop, templates)


async def _take_turns(args: argparse.Namespace, loop: Loop, templates: Sequence[Pixels]) -> dict[str, list[float]]:
    choices: dict[str, Callable[[TemplateInfo, Tier, int], bool]] = {
        "load": lambda *_: True,
        "prime": lambda *_: False,
        "cost model": loop.scheduler.pages.load_wins,
    }
    seconds: dict[str, list[float]] = {name: [] for name in choices}
    for number in range(args.rounds):
        for name, choice in choices.items():
            loop.scheduler.pages.load_wins = choice
            for template in templates:
                seconds[name].append(await _edit(args, loop, template))
        if number == 0:  # the first round teaches the cost model what a load takes
            seconds = {name: [] for name in choices}
    return seconds


async def _edit(args: argparse.Namespace, loop: Loop, template: Pixels) -> float:
    start = time.perf_counter()
    await loop.finish(loop.add(template, args.steps, mask_aware=True))
    return time.perf_counter() - start


def _report(args: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratio = medians["cost model"] / min(medians["load"], medians["prime"])
    rows = [(f"{name}, median", f"{median * 1e3:.1f} ms") for name, median in medians.items()]
    rows.append(("cost model's choice against the better", f"{ratio:.3f}"))
    title = f"edits of {args.steps} steps whose pages lie on disk, {args.dtype}, {args.rounds - 1} rounds"
    result = {f"{name.replace(' ', '_')}_ms": median * 1e3 for name, median in medians.items()}
    print_report(title, rows, {"benchmark": "load_or_prime", **result, "ratio": ratio})


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers checkpoint")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute type")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the worker")
    parser.add_argument("--mask-tokens", type=int, default=5, help="side of the masked square in tokens")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps")
    parser.add_argument(
        "--rounds", type=int, default=12, help="two edits of each choice in a round; the first is practice"
    )
    parser.set_defaults(running=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
