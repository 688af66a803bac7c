"""Router policies on real engines: mean and P95 latency through HTTP, each policy given the same arrivals.

Open loop: edits are sent when they are due, whatever has come back, and latency counts from then. Templates are drawn
by Zipf's law, and an engine's memory holds the pages of half of them: some are warm, some cold, some on one engine
only. Masks and step counts are mixed, as benchmarks/simulation has them. Policies take turns in each round, so that
what else the machine does meets all of them; the spread over rounds is printed beside the means.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import get_args

import numpy as np
from openai import AsyncOpenAI

from benchmarks.load.pictures import alpha_mask, box, encode, template
from benchmarks.load.server import Server, ready_server
from benchmarks.load.workload import PROMPTS, available_cores, openai_client
from benchmarks.report import percentile, print_report
from core.config import RouterPolicy

POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)
STEPS = (8, 16, 28)
MASK_SHAPE, MASK_MEAN = 1.6, 0.15
"""Of the gamma distribution that mask ratios are drawn from."""
NUM_TEMPLATES, ZIPF = 60, 1.05
SIZE = (256, 256)
CACHE_BYTES = NUM_TEMPLATES // 2 * 3_700_000
"""Of each engine: the embedded model's pages of one template are five keyframes of 0.74 MB."""

CAPACITY_CLIENTS = 16


@dataclass(frozen=True)
class Arrival:
    """One edit. due: seconds after the start. template: its number. mask_ratio: share of the picture under its mask."""

    due: float
    template: int
    mask_ratio: float
    steps: int
    seed: int

    @cached_property
    def files(self) -> tuple[bytes, bytes]:
        """Its image and its mask, as PNG."""
        return _template(self.template), _mask(self)


@dataclass(frozen=True)
class Outcome:
    """seconds: from when it was due to its picture."""

    seconds: float
    was_hit: bool


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    rate = args.request_rate or args.load * _capacity(args)
    outcomes: dict[RouterPolicy, list[list[Outcome]]] = {policy: [] for policy in POLICIES}
    for seed in range(args.seeds):
        for policy in POLICIES:
            outcomes[policy].append(_measure(args, policy, arrivals(args.num_prompts, rate, seed)))
    _report(args, rate, outcomes)


