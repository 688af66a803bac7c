"""Edits per second of the server under concurrent clients, against a loop over diffusers' FluxFillPipeline.

Checkpoint, steps, dtype and threads are the same. The server computes every token too, unless --mask-aware is given.
Both are loaded and warm before anything is measured, and take turns; while one works, the other is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from concurrent.futures import Executor

from benchmarks.baselines.fill_pipeline import FillEdit, pipeline_process, run_edits
from benchmarks.command import command, model_flags
from benchmarks.load.client import Run, Target, warm_up
from benchmarks.load.dataset import EditCall, example
from benchmarks.load.server import ready_server
from benchmarks.load.workload import available_cores
from benchmarks.report import percentile, print_report
from core.config import EMBEDDED_MODEL


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
        _loop(pipeline, example(0, 1, args.steps))
        runs, theirs = list[Run](), list[float]()
        for number in range(args.rounds):
            calls = example((number + 1) * 1000, args.num_edits, args.steps)
            runs.append(asyncio.run(warm_up(target, calls, args.concurrency)))
            theirs.append(_loop(pipeline, calls))
    _report(args, runs, theirs)


def _loop(pipeline: Executor, calls: Sequence[EditCall]) -> float:
    """Seconds of these edits, one after the other."""
    edits = [
        FillEdit.of_files(call.prompt, call.image or b"", call.mask or b"", call.steps, call.seed) for call in calls
    ]
    _, seconds = pipeline.submit(run_edits, edits).result()
    return seconds


def _report(args: argparse.Namespace, runs: Sequence[Run], theirs: Sequence[float]) -> None:
    """theirs: seconds of diffusers, round by round."""
    edits, latencies = args.num_edits * args.rounds, [seconds for run in runs for seconds in run.latencies]
    our_rate, their_rate = edits / sum(run.seconds for run in runs), edits / sum(theirs)
    ratios = [seconds / run.seconds for run, seconds in zip(runs, theirs, strict=True)]
    p50, p99 = statistics.median(latencies), percentile(latencies, 0.99)
    rows = [
        (f"server, {args.concurrency} clients", f"{our_rate:.3f} edits/s"),
        ("diffusers FluxFillPipeline, a loop", f"{their_rate:.3f} edits/s"),
        ("ratio", f"{our_rate / their_rate:.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})"),
        ("latency under load p50 / p99", f"{p50:.3f} / {p99:.3f} s"),
    ]
    settings = {name: getattr(args, name) for name in ("steps", "dtype", "threads", "concurrency")}
    result = {"benchmark": "throughput_vs_diffusers", "mask_aware": int(args.mask_aware), "edits": edits} | settings
    result |= {"server_edits_per_s": our_rate, "diffusers_edits_per_s": their_rate}
    result |= {"ratio": our_rate / their_rate, "ratio_min": min(ratios), "ratio_max": max(ratios)}
    kind = "mask-aware" if args.mask_aware else "exact"
    title = f"{edits} {kind} edits, {args.steps} steps, {args.dtype}, {args.threads} threads, {args.rounds} rounds"
    print_report(title, rows, result | {"latency_p50_s": p50, "latency_p99_s": p99}, args.output)


if __name__ == "__main__":
    main()
