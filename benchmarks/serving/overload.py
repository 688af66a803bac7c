"""Goodput under overload: edits per second done within the latency objective, up to the knee and at twice its rate.

Open loop: edits are sent when they are due, whatever has come back, and latency counts from then. Every rate gets a
Poisson process of a given number of arrivals, which are so many uniform draws. The objective is a multiple of what a
lone edit takes. All bodies are made beforehand.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np
from PIL import Image

from benchmarks.load.server import Server, ready_server
from benchmarks.load.workload import IMAGE, PROMPTS, available_cores
from benchmarks.report import percentile, print_report

MASK_SHAPE, MASK_MEAN = 1.6, 0.15
"""Of the gamma distribution that mask ratios are drawn from."""
NUM_BODIES = 48
NUM_LONE = 12
CAPACITY_CLIENTS = 16
CLIENT_SECONDS = 60.0  # nothing may take longer: an answer that never comes is an error
OVERLOAD = 2.0
BAR = 0.9

KINDS = {200: "done", 503: "refused", 504: "given up"}


@dataclass(frozen=True)
class Body:
    """An edit, ready to be sent."""

    content: bytes
    content_type: str


@dataclass(frozen=True)
class Answer:
    """seconds: from when the edit was due. is_hopeful: a refusal that says when to try again."""

    status: int
    seconds: float
    is_hopeful: bool


@dataclass(frozen=True)
class Run:
    """What came of so many edits per second. goodput: edits per second done within the objective, from the first
    arrival to the last answer. late_sending: seconds that 95 % of edits were sent after they were due, at most.
    """

    rate: float
    goodput: float
    late_sending: float
    answers: list[Answer]
    slo_seconds: float

    def __str__(self) -> str:
        ends = Counter(KINDS[answer.status] for answer in self.answers)
        late = sum(answer.status == 200 and answer.seconds > self.slo_seconds for answer in self.answers)
        refusals = [answer.seconds for answer in self.answers if answer.status == 503] or [0.0]
        return (
            f"goodput {self.goodput:6.2f}/s   done {ends['done']:4d} (late {late})   refused {ends['refused']:4d}, P50 "
            f"after {statistics.median(refusals) * 1e3:.0f} ms   given up {ends['given up']}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    bodies = [_body(index, args.num_inference_steps) for index in range(NUM_BODIES)]
    flags = ["--threads", str(args.threads), "--data-parallel-size", str(args.data_parallel_size)]
    with ready_server(flags) as server:
        lone, capacity = asyncio.run(_probe(server, bodies, args.seconds))
    slo = args.slo_scale * lone
    with ready_server([*flags, "--slo-ms", f"{slo * 1e3:.0f}"]) as server:
        asyncio.run(_one_after_another(server, bodies))
        sweep = [_measure(server, bodies, share * capacity, slo, args, seed) for seed, share in enumerate(args.shares)]
        knee = max(sweep, key=lambda run: run.goodput)
        overload = _measure(server, bodies, OVERLOAD * knee.rate, slo, args, seed=len(sweep))
    _report(args, lone, capacity, slo, sweep, knee, overload)


async def _probe(server: Server, bodies: Sequence[Body], seconds: float) -> tuple[float, float]:
    """Mean seconds of a lone edit, and edits per second with clients that never wait."""
    await _one_after_another(server, bodies)
    lone = await _one_after_another(server, bodies[:NUM_LONE])
    number, stop = 0, time.perf_counter() + seconds

    async def one_client(client: httpx.AsyncClient, first: int) -> None:
        nonlocal number
        while time.perf_counter() < stop:
            await _send(client, server, bodies[(first + number) % NUM_BODIES], time.perf_counter())
            number += 1

    async with _client() as client, asyncio.TaskGroup() as clients:
        start = time.perf_counter()
        for first in range(CAPACITY_CLIENTS):
            clients.create_task(one_client(client, first))
    return statistics.mean(answer.seconds for answer in lone), number / (time.perf_counter() - start)


async def _one_after_another(server: Server, bodies: Sequence[Body]) -> list[Answer]:
    async with _client() as client:
        return [await _send(client, server, body, time.perf_counter()) for body in bodies]


def _measure(
    server: Server, bodies: Sequence[Body], rate: float, slo: float, args: argparse.Namespace, seed: int
) -> Run:
    """One rate; the server is idle before and after."""
    number = max(8, round(rate * args.seconds))
    dues = np.sort(np.random.default_rng(seed).uniform(0, number / rate, number)).tolist()
    return asyncio.run(_send_all(server, bodies, dues, rate, slo))


async def _send_all(server: Server, bodies: Sequence[Body], dues: Sequence[float], rate: float, slo: float) -> Run:
    late, tasks = [], []
    async with _client() as client, asyncio.TaskGroup() as group:
        start = time.perf_counter()
        for index, due in enumerate(dues):
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            late.append(time.perf_counter() - start - due)
            tasks.append(group.create_task(_send(client, server, bodies[index % NUM_BODIES], start + due)))
    seconds = time.perf_counter() - start - dues[0]
    answers = [task.result() for task in tasks]
    in_time = sum(answer.status == 200 and answer.seconds <= slo for answer in answers)
    return Run(rate, in_time / seconds, percentile(late, 0.95), answers, slo)


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=CLIENT_SECONDS, limits=httpx.Limits(max_connections=None))


async def _send(client: httpx.AsyncClient, server: Server, body: Body, due: float) -> Answer:
    """Raises ValueError for an answer that overload does not explain."""
    response = await client.post(
        f"{server.url}/v1/images/edits", content=body.content, headers={"content-type": body.content_type}
    )
    answer = Answer(response.status_code, time.perf_counter() - due, "retry-after" in response.headers)
    if answer.status not in KINDS or (answer.status == 503 and not answer.is_hopeful):
        raise ValueError(f"status {response.status_code}: {response.text[:200]}")
    return answer


def _body(index: int, num_inference_steps: int) -> Body:
    """The example picture under a square mask of its own."""
    files = {"image": ("image.png", IMAGE.read_bytes(), "image/png"), "mask": ("mask.png", _mask(index), "image/png")}
    data = {"prompt": PROMPTS[index % len(PROMPTS)], "seed": str(index), "num_inference_steps": num_inference_steps}
    request = httpx.Request("POST", "http://server", files=files, data=data)
    return Body(request.read(), request.headers["content-type"])


def _mask(seed: int) -> bytes:
    """Transparent where to edit."""
    with Image.open(IMAGE) as image:
        width, height = image.size
    random = np.random.default_rng(seed)
    side = math.sqrt(np.clip(random.gamma(MASK_SHAPE, MASK_MEAN / MASK_SHAPE), 0.01, 1.0))
    box_width, box_height = max(1, round(width * side)), max(1, round(height * side))
    left, top = random.integers(0, width - box_width + 1), random.integers(0, height - box_height + 1)
    alpha = np.full((height, width), 255, np.uint8)
    alpha[top : top + box_height, left : left + box_width] = 0
    mask = Image.new("RGBA", (width, height))
    mask.putalpha(Image.fromarray(alpha))
    file = io.BytesIO()
    mask.save(file, "PNG")
    return file.getvalue()


def _report(
    args: argparse.Namespace, lone: float, capacity: float, slo: float, sweep: Sequence[Run], knee: Run, overload: Run
) -> None:
    ratio = overload.goodput / knee.goodput
    rows = [(f"{run.rate:6.2f} edits/s", str(run)) for run in [*sweep, overload]]
    rows.append(("knee", f"{knee.goodput:.2f}/s at {knee.rate:.2f} edits/s"))
    rows.append((f"{OVERLOAD:g}x the knee", f"{overload.goodput:.2f}/s: {ratio:.3f} of the knee's (bar: {BAR})"))
    rows.append(("sent late, P95", f"{max(run.late_sending for run in [*sweep, overload]) * 1e3:.1f} ms"))
    title = (
        f"Overload: {args.data_parallel_size} engine(s) of {args.threads} thread(s) on {available_cores()} cores, "
        f"{args.num_inference_steps} steps, mean mask {MASK_MEAN}; a lone edit takes {lone * 1e3:.0f} ms, the "
        f"objective is {slo * 1e3:.0f} ms, {CAPACITY_CLIENTS} clients get {capacity:.2f} edits/s; "
        f"{args.seconds:g} s of each rate"
    )
    result = {
        "lone_s": lone,
        "capacity_per_s": capacity,
        "slo_s": slo,
        "knee_rate_per_s": knee.rate,
        "knee_goodput_per_s": knee.goodput,
        "overload_goodput_per_s": overload.goodput,
        "overload_ratio": ratio,
    }
    print_report(title, rows, result)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-parallel-size", type=int, default=1, help="engines")
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--num-inference-steps", type=int, default=8, help="of each edit")
    parser.add_argument("--slo-scale", type=float, default=10.0, help="the objective, in times of a lone edit")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals at each rate")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.6, 0.8, 0.9, 1.0, 1.1, 1.3],
        help="rates of the sweep, as shares of what clients that never wait get",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
