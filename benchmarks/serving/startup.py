"""Time from start to the first answers; then memory, a lone edit's latency, and CPU use while idle."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from benchmarks.command import command, model_flags
from benchmarks.load.client import Run, Target, warm_up
from benchmarks.load.dataset import example
from benchmarks.load.process_tree import cpu_share, processes, pss_bytes
from benchmarks.load.server import Server, start_server
from benchmarks.report import percentile, print_report
from core.config import EMBEDDED_MODEL

SETTLE_SECONDS = 2.0
"""Between the last edit and the idle measurement: the client's connections are closing."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=8)
    parser.add_argument("--num-edits", type=int, default=100, help="edits sent one after the other")
    parser.add_argument("--idle-seconds", type=float, default=30.0, help="how long the idle server is watched")
    args = parser.parse_args(argv)
    with start_server(model_flags(args)) as server:
        alive, ready = server.wait_for("/health"), server.wait_for("/ready")
        run = asyncio.run(_edit(server, args.steps, args.num_edits))
        pid = server.process.pid
        pss, number = pss_bytes(pid), len(processes(pid))
        cpu_share(pid, SETTLE_SECONDS)
        idle = cpu_share(pid, args.idle_seconds)
    seconds, queues = run.latencies, [outcome.facts["ms"]["queue"] for outcome in run.outcomes]
    latency, queue_ms = statistics.median(seconds), percentile(queues, 0.99)
    rows = [
        ("/health after", f"{alive:.2f} s"),
        ("/ready after", f"{ready:.2f} s"),
        ("warm edit alone, median (min to max)", f"{latency:.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"),
        ("prepared images to the worker's first computation, p99", f"{queue_ms:.2f} ms"),
        (f"memory of {number} processes (PSS)", f"{pss / 1e9:.2f} GB"),
        (f"CPU while idle, over {args.idle_seconds:g} s", f"{idle:.2%} of a core"),
    ]
    result = {"benchmark": "startup", "dtype": args.dtype, "steps": args.steps, "health_s": alive, "ready_s": ready}
    result |= {"edit_s": latency, "queue_p99_ms": queue_ms, "pss_gb": pss / 1e9, "processes": number}
    title = f"one server, {args.dtype}, {args.steps} steps"
    print_report(title, rows, result | {"idle_cpu_share": idle}, args.output)


async def _edit(server: Server, steps: int, number: int) -> Run:
    """Edits one after the other, after a warm-up; then eight at once, for the memory they take."""
    target = Target(server.url)
    await warm_up(target, example(0, 3, steps), 1)
    alone = await warm_up(target, example(100, number, steps), 1)
    await warm_up(target, example(200, 16, steps), 8)
    return alone


if __name__ == "__main__":
    main()
