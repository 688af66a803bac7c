"""Router policies on real engines: mean and P95 latency through HTTP, each policy given the same arrivals.

An open loop. Templates are drawn by Zipf's law, and an engine's memory holds the pages of half of them: some are warm,
some cold, some on one engine only. Masks and step counts are mixed, as in benchmarks/simulation. Policies take turns in
each round; the spread over rounds is printed beside the means.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from benchmarks.command import command
from benchmarks.load.arrivals import due_times
from benchmarks.load.client import Run, Target, send_on_time, warm_up
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.load.server import ready_server
from benchmarks.load.workload import available_cores
from benchmarks.report import Value, percentile, print_report
from core.config import RouterPolicy

POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)
MIX = Mix("gamma", "zipf:1.05", num_templates=60, num_inference_steps="choice:8,16,28")
OTHERS = replace(MIX, first_template=1000)
"""Of templates that are not used again."""
CACHE_BYTES = MIX.num_templates // 2 * 3_700_000
"""Of each engine: the embedded model's pages of one template are five keyframes of 0.74 MB."""
CAPACITY_CLIENTS = 16


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, engines=2, threads=1, edits=300)
    parser.add_argument("--seeds", type=int, default=3, help="rounds, in which each policy runs once")
    parser.add_argument("--load", type=float, default=0.6, help="share of the measured capacity")
    parser.add_argument("--request-rate", type=float, help="edits per second, instead of --load")
    args = parser.parse_args(argv)
    rate = args.request_rate or args.load * _capacity(args)
    runs: dict[RouterPolicy, list[Run]] = {policy: [] for policy in POLICIES}
    for seed in range(args.seeds):
        calls = _calls(MIX, args.edits, seed)
        due = due_times("poisson", args.edits, rate, 1.0, np.random.default_rng([seed, 1]))
        for policy in POLICIES:
            runs[policy].append(_measure(args, policy, calls, due))
    _report(args, rate, runs)


def _measure(args: argparse.Namespace, policy: RouterPolicy, calls: Sequence[EditCall], due: Sequence[float]) -> Run:
    """Serve them with a fresh server of this policy."""
    with ready_server([*_flags(args), "--router-policy", policy]) as server:
        target = Target(server.url)
        asyncio.run(warm_up(target, _calls(OTHERS, 8, 0), CAPACITY_CLIENTS))
        return asyncio.run(send_on_time(target, calls, due))


def _capacity(args: argparse.Namespace) -> float:
    """Edits per second with clients that never wait: of the same mix, half of it to warm the caches."""
    calls = _calls(MIX, 2 * args.edits // 3, seed=99)
    half = len(calls) // 2
    with ready_server(_flags(args)) as server:
        asyncio.run(warm_up(Target(server.url), calls[:half], CAPACITY_CLIENTS))
        run = asyncio.run(warm_up(Target(server.url), calls[half:], CAPACITY_CLIENTS))
    return len(run.outcomes) / run.seconds


def _calls(mix: Mix, number: int, seed: int) -> list[EditCall]:
    return synthetic(mix, number, np.random.default_rng(seed))


def _flags(args: argparse.Namespace) -> list[str]:
    sizes = {"--data-parallel-size": args.engines, "--threads": args.threads, "--cache-host-bytes": CACHE_BYTES}
    return [str(part) for flag in sizes.items() for part in flag]


def _report(args: argparse.Namespace, rate: float, runs: dict[RouterPolicy, list[Run]]) -> None:
    rows, result = [], dict[str, Value](request_rate=rate)
    for policy, of_policy in runs.items():
        means = [statistics.mean(run.latencies) for run in of_policy]
        p95s = [percentile(run.latencies, 0.95) for run in of_policy]
        hits = statistics.mean(one.facts.get("cache") == "hit" for run in of_policy for one in run.outcomes)
        figures = f"mean {_spread(means)} s   P95 {_spread(p95s)} s   edits with all pages there {hits:4.0%}"
        rows.append((policy, figures))
        name, mean, p95 = policy.replace("-", "_"), statistics.mean(means), statistics.mean(p95s)
        result |= {f"{name}_mean_s": mean, f"{name}_p95_s": p95, f"{name}_hit_share": hits}
    title = (
        f"Router policies: {args.engines} engines of {args.threads} thread(s) on {available_cores()} cores, "
        f"{args.seeds} rounds of {args.edits} edits at {rate:.2f} edits/s; {MIX}, half of the templates fit"
    )
    print_report(title, rows, result, args.output)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):6.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
