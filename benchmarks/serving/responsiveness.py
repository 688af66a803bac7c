"""Does the event loop ever stall? Latency of /health while clients edit, one of them with 12-megapixel PNGs.

The clients are another process, so that their own decoding is not counted. Probes follow a timetable: one that could
not be sent because the one before was late counts from when it was due. How late the prober's own timer fires is the
floor below which this machine cannot be measured, and is printed beside.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from benchmarks.command import command
from benchmarks.load.client import Run, Target, send_in_turn, warm_up
from benchmarks.load.dataset import EditCall, example
from benchmarks.load.pictures import alpha_mask, encode, middle_box, photo
from benchmarks.load.server import Server, ready_server
from benchmarks.load.workload import prompt
from benchmarks.report import percentile, print_report
from core.config import EMBEDDED_MODEL

LARGE = (4000, 3000)
"""Width and height of the large upload in pixels: 12 megapixels."""
MASK_SHARE = 1 / 9


@dataclass
class Probes:
    """Seconds of every /health, and how late the timer that sent it was."""

    latency: list[float] = field(default_factory=list)
    timer: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, steps=8)
    parser.add_argument("--concurrency", type=int, default=8, help="clients, one of them with large pictures")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long /health is asked")
    parser.add_argument("--interval", type=float, default=0.05, help="seconds between two probes")
    args = parser.parse_args(argv)
    with ready_server(["--model", args.model]) as server, ProcessPoolExecutor(1, get_context("spawn")) as clients:
        clients.submit(send, server.url, args.steps, args.concurrency, None).result()
        edits = clients.submit(send, server.url, args.steps, args.concurrency, args.seconds)
        probes = _probe(server, args.seconds, args.interval)
        _report(args, probes, edits)


def send(url: str, steps: int, concurrency: int, seconds: float | None) -> tuple[int, int]:
    """In the clients' process: (large, other) edits made in this time; None: one of each. Raises RuntimeError if one
    failed."""
    return asyncio.run(_send(Target(url), steps, concurrency, seconds))


async def _send(target: Target, steps: int, concurrency: int, seconds: float | None) -> tuple[int, int]:
    large, others = [_large_edit(steps)], example(0, 64, steps)
    if seconds is None:
        await warm_up(target, [*large, *others[: concurrency - 1]], concurrency)
        return 1, concurrency - 1
    both = await asyncio.gather(
        send_in_turn(target, large, 1, seconds=seconds), send_in_turn(target, others, concurrency - 1, seconds=seconds)
    )
    return _count(both[0]), _count(both[1])


def _count(run: Run) -> int:
    failed = [outcome.error for outcome in run.outcomes if outcome.is_failed]
    if failed:
        raise RuntimeError(f"{len(failed)} edits failed: {failed[0]}")
    return len(run.outcomes)


def _large_edit(steps: int) -> EditCall:
    mask = alpha_mask(middle_box(MASK_SHARE, LARGE), LARGE)
    return EditCall(prompt(0), steps, 0, encode(photo(LARGE, 0)), encode(mask), MASK_SHARE)


def _probe(server: Server, seconds: float, interval: float) -> Probes:
    probes = Probes()
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    start = done = time.perf_counter()
    for number in range(int(seconds / interval)):
        due = start + number * interval
        if done < due:
            time.sleep(max(0.0, due - time.perf_counter()))
            due = _woken(due, probes)
        connection.request("GET", "/health")
        connection.getresponse().read()
        done = time.perf_counter()
        probes.latency.append(done - due)
    connection.close()
    return probes


def _woken(due: float, probes: Probes) -> float:
    """When the probe leaves: the prober's own lateness is not the server's."""
    now = time.perf_counter()
    probes.timer.append(now - due)
    return now


def _report(args: argparse.Namespace, probes: Probes, edits: Future[tuple[int, int]]) -> None:
    p50, p99 = 1e3 * statistics.median(probes.latency), 1e3 * percentile(probes.latency, 0.99)
    worst, floor = 1e3 * max(probes.latency), 1e3 * percentile(probes.timer, 0.99)
    large, small = edits.result()
    rows = [
        ("p50 / p99 / max", f"{p50:.1f} / {p99:.1f} / {worst:.1f} ms"),
        ("floor: the prober's own timer p99", f"{floor:.1f} ms"),
        ("12-megapixel edits meanwhile", str(large)),
        ("other edits meanwhile", str(small)),
    ]
    result = {"benchmark": "responsiveness", "concurrency": args.concurrency, "probes": len(probes.latency)}
    result |= {"health_p50_ms": p50, "health_p99_ms": p99, "health_max_ms": worst, "timer_p99_ms": floor}
    result |= {"large_edits": large, "small_edits": small}
    title = f"/health every {args.interval * 1000:g} ms for {args.seconds:g} s, {args.concurrency} clients editing"
    print_report(title, rows, result, args.output)


if __name__ == "__main__":
    main()
