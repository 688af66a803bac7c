"""Latency by routing policy on simulated fleets: P95 and mean over seeds, and what the deciding itself costs.

Engines, caches, cost models, reports and the router are the code that serves; only time and the workers are made up
(see benchmarks/simulation). Each run prints one line of JSON; a table by scenario follows. Runs that --results holds
already are not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from benchmarks.simulation.cluster import Cluster, Outcome
from benchmarks.simulation.free_moves import latencies_moving_freely
from benchmarks.simulation.scenarios import SCENARIOS
from core.config import RouterPolicy

POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One trace under one policy. offered: edits a second. Latencies in simulated seconds. utilization: busy share of
    the workers, the mean over engines. primed, loaded: keyframes per edit. error: median of |predicted / real - 1|,
    None where nothing was predicted. router_us: microseconds per edit, all of the router; scheduler_share: of one
    engine's busy time, for its scheduler. wall_seconds: what the run took.
    """

    scenario: str
    policy: RouterPolicy
    seed: int
    offered: float
    mean: float
    p50: float
    p95: float
    p99: float
    utilization: float
    primed: float
    loaded: float
    error: float | None
    router_us: float
    router_share: float
    scheduler_share: float
    most_in_flight: int
    wall_seconds: float


def simulate(scenario: str, policy: RouterPolicy, seed: int) -> Run:
    start = time.perf_counter()
    outcome = Cluster(SCENARIOS[scenario], policy, seed).run()
    return _run_of(scenario, policy, seed, outcome, time.perf_counter() - start)


def _run_of(scenario: str, policy: RouterPolicy, seed: int, outcome: Outcome, wall_seconds: float) -> Run:
    latencies = np.array(outcome.latencies)
    number = SCENARIOS[scenario].num_warm_up + len(latencies)
    busy = statistics.mean(outcome.busy_seconds)
    p50, p95, p99 = (float(value) for value in np.quantile(latencies, (0.5, 0.95, 0.99)))
    return Run(
        scenario=scenario,
        policy=policy,
        seed=seed,
        offered=SCENARIOS[scenario].load * SCENARIOS[scenario].capacity,
        mean=float(latencies.mean()),
        p50=p50,
        p95=p95,
        p99=p99,
        utilization=busy / outcome.seconds,
        primed=outcome.primed / number,
        loaded=outcome.loaded / number,
        error=_error(outcome),
        router_us=outcome.router_cpu_seconds / number * 1e6,
        router_share=outcome.router_cpu_seconds / busy,
        scheduler_share=statistics.mean(outcome.scheduler_cpu_seconds) / busy,
        most_in_flight=outcome.most_in_flight,
        wall_seconds=wall_seconds,
    )


def _error(outcome: Outcome) -> float | None:
    pairs = zip(outcome.predicted, outcome.latencies, strict=True)
    errors = [abs(predicted / real - 1) for predicted, real in pairs if predicted is not None]
    return statistics.median(errors) if errors else None


def print_table(runs: Sequence[Run]) -> None:
    """Means over seeds; the ratio is mask-aware's P95 to the policy's, its mean and range over the seeds."""
    for scenario in dict.fromkeys(run.scenario for run in runs):
        print(f"\n{scenario}: seconds, mean over seeds (standard deviation)")
        print("policy           mean           P50    P95            P99    mask-aware's P95 against it")
        for policy in POLICIES:
            of_policy = [run for run in runs if (run.scenario, run.policy) == (scenario, policy)]
            if of_policy:
                print(_row(policy, of_policy, runs))
        if SCENARIOS[scenario].is_warm:
            print(_free_row(scenario, sorted({run.seed for run in runs if run.scenario == scenario})))


def _row(policy: RouterPolicy, of_policy: Sequence[Run], runs: Iterable[Run]) -> str:
    best = {(run.scenario, run.seed): run.p95 for run in runs if run.policy == "mask-aware"}
    ratios = [best[run.scenario, run.seed] / run.p95 - 1 for run in of_policy if (run.scenario, run.seed) in best]
    p50, p99 = (statistics.mean(getattr(run, name) for run in of_policy) for name in ("p50", "p99"))
    columns = (
        f"{policy:<16} {_spread(run.mean for run in of_policy)}  {p50:5.2f}  {_spread(run.p95 for run in of_policy)}"
    )
    against = f"{statistics.mean(ratios):+.1%} ({min(ratios):+.1%} .. {max(ratios):+.1%})" if ratios else ""
    return f"{columns}  {p99:5.2f}  {against}"


def _free_row(scenario: str, seeds: Sequence[int]) -> str:
    """A bound: edits that could move between engines at any time."""
    latencies = [np.array(latencies_moving_freely(SCENARIOS[scenario], seed)) for seed in seeds]
    p50, p95, p99 = ([float(np.quantile(of_seed, share)) for of_seed in latencies] for share in (0.5, 0.95, 0.99))
    mean = _spread(float(of_seed.mean()) for of_seed in latencies)
    return f"{'(moving freely)':<16} {mean}  {statistics.mean(p50):5.2f}  {_spread(p95)}  {statistics.mean(p99):5.2f}"


def _spread(values: Iterable[float]) -> str:
    values = list(values)
    return f"{statistics.mean(values):5.2f} ({statistics.stdev(values) if len(values) > 1 else 0.0:5.2f})"


def _read(path: Path | None) -> list[Run]:
    if path is None or not path.exists():
        return []
    return [msgspec.json.decode(line, type=Run) for line in path.read_text().splitlines()]


def _note(run: Run, path: Path | None) -> None:
    line = json.dumps(msgspec.to_builtins(run))
    print(line, flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scenarios", nargs="+", default=["reference", "mix"], choices=SCENARIOS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--results", type=Path, help="file of JSON lines that runs are taken from and added to")
    parser.add_argument("--plots", type=Path, help="folder that plots of all runs in --results are written to")
    args = parser.parse_args()
    runs = _read(args.results)
    done = {(run.scenario, run.policy, run.seed) for run in runs}
    for seed in range(args.seeds):
        for scenario in args.scenarios:
            for policy in args.policies:
                if (scenario, policy, seed) not in done:
                    runs.append(simulate(scenario, policy, seed))
                    _note(runs[-1], args.results)
    print_table(runs)
    if args.plots is not None:
        from benchmarks.simulation.plots import write_plots

        write_plots(runs, args.plots)


if __name__ == "__main__":
    main()
