"""Goodput under overload: edits per second done within the latency objective, up to the knee and at twice its rate.

An open loop: at every rate a given number of arrivals is drawn uniformly over the time, as a Poisson process has them.
The objective is a multiple of what a lone edit takes.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from benchmarks.command import command
from benchmarks.load.client import Outcome, Run, Target, send_in_turn, send_on_time, warm_up
from benchmarks.load.dataset import EditCall, Mix, synthetic
from benchmarks.load.server import ready_server
from benchmarks.load.workload import available_cores
from benchmarks.report import percentile, print_report

NUM_CALLS = 48
NUM_LONE = 12
CAPACITY_CLIENTS = 16
CLIENT_SECONDS = 60.0  # of an edit; an answer that never comes is an error
OVERLOAD = 2.0
BAR = 0.9


@dataclass(frozen=True)
class Measured:
    """One rate in edits per second, under an objective of slo seconds."""

    rate: float
    run: Run
    slo: float

    @property
    def goodput(self) -> float:
        """Edits per second done within the objective, from the first arrival to the last answer."""
        in_time = sum(outcome.latency <= self.slo for outcome in self.run.outcomes)
        return in_time / (self.run.seconds - min(outcome.due for outcome in self.run.outcomes))

    @property
    def late_sending(self) -> float:
        """P95 of the seconds by which edits were sent after they were due."""
        return percentile([outcome.sent - outcome.due for outcome in self.run.outcomes], 0.95)

    def __str__(self) -> str:
        ends = Counter(map(end_of, self.run.outcomes))
        late = sum(not one.is_failed and one.latency > self.slo for one in self.run.outcomes)
        drops = [one.done - one.due for one in self.run.outcomes if end_of(one) == "dropped"] or [0.0]
        return (
            f"goodput {self.goodput:6.2f}/s   done {ends['done']:4d} (late {late})   dropped {ends['dropped']:4d}, P50 "
            f"after {statistics.median(drops) * 1e3:.0f} ms   given up {ends['given up']}"
        )


def end_of(outcome: Outcome) -> str:
    """done, dropped (503: it would miss the objective, or the queue is full) or given up (504: it would miss its
    timeout). Raises ValueError for an end that overload does not explain.
    """
    if not outcome.is_failed:
        return "done"
    refusal = outcome.refusal
    if refusal is not None and refusal.status == 503 and refusal.retry_after is not None:
        return "dropped"
    if refusal is not None and refusal.status == 504:
        return "given up"
    raise ValueError(outcome.error)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, engines=1, threads=1, seed=0)
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
    args = parser.parse_args(argv)
    mix = Mix("gamma", "fixed:1", num_inference_steps=str(args.num_inference_steps))
    calls = synthetic(mix, NUM_CALLS, np.random.default_rng(args.seed))
    flags = ["--threads", str(args.threads), "--data-parallel-size", str(args.engines)]
    with ready_server(flags) as server:
        lone, capacity = asyncio.run(_probe(Target(server.url), calls, args.seconds))
    slo = args.slo_scale * lone
    with ready_server([*flags, "--slo-ms", f"{slo * 1e3:.0f}"]) as server:
        target = Target(server.url, timeout=CLIENT_SECONDS)
        asyncio.run(warm_up(target, calls, 1))
        rates = [share * capacity for share in args.shares]
        sweep = [_measure(target, calls, rate, slo, args.seconds, seed) for seed, rate in enumerate(rates)]
        knee = max(sweep, key=lambda measured: measured.goodput)
        overload = _measure(target, calls, OVERLOAD * knee.rate, slo, args.seconds, len(sweep))
    ratio, every = overload.goodput / knee.goodput, [*sweep, overload]
    rows = [(f"{measured.rate:6.2f} edits/s", str(measured)) for measured in every]
    rows += [
        ("knee", f"{knee.goodput:.2f}/s at {knee.rate:.2f} edits/s"),
        (f"{OVERLOAD:g}x the knee", f"{overload.goodput:.2f}/s: {ratio:.3f} of the knee's (bar: {BAR})"),
        ("sent late, P95", f"{max(one.late_sending for one in every) * 1e3:.1f} ms"),
        ("a lone edit, the objective", f"{lone * 1e3:.0f} ms, {slo * 1e3:.0f} ms"),
        (f"{CAPACITY_CLIENTS} clients that never wait", f"{capacity:.2f} edits/s"),
    ]
    title = (
        f"Overload: {args.engines} engine(s) of {args.threads} thread(s) on {available_cores()} cores, "
        f"{args.num_inference_steps} steps, mean mask 0.15, {args.seconds:g} s of each rate"
    )
    result = {"benchmark": "overload", "lone_s": lone, "capacity_per_s": capacity, "slo_s": slo}
    result |= {"knee_rate_per_s": knee.rate, "knee_goodput_per_s": knee.goodput}
    result |= {"overload_goodput_per_s": overload.goodput, "overload_ratio": ratio}
    print_report(title, rows, result, args.output)


async def _probe(target: Target, calls: Sequence[EditCall], seconds: float) -> tuple[float, float]:
    """Mean seconds of a lone edit, and edits per second with clients that never wait."""
    await warm_up(target, calls, 1)
    lone = await warm_up(target, calls[:NUM_LONE], 1)
    run = await send_in_turn(target, calls, CAPACITY_CLIENTS, seconds=seconds)
    return statistics.mean(lone.latencies), len(run.outcomes) / run.seconds


def _measure(target: Target, calls: Sequence[EditCall], rate: float, slo: float, seconds: float, seed: int) -> Measured:
    """One rate; the server is idle before and after."""
    number = max(8, round(rate * seconds))
    due = np.sort(np.random.default_rng(seed).uniform(0, number / rate, number)).tolist()
    return Measured(rate, asyncio.run(send_on_time(target, list(islice(cycle(calls), number)), due)), slo)


if __name__ == "__main__":
    main()
