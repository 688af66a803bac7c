"""Edits per second of the server under concurrent clients, against a loop over diffusers' FluxFillPipeline.

Same checkpoint, steps, dtype and threads. The server computes every token too, unless told otherwise. Both are loaded
and warm before anything is measured, and take turns in rounds, so that a machine that slows down slows both; while one
works the other waits.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.load.server import ready_server
from benchmarks.load.workload import available_cores, edit_specs, openai_client, run_clients
from benchmarks.report import percentile, print_report
from benchmarks.serving.pipeline_loop import DTYPES, Job, PipelineLoop, start_pipeline_loop
from core.config import EMBEDDED_MODEL


@dataclass
class Measured:
    """Seconds of every round on both sides, and of every edit at the server, waiting included."""

    server: list[float] = field(default_factory=list)
    diffusers: list[float] = field(default_factory=list)
    peak_flops: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    flags = ["--model", args.model, "--dtype", args.dtype, "--threads", str(args.threads)]
    with (
        ready_server([*flags, "--max-num-seqs", str(args.concurrency)]) as server,
        start_pipeline_loop(args.model, args.dtype, args.threads, args.steps) as loop,
    ):
        measured = asyncio.run(_measure(args, server.url, loop))
        _report(args, measured, loop.flop_per_edit)


async def _measure(args: argparse.Namespace, url: str, loop: PipelineLoop) -> Measured:
    measured = Measured()
    specs = partial(edit_specs, steps=args.steps, mask_aware=args.mask_aware)
    async with openai_client(url) as client:
        await run_clients(client, specs(0, 2 * args.concurrency), args.concurrency)  # warm-up
        for round_ in range(args.rounds):
            first = (round_ + 1) * 1000
            start = time.perf_counter()
            done = await run_clients(client, specs(first, args.num_edits), args.concurrency)
            measured.latency += [edit.seconds for edit in done]
            measured.server.append(time.perf_counter() - start)
            turn = loop.run(Job(first, args.num_edits, args.steps))
            measured.diffusers.append(turn.seconds)
            measured.peak_flops.append(turn.peak_flops)
    return measured


def _report(args: argparse.Namespace, measured: Measured, flop: float) -> None:
    edits, limit = args.num_edits * args.rounds, max(measured.peak_flops) / flop
    ours, theirs = edits / sum(measured.server), edits / sum(measured.diffusers)
    ratios = [b / a for a, b in zip(measured.server, measured.diffusers, strict=True)]
    p50, p99 = statistics.median(measured.latency), percentile(measured.latency, 0.99)
    print_report(
        f"{edits} {'mask-aware' if args.mask_aware else 'exact'} edits, {args.steps} steps, {args.dtype}, "
        f"{args.threads} threads, {args.rounds} rounds",
        [
            (f"server, {args.concurrency} clients", f"{ours:.3f} edits/s"),
            ("diffusers FluxFillPipeline, a loop", f"{theirs:.3f} edits/s"),
            ("ratio", f"{ours / theirs:.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})"),
            ("latency under load p50 / p99", f"{p50:.3f} / {p99:.3f} s"),
            ("limit: all tokens, matrix products only", f"{limit:.3f} edits/s ({flop / 1e9:.1f} GFLOP an edit)"),
            ("server's share of that limit", f"{ours / limit:.1%}"),
        ],
        {
            "benchmark": "throughput_vs_diffusers",
            "mask_aware": int(args.mask_aware),
            "steps": args.steps,
            "dtype": args.dtype,
            "threads": args.threads,
            "concurrency": args.concurrency,
            "edits": edits,
            "server_edits_per_s": ours,
            "diffusers_edits_per_s": theirs,
            "ratio": ours / theirs,
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "latency_p50_s": p50,
            "latency_p99_s": p99,
            "limit_edits_per_s": limit,
        },
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers checkpoint")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps of an edit")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute type of both")
    parser.add_argument("--threads", type=int, default=available_cores(), help="torch threads of both")
    parser.add_argument("--num-edits", type=int, default=16, help="edits per round")
    parser.add_argument("--rounds", type=int, default=4, help="rounds, server and loop in turn")
    parser.add_argument("--mask-aware", action="store_true", help="let the server skip tokens outside the mask")
    parser.add_argument("--concurrency", type=int, default=8, help="clients that send at once")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
