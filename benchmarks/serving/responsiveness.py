"""Does the event loop ever stall? Latency of /health while clients edit, one of them with 12-megapixel PNGs.

The clients are another process, so that their own decoding is not counted. Probes follow a timetable: one that could
not be sent because the one before was late counts from when it was due. How late the prober's own timer fires is the
floor below which this machine cannot be measured, and is printed beside.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import io
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from openai import AsyncOpenAI
from PIL import Image

from benchmarks.load.server import ROOT, Server, ready_server
from benchmarks.load.workload import IMAGE, MASK, edit_specs, openai_client, send_edit
from benchmarks.report import percentile, print_report
from core.config import EMBEDDED_MODEL

LARGE = (4000, 3000)
"""width, height of the large upload in pixels: 12 megapixels."""


@dataclass
class Probes:
    """Seconds of every /health, and how late the timer that sent it was."""

    latency: list[float] = field(default_factory=list)
    timer: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    if args.load:
        asyncio.run(_load(args))
        return
    with ready_server(["--model", args.model]) as server, _clients(args, server) as clients:
        probes = _probe(server, args.seconds, args.interval)
        clients.terminate()
        _report(args, probes, _count_edits(clients))


# ------------------------------------------------------------------------------------------------------- the clients


@contextmanager
def _clients(args: argparse.Namespace, server: Server) -> Iterator[subprocess.Popen[str]]:
    """The clients' process, once as many edits as clients are done."""
    options = ["--load", server.url, "--steps", str(args.steps), "--concurrency", str(args.concurrency)]
    command = [sys.executable, "-m", "benchmarks.serving.responsiveness", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for _ in range(args.concurrency):
                if not process.stdout.readline():
                    raise RuntimeError(f"the clients left with status {process.wait()}")
            yield process
        finally:
            process.terminate()


def _count_edits(clients: subprocess.Popen[str]) -> dict[str, int]:
    """Finished edits by size. Raises RuntimeError if an edit failed."""
    output, _ = clients.communicate()
    if clients.returncode != -15:
        raise RuntimeError(f"the clients left with status {clients.returncode}")
    sizes = [json.loads(line)["size"] for line in output.splitlines()]
    return {size: sizes.count(size) for size in ("large", "small")}


async def _load(args: argparse.Namespace) -> None:
    """One client with large pictures, the others with the example, until terminated; a line for each edit."""
    small, large = (IMAGE.read_bytes(), MASK.read_bytes()), large_edit()
    async with openai_client(args.load) as client, asyncio.TaskGroup() as clients:
        clients.create_task(_one_client(client, "large", *large, args.steps))
        for _ in range(args.concurrency - 1):
            clients.create_task(_one_client(client, "small", *small, args.steps))


async def _one_client(client: AsyncOpenAI, size: str, image: bytes, mask: bytes, steps: int) -> None:
    for seed in count():
        await send_edit(client, edit_specs(seed, 1, steps)[0], image, mask)
        print(json.dumps({"size": size}), flush=True)


def large_edit() -> tuple[bytes, bytes]:
    """PNG files of a 12-megapixel picture, noisy as a photograph is, and of a mask over its middle."""
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize(LARGE, Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth, np.int16) + rng.integers(-6, 7, (LARGE[1], LARGE[0], 3), np.int16)
    alpha = np.full((LARGE[1], LARGE[0]), 255, np.uint8)
    alpha[LARGE[1] // 3 : LARGE[1] * 2 // 3, LARGE[0] // 3 : LARGE[0] * 2 // 3] = 0
    mask = np.dstack([np.zeros((LARGE[1], LARGE[0], 3), np.uint8), alpha])
    return _png(np.clip(noisy, 0, 255).astype(np.uint8)), _png(mask)


def _png(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


# --------------------------------------------------------------------------------------------------------- the probe


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


def _report(args: argparse.Namespace, probes: Probes, edits: dict[str, int]) -> None:
    p50, p99 = statistics.median(probes.latency), percentile(probes.latency, 0.99)
    worst, floor = max(probes.latency), percentile(probes.timer, 0.99)
    print_report(
        f"/health every {args.interval * 1000:g} ms for {args.seconds:g} s, {args.concurrency} clients editing",
        [
            ("p50 / p99 / max", f"{p50 * 1000:.1f} / {p99 * 1000:.1f} / {worst * 1000:.1f} ms"),
            ("floor: the prober's own timer p99", f"{floor * 1000:.1f} ms"),
            ("12-megapixel edits meanwhile", str(edits["large"])),
            ("other edits meanwhile", str(edits["small"])),
        ],
        {
            "benchmark": "responsiveness",
            "concurrency": args.concurrency,
            "probes": len(probes.latency),
            "health_p50_ms": p50 * 1000,
            "health_p99_ms": p99 * 1000,
            "health_max_ms": worst * 1000,
            "timer_p99_ms": floor * 1000,
            "large_edits": edits["large"],
            "small_edits": edits["small"],
        },
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="diffusers checkpoint")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps of an edit")
    parser.add_argument("--concurrency", type=int, default=8, help="clients, one of them with large pictures")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long /health is asked")
    parser.add_argument("--interval", type=float, default=0.05, help="seconds between two probes")
    parser.add_argument("--load", metavar="URL", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
