"""LegoDiffusion's evaluation on real processes: twelve workflows on few ranks whose memory holds a part of them, beside
the systems before it, and beside what the simulation predicts for the same requests.

The models are small, with random weights; the sizes of their parts are to each other as those of the published
checkpoints, steps are so many that they are to loads about as there, and a rank has the memory of 72 GB among these
(`lego_layout.PUBLISHED`). Each workflow has bursts of its own. Ranks are profiled alone before; predictions count with
that, and with what batches and loads take on a server that has one request at a time. Pictures must be those of that
server, byte for byte. All systems get the same requests in the same ranks, one after the other; a system that is below
`--least` gets no higher load. What a rank loads that another one has is mapped in no time, for all systems alike; files
are in the page cache.

The paper's other measurements have commands of their own: figure 4, left: bench-two-workflows; 10: bench-parallel-step,
bench-elastic; 11: benchmarks.micro.overheads; memory: bench-twelve-workflows; LoRA: bench-adapter-wait.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from benchmarks.command import command
from benchmarks.report import Value, print_line, print_report
from benchmarks.serving.lego_cells import SYSTEMS, Alone, Bench, Cell, Served
from benchmarks.serving.lego_layout import PUBLISHED, Layout, write
from benchmarks.serving.lego_profile import Known, base_of, known
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.lego.measures import TARGET

DEVICE_GB, ALL_GB = 72.0, 114.0
"""Of the paper's device for weights, and of all components of the twelve workflows: `lego.json`."""

Row = tuple[str, str]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, rounds=1, seed=0, edits=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="of the server")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.15, 0.3, 0.5], help="shares of what the ranks do")
    parser.add_argument("--slo-scale", type=float, default=8.0, help="objective, as a multiple of a request alone")
    parser.add_argument("--cv", type=float, default=4.0, help="of the times between a workflow's requests")
    parser.add_argument("--least", type=float, default=0.7, help="in time, below which there is no higher load")
    parser.add_argument("--only", nargs="+", default=list(SYSTEMS)[:3], choices=SYSTEMS, help="systems")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # of this and its servers: models of these names have other profiles
        layouts = (
            write(Path(folder) / "shared", PUBLISHED, are_written=False),
            write(Path(folder) / "separate", PUBLISHED, are_separate=True, are_written=False),
        )
        shared, separate = known(layouts, (2,))
        for num_ranks in args.ranks:
            evaluate(layouts, (shared, separate), num_ranks, args)


def evaluate(
    layouts: tuple[Layout, Layout], facts: tuple[Known, Known], num_ranks: int, args: argparse.Namespace
) -> None:
    """Measure and report a server of so many ranks."""
    bench = Bench(
        layouts=layouts,
        known=facts,
        num_ranks=num_ranks,
        model_bytes=round(DEVICE_GB / ALL_GB * layouts[0].distinct_bytes),
        number=args.edits,
        slo_scale=args.slo_scale,
        cv=args.cv,
    )
    seeds = range(args.seed, args.seed + args.rounds)
    alone = bench.measure_alone()
    rows, result = described(bench, alone)
    print_report(
        f"twelve workflows on {num_ranks} ranks", rows, {"benchmark": "served_workflows"} | result, args.output
    )
    measured: dict[str, dict[float, list[Served]]] = {name: {} for name in args.only}
    for seed in seeds:
        for name in args.only if seed % 2 == 0 else args.only[::-1]:
            cells = [Cell(load, seed) for load in sorted(args.loads)]
            for cell, served in bench.measure(SYSTEMS[name], alone, cells, args.least):
                measured[name].setdefault(cell.load, []).append(served)
                facts_of_run = {"ranks": num_ranks, "system": name, "load": cell.load, "seed": seed}
                print_line(facts_of_run | _figures(served), args.output)
    rows, result = compared(measured)
    result |= {"benchmark": "served_workflows_rates", "ranks": num_ranks, "slo_scale": args.slo_scale, "cv": args.cv}
    print_report(f"load held at {TARGET:.0%}, objective {args.slo_scale:g} x alone", rows, result, args.output)