def arrivals(number: int, rate: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of `rate` edits per second."""
    random = np.random.default_rng(seed)
    due = np.cumsum(random.exponential(1 / rate, number))
    popularity = 1.0 / np.arange(1, NUM_TEMPLATES + 1) ** ZIPF
    templates = random.choice(NUM_TEMPLATES, number, p=popularity / popularity.sum())
    ratios = np.clip(random.gamma(MASK_SHAPE, MASK_MEAN / MASK_SHAPE, number), 0.01, 1.0)
    steps = random.choice(STEPS, number)
    rows = zip(due.tolist(), templates.tolist(), ratios.tolist(), steps.tolist(), strict=True)
    return [Arrival(*row, seed=index) for index, row in enumerate(rows)]


def _measure(args: argparse.Namespace, policy: RouterPolicy, edits: Sequence[Arrival]) -> list[Outcome]:
    """Serve them with a fresh server of this policy."""
    with ready_server([*_flags(args), "--router-policy", policy]) as server:
        asyncio.run(_warm_up(server))
        return asyncio.run(_send_all(server, edits))


def _capacity(args: argparse.Namespace) -> float:
    """Edits per second with clients that never wait: of the same mix, half of it to warm the caches."""
    edits = arrivals(2 * args.num_prompts // 3, 1.0, seed=99)
    half = len(edits) // 2
    with ready_server(_flags(args)) as server:
        asyncio.run(_send_in_turn(server, edits[:half]))
        start = time.perf_counter()
        asyncio.run(_send_in_turn(server, edits[half:]))
        return (len(edits) - half) / (time.perf_counter() - start)


def _flags(args: argparse.Namespace) -> list[str]:
    sizes = {"--data-parallel-size": args.data_parallel_size, "--threads": args.threads}
    sizes["--cache-host-bytes"] = CACHE_BYTES
    return [str(part) for flag in sizes.items() for part in flag]


async def _warm_up(server: Server) -> None:
    """Both ends' first calls; of templates that are not used again."""
    edits = [Arrival(0.0, -1 - i, 0.1, STEPS[0], i) for i in range(8)]
    await _send_in_turn(server, edits)


async def _send_in_turn(server: Server, edits: Sequence[Arrival]) -> None:
    queue = iter(edits)

    async def one_client(client: AsyncOpenAI) -> None:
        for edit in queue:
            await _send(client, edit, time.perf_counter())

    async with openai_client(server.url) as client, asyncio.TaskGroup() as clients:
        for _ in range(CAPACITY_CLIENTS):
            clients.create_task(one_client(client))


async def _send_all(server: Server, edits: Sequence[Arrival]) -> list[Outcome]:
    for edit in edits:
        _ = edit.files  # made before the clock runs
    async with openai_client(server.url) as client, asyncio.TaskGroup() as group:
        start = time.perf_counter()
        tasks = []
        for edit in edits:
            await asyncio.sleep(max(0.0, start + edit.due - time.perf_counter()))
            tasks.append(group.create_task(_send(client, edit, start + edit.due)))
    return [task.result() for task in tasks]


async def _send(client: AsyncOpenAI, edit: Arrival, due: float) -> Outcome:
    result = await client.images.edit(
        image=("image.png", edit.files[0], "image/png"),
        prompt=PROMPTS[edit.seed % len(PROMPTS)],
        extra_body={"seed": edit.seed, "num_inference_steps": edit.steps},
        mask=("mask.png", edit.files[1], "image/png"),
    )
    facts = result.to_dict()["stencil"]
    assert isinstance(facts, dict)
    return Outcome(time.perf_counter() - due, facts["cache"] == "hit")


@cache
def _template(number: int) -> bytes:
    return encode(template(number, SIZE))


def _mask(edit: Arrival) -> bytes:
    """A box of its share of the picture, somewhere."""
    return encode(alpha_mask(box(edit.mask_ratio, SIZE, np.random.default_rng(edit.seed)), SIZE))


def _report(args: argparse.Namespace, rate: float, outcomes: dict[RouterPolicy, list[list[Outcome]]]) -> None:
    rows, result = [], {"request_rate": rate}
    for policy, runs in outcomes.items():
        means = [statistics.mean(outcome.seconds for outcome in run) for run in runs]
        p95s = [percentile([outcome.seconds for outcome in run], 0.95) for run in runs]
        hits = statistics.mean(outcome.was_hit for run in runs for outcome in run)
        rows.append(
            (policy, f"mean {_spread(means)} s   P95 {_spread(p95s)} s   edits with all pages there {hits:4.0%}")
        )
        name, mean, p95 = policy.replace("-", "_"), statistics.mean(means), statistics.mean(p95s)
        result |= {f"{name}_mean_s": mean, f"{name}_p95_s": p95, f"{name}_hit_share": hits}
    size, number = args.data_parallel_size, args.num_prompts
    title = (
        f"Router policies: {size} engines of {args.threads} thread(s) on {available_cores()} cores, {args.seeds} "
        f"rounds of {number} edits at {rate:.2f} edits/s; steps {'/'.join(map(str, STEPS))}, mean mask {MASK_MEAN}, "
        f"{NUM_TEMPLATES} templates by Zipf {ZIPF}, half of them fit"
    )
    print_report(title, rows, result)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):6.3f} ({min(values):.3f} to {max(values):.3f})"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-parallel-size", type=int, default=2, help="engines")
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--num-prompts", type=int, default=300, help="edits in each run")
    parser.add_argument("--seeds", type=int, default=3, help="rounds, in which each policy runs once")
    parser.add_argument("--load", type=float, default=0.6, help="share of the measured capacity")
    parser.add_argument("--request-rate", type=float, help="edits per second, instead of --load")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
