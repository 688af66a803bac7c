"""Latency by routing policy on simulated fleets: P95 and mean over seeds; with --paper or --trace instead goodput by
scheduling policy on published traces, or latency by scheduling policy of videos on several devices; with --models what
loads cost where several models take turns in the memory of ranks; with --arena whether the default scheduling policy
is anywhere worse than those before it; with --paper lego workflows of several models on many devices, by system.

Schedulers, caches, cost models, reports and the router are the code that serves; time and workers are simulated. Each
run of a fleet prints one line of JSON; a table by scenario follows. With --trace, --output gets one JSON object.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from benchmarks.command import command
from benchmarks.report import print_line
from benchmarks.simulation import model_report, videos
from benchmarks.simulation.arena.compete import compete
from benchmarks.simulation.arena.scenarios import SCENARIOS as ARENA
from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.lego import report as lego
from benchmarks.simulation.lego.experiments import EXPERIMENTS, Wanted
from benchmarks.simulation.lego.numbers import Numbers
from benchmarks.simulation.lego.systems import SYSTEMS
from benchmarks.simulation.model_scenario import MODEL_SCENARIOS
from benchmarks.simulation.module_engine import OVERHEAD
from benchmarks.simulation.module_trace import ModuleTrace
from benchmarks.simulation.published import DATA, PAPERS, as_json, compare
from benchmarks.simulation.published_plots import write_plots
from benchmarks.simulation.scenario import SCENARIOS
from benchmarks.simulation.video_load import VideoLoad
from core.config import RouterPolicy, SchedulerConfig, SchedulingPolicyName

POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)
ARENA_SEEDS = LEGO_SEEDS = 8
SETTINGS = ("S1", "S2", "S3", "S4", "S5", "S6")
POLICY_NAMES = (*get_args(SchedulingPolicyName), *sorted({name for each in ARENA.values() for name in each.policies}))
SHARES = (0.5, 0.95, 0.99)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One trace under one policy. Latencies in simulated seconds."""

    scenario: str
    policy: RouterPolicy
    seed: int
    offered: float  # edits per second
    mean: float
    p50: float
    p95: float
    p99: float
    utilization: float  # busy share of the workers, the mean over engines
    primed: float  # keyframes per edit
    loaded: float  # keyframes per edit
    error: float | None  # median of |predicted / real - 1|; None where nothing was predicted
    wall_seconds: float  # what the run took


def simulate(name: str, policy: RouterPolicy, seed: int) -> Run:
    start, scenario = time.perf_counter(), SCENARIOS[name]
    outcome = Cluster(scenario, policy, seed).run()
    latencies, number = np.array(outcome.latencies), scenario.num_warm_up + scenario.num_edits
    pairs = zip(outcome.predicted, outcome.latencies, strict=True)
    errors = [abs(predicted / real - 1) for predicted, real in pairs if predicted is not None]
    p50, p95, p99 = (float(value) for value in np.quantile(latencies, SHARES))
    return Run(
        scenario=name,
        policy=policy,
        seed=seed,
        offered=scenario.load * scenario.capacity,
        mean=float(latencies.mean()),
        p50=p50,
        p95=p95,
        p99=p99,
        utilization=sum(outcome.busy_seconds) / sum(scenario.engine_ranks) / outcome.seconds,
        primed=outcome.primed / number,
        loaded=outcome.loaded / number,
        error=statistics.median(errors) if errors else None,
        wall_seconds=time.perf_counter() - start,
    )


def print_table(runs: Sequence[Run]) -> None:
    """Means over seeds; the ratio is mask-aware's P95 to the policy's, its mean and range over the seeds."""
    for scenario in dict.fromkeys(run.scenario for run in runs):
        of_scenario = [run for run in runs if run.scenario == scenario]
        print(f"\n{scenario}: seconds, mean over seeds (standard deviation)")
        print("policy           mean           P50    P95            P99    mask-aware's P95 against it")
        for policy in dict.fromkeys(run.policy for run in of_scenario):
            print(_row(policy, of_scenario))


