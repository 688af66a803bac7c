"""Latency of /health while clients edit, one of them with 12-megapixel PNGs: shows whether the event loop stalls.

The clients are another process, so that their decoding is not counted. Probes follow a timetable: one that could not be
sent because the one before was late counts from when it was due. How late the prober's own timer fires is the least
that this machine can measure, and is printed too.
"""

from __future__ import annotations

import asyncio
import http.client
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.command import command
from benchmarks.load.client import Target, send_in_turn
from benchmarks.load.dataset import EditCall, example
from benchmarks.load.pictures import alpha_mask, encode, middle_box, photo
from benchmarks.load.server import Server, ready_server
from benchmarks.load.workload import prompt
from benchmarks.report import percentile, print_report
from core.config import EMBEDDED_MODEL

LARGE = (4000, 3000)  # pixels: width, height
MASK_SHARE = 1 / 9


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, model=EMBEDDED_MODEL, steps=8)
    parser.add_argument("--concurrency", type=int, default=8, help="clients, one of them with large pictures")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long /health is asked")
    parser.add_argument("--interval", type=float, default=0.05, help="seconds between two probes")
    args = parser.parse_args(argv)
    with ready_server(["--model", args.model]) as server, ProcessPoolExecutor(1, get_context("spawn")) as clients:
        clients.submit(send, server.url, args.steps, args.concurrency, None).result()
        edits = clients.submit(send, server.url, args.steps, args.concurrency, args.seconds)
        latencies, lateness = _probe(server, args.seconds, args.interval)
        num_large, num_others = edits.result()
    p50, p99 = 1e3 * statistics.median(latencies), 1e3 * percentile(latencies, 0.99)
    worst, floor = 1e3 * max(latencies), 1e3 * percentile(lateness, 0.99)
    rows = [
        ("p50 / p99 / max", f"{p50:.1f} / {p99:.1f} / {worst:.1f} ms"),
        ("lateness of the prober's own timer, p99", f"{floor:.1f} ms"),
        ("12-megapixel edits, others meanwhile", f"{num_large}, {num_others}"),
    ]
    result = {"benchmark": "responsiveness", "concurrency": args.concurrency, "probes": len(latencies)}
    result |= {"health_p50_ms": p50, "health_p99_ms": p99, "health_max_ms": worst, "timer_p99_ms": floor}
    title = f"/health every {args.interval * 1000:g} ms for {args.seconds:g} s, {args.concurrency} clients editing"
    print_report(title, rows, result | {"large_edits": num_large, "small_edits": num_others}, args.output)


def send(url: str, steps: int, concurrency: int, seconds: float | None) -> tuple[int, int]:
    """In the clients' process: numbers of (large, other) edits made in this time; None: each edit once. Raises
    RuntimeError if one failed."""
    return asyncio.run(_send(Target(url), steps, concurrency - 1, seconds))


async def _send(target: Target, steps: int, others: int, seconds: float | None) -> tuple[int, int]:
    mask = encode(alpha_mask(middle_box(MASK_SHARE, LARGE), LARGE))
    large = EditCall(prompt(0), steps, 0, encode(photo(LARGE, 0)), mask, MASK_SHARE)
    runs = await asyncio.gather(
        send_in_turn(target, [large], 1, seconds=seconds),
        send_in_turn(target, example(0, 2 * others, steps), others, seconds=seconds),
    )
    failed = [outcome.error for run in runs for outcome in run.outcomes if outcome.is_failed]
    if failed:
        raise RuntimeError(f"{len(failed)} edits failed: {failed[0]}")
    return len(runs[0].outcomes), len(runs[1].outcomes)


def _probe(server: Server, seconds: float, interval: float) -> tuple[list[float], list[float]]:
    """Seconds of every /health, and how late the timer was that sent it."""
    latencies, lateness = list[float](), list[float]()
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    start = done = time.perf_counter()
    for number in range(int(seconds / interval)):
        due = start + number * interval
        if done < due:
            time.sleep(max(0.0, due - time.perf_counter()))
            woken = time.perf_counter()
            lateness.append(woken - due)
            due = woken  # the prober's own lateness is not the server's
        connection.request("GET", "/health")
        connection.getresponse().read()
        done = time.perf_counter()
        latencies.append(done - due)
    connection.close()
    return latencies, lateness


if __name__ == "__main__":
    main()
