"""Do running edits feel a cold template? Time between their steps while one is primed, against a warm one coming in.

The scheduler and a real worker, without HTTP: every end of a running step is seen. Eight edits run; newcomers join them
one at a time, in turn with a template whose pages are there and with one that was never seen.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence

from benchmarks.command import command
from benchmarks.report import percentile, print_report
from benchmarks.serving.engine_loop import Gaps, engine_loop, unseen
from core.config import EMBEDDED_MODEL, CacheConfig

ENDLESS_STEPS = 200


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=8, rounds=6)
    parser.add_argument("--running", type=int, default=8, help="edits that run all the time")
    parser.add_argument("--mask-tokens", type=int, default=5, help="side of the masked square in tokens")
    args = parser.parse_args(argv)
    for running_masked in (False, True):
        warm, cold = asyncio.run(_measure(args, running_masked))
        _report(args, "mask-aware" if running_masked else "exact", warm, cold)


async def _measure(args: argparse.Namespace, running_masked: bool) -> tuple[Gaps, Gaps]:
    """Gaps beside warm and beside cold newcomers."""
    async with engine_loop(args, CacheConfig(), args.running + 1) as loop:
        running = [loop.add(loop.template, ENDLESS_STEPS, mask_aware=running_masked) for _ in range(args.running)]
        warm, cold = Gaps(), Gaps()
        await loop.watch(loop.add(loop.template, 8))
        for number in range(args.rounds):
            await loop.watch(loop.add(loop.template, args.steps), warm)
            await loop.watch(loop.add(unseen(loop.template, number), args.steps), cold)
        loop.scheduler.abort(running)
    return warm, cold


def _report(args: argparse.Namespace, kind: str, warm: Gaps, cold: Gaps) -> None:
    warm_p99, cold_p99 = (1e3 * percentile(gaps.seconds, 0.99) for gaps in (warm, cold))
    warm_p50, cold_p50 = (1e3 * statistics.median(gaps.seconds) for gaps in (warm, cold))
    chunks = statistics.median(cold.chunks)
    rows = [
        ("gap with a warm newcomer, median / p99", f"{warm_p50:.1f} / {warm_p99:.1f} ms"),
        ("gap with a cold newcomer, median / p99", f"{cold_p50:.1f} / {cold_p99:.1f} ms"),
        ("p99 ratio", f"{cold_p99 / warm_p99:.2f}"),
        ("chunks of a cold newcomer", f"{chunks:.0f}"),
    ]
    result = {"benchmark": "prime_gap", "running": kind, "warm_gap_p99_ms": warm_p99, "cold_gap_p99_ms": cold_p99}
    result |= {"p99_ratio": cold_p99 / warm_p99, "chunks": chunks}
    title = f"{args.running} running {kind} edits, newcomers of {args.steps} steps, {args.dtype}, {args.rounds} rounds"
    print_report(title, rows, result, args.output)


if __name__ == "__main__":
    main()