def _row(policy: RouterPolicy, runs: Sequence[Run]) -> str:
    best = {run.seed: run.p95 for run in runs if run.policy == "mask-aware"}
    mine = [run for run in runs if run.policy == policy]
    ratios = [best[run.seed] / run.p95 - 1 for run in mine if run.seed in best]
    against = f"{statistics.mean(ratios):+.1%} ({min(ratios):+.1%} .. {max(ratios):+.1%})" if ratios else ""
    middle, last = statistics.mean(run.p50 for run in mine), statistics.mean(run.p99 for run in mine)
    mean, p95 = _spread([run.mean for run in mine]), _spread([run.p95 for run in mine])
    return f"{policy:<16} {mean}  {middle:5.2f}  {p95}  {last:5.2f}  {against}"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):5.2f} ({statistics.stdev(values) if len(values) > 1 else 0.0:5.2f})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--scenarios", nargs="+", default=["reference", "mix"], choices=SCENARIOS, help="by name")
    parser.add_argument(
        "--seeds", type=int, help="traces of each scenario; without this 5, of videos and models 1, with --arena 8"
    )
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES, help="of the router")
    traces = parser.add_mutually_exclusive_group()
    traces.add_argument(
        "--paper", choices=[*PAPERS, "ddit", "lego"], help="serve what this paper's authors have served"
    )
    traces.add_argument("--trace", type=Path, metavar="FILE", help="serve the trace of a file of the same form")
    traces.add_argument(
        "--models", nargs="+", choices=MODEL_SCENARIOS, metavar="NAME", help="serve these sets of models"
    )
    traces.add_argument("--arena", action="store_true", help="compare the default scheduling policy with all others")
    parser.add_argument("--only", nargs="+", choices=ARENA, metavar="NAME", help=f"with --arena: of {', '.join(ARENA)}")
    parser.add_argument("--fits", type=int, nargs="+", help="with --models: models that fit on a rank; 0: all")
    parser.add_argument(
        "--scheduling-policies",
        nargs="+",
        choices=POLICY_NAMES,
        metavar="NAME",
        help="with --models or --arena: of the engine; without this, the default one, and with --arena all",
    )
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="with --paper, --trace or --arena: write plots there"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count(),
        help="with --paper, --trace, --models or --arena: runs at once; 0, with --paper lego: show what --records has",
    )
    parser.add_argument("--overhead", type=float, default=OVERHEAD, help="share by which batches exceed their tables")
    parser.add_argument(
        "--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), help="with --paper lego: by name"
    )
    parser.add_argument(
        "--records", type=Path, metavar="FILE", help="with --paper lego: to go on from, and to add to; made if missing"
    )
    parser.add_argument("--settings", nargs="+", default=SETTINGS, choices=SETTINGS, help="with --paper lego")
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 16, 32], help="with --paper lego")
    parser.add_argument("--quick", action="store_true", help="with --paper lego: fewer requests, rounds and seeds")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS, help="with --paper lego")
    parser.add_argument("--vary", action="store_true", help="with --paper ddit: halve and double each assumed number")
    args = parser.parse_args(argv)
    if args.paper == "ddit":
        serve_videos(args)
        return
    if args.paper == "lego":
        serve_workflows(args)
        return
    if args.arena:
        scenarios = args.only or list(ARENA)
        of_engine = args.scheduling_policies
        compete(scenarios, of_engine, args.seeds or ARENA_SEEDS, args.processes, args.output, args.plots)
        return
    if args.models:
        models = args.models, args.scheduling_policies or [SchedulerConfig().policy], args.policies, args.fits
        model_report.compare(*models, args.seeds or 1, args.processes, args.output)
        return
    files = [DATA / name for name in PAPERS[args.paper]] if args.paper else [args.trace] if args.trace else []
    if files:
        serve_traces(files, args)
    else:
        simulate_fleets(args)


def serve_traces(files: Sequence[Path], args: argparse.Namespace) -> None:
    results = {path: compare(path, args.processes, args.overhead) for path in files}
    if args.output is not None:
        args.output.write_text(as_json([result for of_file in results.values() for result in of_file]))
    if args.plots is not None:
        for path in files:
            write_plots(args.plots, ModuleTrace.read(path), results[path])


def serve_videos(args: argparse.Namespace) -> None:
    if args.vary:
        for line in videos.vary(VideoLoad.read(), args.processes):
            print(line, flush=True)
        return
    results = videos.compare(args.seeds or 1, args.processes)
    if args.output is not None:
        args.output.write_text(videos.as_json(results))


def serve_workflows(args: argparse.Namespace) -> None:
    """Quick: one setting with two seeds takes two minutes."""
    numbers, seeds, number = Numbers.read(), args.seeds or LEGO_SEEDS, 800
    if args.quick:
        numbers, seeds, number = msgspec.structs.replace(numbers, most_rounds=4), args.seeds or 2, 300
    wanted = Wanted(numbers, args.settings, args.devices, seeds, number, args.systems)
    lego.compare(args.experiments, wanted, args.processes, args.records, args.output, args.plots)


def simulate_fleets(args: argparse.Namespace) -> None:
    runs = list[Run]()
    for seed in range(args.seeds or 5):
        for scenario in args.scenarios:
            for policy in args.policies:
                runs.append(simulate(scenario, policy, seed))
                print_line(msgspec.to_builtins(runs[-1]), args.output)
    print_table(runs)


if __name__ == "__main__":
    main()
