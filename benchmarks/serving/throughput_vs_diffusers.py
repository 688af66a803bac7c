"""Edits per second of the server under concurrent clients, against a loop over diffusers' FluxFillPipeline.

Same checkpoint, steps, dtype and threads. The server computes every token too, unless told otherwise. Both are loaded
and warm before anything is measured, and take turns in rounds; while one works the other waits.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.command import command, model_flags
from benchmarks.load.client import Target, warm_up
from benchmarks.load.dataset import example
from benchmarks.load.server import ready_server
from benchmarks.load.workload import available_cores
from benchmarks.report import percentile, print_report
from benchmarks.serving.pipeline_loop import count_flop, peak_flops, pipeline_process, run_edits
from core.config import EMBEDDED_MODEL


@dataclass
class Measured:
    """Seconds of every round on both sides, and of every edit at the server, waiting included. flop: of an edit."""

    flop: float
    server: list[float] = field(default_factory=list)
    diffusers: list[float] = field(default_factory=list)
    peak_flops: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=available_cores(), steps=8, rounds=4)
    parser.add_argument("--num-edits", type=int, default=16, help="edits per round")
    parser.add_argument("--mask-aware", action="store_true", help="let the server skip tokens outside the mask")
    parser.add_argument("--concurrency", type=int, default=8, help="clients that send at once")
    args = parser.parse_args(argv)
    with (
        ready_server([*model_flags(args), "--max-num-seqs", str(args.concurrency)]) as server,
        pipeline_process(args.model, args.dtype, args.threads) as pipeline,
    ):
        target = Target(server.url, extra={"mask_aware": args.mask_aware})
        asyncio.run(warm_up(target, example(0, 2 * args.concurrency, args.steps), args.concurrency))
        measured = Measured(pipeline.submit(count_flop, example(0, 1, args.steps)[0]).result())
        for number in range(args.rounds):
            calls = example((number + 1) * 1000, args.num_edits, args.steps)
            run = asyncio.run(warm_up(target, calls, args.concurrency))
            measured.latency += run.latencies
            measured.server.append(run.seconds)
            measured.diffusers.append(pipeline.submit(run_edits, calls).result())
            measured.peak_flops.append(pipeline.submit(peak_flops, args.dtype).result())
    _report(args, measured)


def _report(args: argparse.Namespace, measured: Measured) -> None:
    edits, limit = args.num_edits * args.rounds, max(measured.peak_flops) / measured.flop
    ours, theirs = edits / sum(measured.server), edits / sum(measured.diffusers)
    ratios = [b / a for a, b in zip(measured.server, measured.diffusers, strict=True)]
    p50, p99 = statistics.median(measured.latency), percentile(measured.latency, 0.99)
    rows = [
        (f"server, {args.concurrency} clients", f"{ours:.3f} edits/s"),
        ("diffusers FluxFillPipeline, a loop", f"{theirs:.3f} edits/s"),
        ("ratio", f"{ours / theirs:.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})"),
        ("latency under load p50 / p99", f"{p50:.3f} / {p99:.3f} s"),
        ("limit: all tokens, matrix products only", f"{limit:.3f} edits/s ({measured.flop / 1e9:.1f} GFLOP an edit)"),
        ("server's share of that limit", f"{ours / limit:.1%}"),
    ]
    settings = {name: getattr(args, name) for name in ("steps", "dtype", "threads", "concurrency")}
    result = {"benchmark": "throughput_vs_diffusers", "mask_aware": int(args.mask_aware), "edits": edits} | settings
    result |= {"server_edits_per_s": ours, "diffusers_edits_per_s": theirs, "limit_edits_per_s": limit}
    result |= {"ratio": ours / theirs, "ratio_min": min(ratios), "ratio_max": max(ratios)}
    kind = "mask-aware" if args.mask_aware else "exact"
    title = f"{edits} {kind} edits, {args.steps} steps, {args.dtype}, {args.threads} threads, {args.rounds} rounds"
    print_report(title, rows, result | {"latency_p50_s": p50, "latency_p99_s": p99}, args.output)


if __name__ == "__main__":
    main()
