"""Requests per second that one API server takes, with engines that answer at once (InstantEngine).

Clients in a process of their own send edits in a closed loop. They take cores from the server, so that what counts is
the processor time of a request: of the API server's process, which has one core at most, and of the image processors,
which may have all others. Engines as on other machines (`--place remote`) have their couriers in the API server's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.command import command
from benchmarks.load.client import Target, checked, send_in_turn
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.load.placed_server import MODULE, Place, environment
from benchmarks.load.process_tree import cpu_by_name
from benchmarks.load.server import Server, start_server
from benchmarks.report import Row, Value, print_report

SIZES = ("64x64", "256x256", "1024x1024")
IMAGES = "stencil-images"
"""What the names of image processors begin with."""

NUM_CALLS = 16


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, engines=2)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="pixels of the edits, each WIDTHxHEIGHT")
    parser.add_argument("--place", default="local", choices=get_args(Place), help="where the engines are")
    parser.add_argument("--concurrency", type=int, default=16, help="clients")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each size")
    args = parser.parse_args(argv)
    flags = ["--data-parallel-size", str(args.engines), "--no-playground", "--log-level", "warning"]
    flags += ["--device", "cuda"]  # whose workers no launcher forks; there are none
    with (
        start_server(flags, MODULE, environment=environment(args.place, is_instant=True)) as server,
        ProcessPoolExecutor(1, get_context("spawn")) as clients,
    ):
        server.wait_for("/ready")
        for size in args.sizes:
            mix = Mix(num_inference_steps="8", sizes=size)
            calls = synthetic(mix, NUM_CALLS, np.random.default_rng(0))
            measure(server, clients, f"{size} px, {args.place}", calls, args.concurrency, args.seconds, args.output)


def measure(
    server: Server,
    clients: ProcessPoolExecutor,
    name: str,
    calls: Sequence[EditCall],
    concurrency: int,
    seconds: float,
    output: Path | None,
) -> None:
    """Of one kind of edit. Raises WarmUpError if an edit fails."""
    clients.submit(send, server.url, calls, concurrency, 2.0).result()
    before = cpu_by_name(server.process.pid)
    number, taken = clients.submit(send, server.url, calls, concurrency, seconds).result()
    after = cpu_by_name(server.process.pid)
    spent = {process: 1e3 * (each - before.get(process, 0.0)) / number for process, each in after.items()}
    images = sum(each for process, each in spent.items() if process.startswith(IMAGES))
    api = sum(each for process, each in spent.items() if not process.startswith("stencil-"))
    rows: list[Row] = [
        ("measured, beside the clients", f"{number / taken:.0f} requests/s"),
        ("API server", f"{api:.2f} ms of a core for each: at most {1e3 / api:.0f} requests/s"),
        ("image processors", f"{images:.2f} ms of a core for each: {1e3 / images:.0f} requests/s for each core"),
    ]
    result: dict[str, Value] = {"benchmark": "api_ceiling", "name": name, "requests_per_second": number / taken}
    result |= {"api_ms": api, "images_ms": images}
    print_report(f"edits of {name}, {concurrency} clients", rows, result, output)


def send(url: str, calls: Sequence[EditCall], concurrency: int, seconds: float) -> tuple[int, float]:
    """In the clients' process: edits made, and seconds."""
    run = checked(asyncio.run(send_in_turn(Target(url), calls, concurrency, seconds=seconds)))
    return len(run.outcomes), run.seconds


if __name__ == "__main__":
    main()