def described(bench: Bench, alone: Alone) -> tuple[list[Row], dict[str, Value]]:
    """Of workflows alone: a request, loads of its largest part and of all, and what it takes beside its batches.

    Between them: what a request takes longer by nodes than as a whole, as section 7.5 compares. Before and after them a
    server of whole workflows does the same: it reads the request, and writes its picture.
    """
    rows, result, line = list[Row](), dict[str, Value](), alone.measured.load
    for name in bench.workflows:
        parts = bench.layouts[0].parts[name]
        base, whole = max(size for _, size in parts), bench.layouts[0].bytes_of(name)
        one, every = line.seconds + line.per_byte * base, len(parts) * line.seconds + line.per_byte * whole
        rows.append(
            (
                name,
                f"{alone.latency[name] * 1e3:.0f} ms; load of its largest part {one * 1e3:.0f}, of all "
                f"{every * 1e3:.0f} ms ({base / 1e6:.0f}, {whole / 1e6:.0f} MB); between its "
                f"{alone.num_batches[name]:.0f} batches {alone.overhead[name] * 1e3:.1f} ms, before and after "
                f"{alone.outside[name] * 1e3:.1f} ms",
            )
        )
        result |= {f"{name}_ms": alone.latency[name] * 1e3, f"{name}_overhead_ms": alone.overhead[name] * 1e3}
        if name == f"{base_of(name)}-0":
            result |= {f"{name}_load_part_ms": one * 1e3, f"{name}_load_all_ms": every * 1e3}
    crowding = alone.measured.crowding
    rows.append(("overhead of nodes", f"at most {max(alone.overhead.values()) * 1e3:.1f} ms of a request"))
    rows.append(("all ranks at work", f"steps take {crowding.steps:.2f} times as long"))
    rows.append(("memory", f"{bench.model_bytes / 1e6:.0f} of {bench.layouts[0].distinct_bytes / 1e6:.0f} MB a rank"))
    return rows, result | {"crowding": crowding.steps, "model_bytes": bench.model_bytes}


def _figures(served: Served) -> dict[str, Value]:
    ends = ", ".join(f"{count} with {status}" for status, count in sorted(served.ends.items()))
    figures: dict[str, Value] = {
        "in_time": served.in_time,
        "requests": served.num_requests,
        "wrong": served.num_wrong,
        "pictures": served.num_pictures,
        "refused": ends,
        "loads": served.num_loads,
        "coordinator": served.coordinator,
        "busy": served.busy,
    }
    if not math.isnan(served.predicted):
        least, most = served.predicted_range
        figures |= {"predicted": served.predicted, "predicted_least": least, "predicted_most": most}
        figures |= {"predicted_loads": served.predicted_loads}
    return figures


def compared(measured: Mapping[str, Mapping[float, Sequence[Served]]]) -> tuple[list[Row], dict[str, Value]]:
    """Attainment by load, measured and predicted, the load held, and ours against each other system."""
    rows, result, held = list[Row](), dict[str, Value](), dict[str, float | None]()
    for name, by_load in measured.items():
        points = {load: fmean(each.in_time for each in of) for load, of in by_load.items()}
        held[name] = load_held(points)
        runs = [each for of in by_load.values() for each in of]
        text = ", ".join(
            f"{load:g}: {points[load]:.1%} ({_predicted(of)}; {fmean(each.num_loads for each in of):.0f} loads)"
            for load, of in by_load.items()
        )
        told = f"below {min(points):g}" if held[name] is None else f"{held[name]:.2f}"
        wrong, coordinator = sum(each.num_wrong for each in runs), fmean(each.coordinator for each in runs)
        rows.append((name, f"held {told}; {text}; {wrong} wrong pictures; coordinator {coordinator:.2%}"))
        result |= {f"{name} held": held[name] or 0.0, f"{name} wrong": wrong, f"{name} coordinator": coordinator}
    ours = held.get(OURS)
    for name, load in held.items():
        if name != OURS and ours is not None:
            ratio = ours / (load or min(measured[name]))
            rows.append((f"{OURS} against {name}", f"{'' if load else 'over '}{ratio:.2f} times the rate"))
            result[f"{OURS} against {name}"] = ratio
    return rows, result


def _predicted(runs: Sequence[Served]) -> str:
    told = [each for each in runs if not math.isnan(each.predicted)]
    if not told:
        return "-"
    predicted, measured = fmean(each.predicted for each in told), fmean(each.in_time for each in told)
    least, most = (fmean(bounds) for bounds in zip(*(each.predicted_range for each in told), strict=True))
    off = f"off by {100 * (measured - predicted):+.1f}"
    return f"predicted {predicted:.1%}, {least:.1%} to {most:.1%} at 5 % less or more time, {off}"


def load_held(points: Mapping[float, float]) -> float | None:
    """The highest load at which TARGET is in time, between two loads in proportion to their logarithms; the highest one
    of `points` if it is held, None if not even the lowest one is. points: load -> share in time.
    """
    loads = sorted(points)
    if points[loads[0]] < TARGET:
        return None
    for low, high in pairwise(loads):
        if points[high] < TARGET:
            share = (points[low] - TARGET) / (points[low] - points[high])
            return float(low * (high / low) ** share)
    return loads[-1]


if __name__ == "__main__":
    main()
