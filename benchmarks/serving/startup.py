"""From start to the first answers, then what a server takes: memory, a lone edit's latency, CPU while idle."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load.process_tree import cpu_share, processes, pss_bytes
from benchmarks.load.server import Server, start_server
from benchmarks.load.workload import Done, edit_specs, openai_client, run_clients
from benchmarks.report import print_report
from benchmarks.serving.pipeline_loop import DTYPES
from core.config import EMBEDDED_MODEL

SETTLE_SECONDS = 2.0
"""Between the last edit and the idle measurement: the client's connections are closing."""


@dataclass(frozen=True)
class Measured:
    """Times in seconds, idle_cpu as a share of one core, pss in bytes after edits alone and eight at a time."""

    alive: float
    ready: float
    edits: list[Done]
    pss: int
    idle_cpu: float
    processes: int


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    with start_server(["--model", args.model, "--dtype", args.dtype]) as server:
        _report(args, _measure(args, server))


def _measure(args: argparse.Namespace, server: Server) -> Measured:
    alive, ready = server.wait_for("/health"), server.wait_for("/ready")
    edits = asyncio.run(_edit(server.url, args.steps, args.num_edits))
    pid = server.process.pid
    pss, number = pss_bytes(pid), len(processes(pid))
    cpu_share(pid, SETTLE_SECONDS)
    return Measured(alive, ready, edits, pss, cpu_share(pid, args.idle_seconds), number)


async def _edit(url: str, steps: int, number: int) -> list[Done]:
    """Edits sent one after the other, after a warm-up; then eight at once, for the memory they take."""
    async with openai_client(url) as client:
        await run_clients(client, edit_specs(0, 3, steps), concurrency=1)
        alone = await run_clients(client, edit_specs(100, number, steps), concurrency=1)
        await run_clients(client, edit_specs(200, 16, steps), concurrency=8)
    return alone


def _report(args: argparse.Namespace, measured: Measured) -> None:
    seconds = [edit.seconds for edit in measured.edits]
    latency = statistics.median(seconds)
    queue_ms = statistics.quantiles([edit.queue_ms for edit in measured.edits], n=100)[98]
    print_report(
        f"one server, {args.dtype}, {args.steps} steps",
        [
            ("/health after", f"{measured.alive:.2f} s"),
            ("/ready after", f"{measured.ready:.2f} s"),
            (
                "warm edit alone, median (min to max)",
                f"{latency:.3f} s ({min(seconds):.3f} to {max(seconds):.3f})",
            ),
            ("prepared images to the worker's first computation, p99", f"{queue_ms:.2f} ms"),
            (f"memory of {measured.processes} processes (PSS)", f"{measured.pss / 1e9:.2f} GB"),
            (f"CPU while idle, over {args.idle_seconds:g} s", f"{measured.idle_cpu:.2%} of a core"),
        ],
        {
            "benchmark": "startup",
            "dtype": args.dtype,
            "steps": args.steps,
            "health_s": measured.alive,
            "ready_s": measured.ready,
            "edit_s": latency,
            "queue_p99_ms": queue_ms,
            "pss_gb": measured.pss / 1e9,
            "processes": measured.processes,
            "idle_cpu_share": measured.idle_cpu,
        },
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers checkpoint")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="float32", help="compute type")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps of an edit")
    parser.add_argument("--num-edits", type=int, default=100, help="edits sent one after the other")
    parser.add_argument("--idle-seconds", type=float, default=30.0, help="how long the idle server is watched")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
