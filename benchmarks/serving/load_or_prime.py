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

from benchmarks.command import command
from benchmarks.report import print_report
from benchmarks.serving.engine_loop import EngineLoop, Pixels, engine_loop, unseen
from core.config import EMBEDDED_MODEL, CacheConfig
from core.handles import Tier
from core.priming import TemplateInfo

DISK_BYTES = 1024**3


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=8, rounds=12)
    parser.add_argument("--mask-tokens", type=int, default=5, help="side of the masked square in tokens")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        seconds = asyncio.run(_measure(args, directory))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratio = medians["cost model"] / min(medians["load"], medians["prime"])
    rows = [(f"{name}, median", f"{median * 1e3:.1f} ms") for name, median in medians.items()]
    rows.append(("cost model's choice against the better", f"{ratio:.3f}"))
    title = f"edits of {args.steps} steps whose pages lie on disk, {args.dtype}, {args.rounds - 1} rounds"
    result = {f"{name.replace(' ', '_')}_ms": median * 1e3 for name, median in medians.items()}
    print_report(title, rows, {"benchmark": "load_or_prime", **result, "ratio": ratio}, args.output)


async def _measure(args: argparse.Namespace, directory: str) -> dict[str, list[float]]:
    """Choice -> seconds of each edit."""
    async with engine_loop(args, CacheConfig(disk_bytes=DISK_BYTES, directory=directory), 2, num_templates=1) as loop:
        templates = [unseen(loop.template, seed) for seed in (1, 2)]
        for template in (templates[0], templates[0], templates[1], templates[1]):  # used twice: they go to disk
            await _edit(args, loop, template)
        return await _take_turns(args, loop, templates)


async def _take_turns(
    args: argparse.Namespace, loop: EngineLoop, templates: Sequence[Pixels]
) -> dict[str, list[float]]:
    choices: dict[str, Callable[[TemplateInfo, Tier, int], bool]] = {
        "load": lambda *_: True,
        "prime": lambda *_: False,
        "cost model": loop.scheduler.pages.load_wins,
    }
    seconds: dict[str, list[float]] = {name: [] for name in choices}
    for number in range(args.rounds):
        for name, choice in choices.items():
            loop.scheduler.pages.load_wins = choice
            taken = [await _edit(args, loop, template) for template in templates]
            seconds[name] += taken if number else []  # the first round teaches the cost model what a load takes
    return seconds


async def _edit(args: argparse.Namespace, loop: EngineLoop, template: Pixels) -> float:
    start = time.perf_counter()
    await loop.watch(loop.add(template, args.steps))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
