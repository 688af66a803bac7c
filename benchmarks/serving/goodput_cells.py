"""Goodput of scheduling policies on a server of several ranks, beside what the simulation predicts for the same cells.

Cells differ in load, burstiness and objective; in a round all policies get the same requests at the same times. Runs of
one cell differ by chance, so rounds repeat all of them with other arrivals, policies in turns.
First it is measured what requests take alone, and in every round how much slower ranks are that have work at the same
time. Before and after each run some requests are sent one by one: the speed may drift by a fifth within minutes, so
objectives and times between arrivals follow what steps take just before the first policy of a cell runs (steps of a
lone request differ by policy, by some per cent), and predictions count with the mean of both.
Results are kept in a file: an interrupted command continues, and cells can be run one by one. Predictions come from the
model's profile on this machine (`make profile ARGS="--threads 1"`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.serving.cell_outcomes import Outcomes
from benchmarks.serving.goodput_bench import CELLS, POLICIES, Alone, Bench, Cell, Results
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.server_engine import Simulated
from core.config import EMBEDDED_MODEL
from core.ipc.atomic_file import write_atomically

NUMBERS = range(1, len(CELLS) + 1)
"""Of cells, for the command line."""

STAGES = ("text_encode", "image_encode", "denoise", "decode")
"""Ops whose normalised goodput is told."""


# ------------------------------------------------------------------------------------------------------ report


def report(bench: Bench, results: Results) -> Iterator[str]:
    """The table, of what is measured so far."""
    alone = results.alone
    if alone is None:
        return
    line, around, crowding = alone.latency, alone.probe.surroundings, results.mean_crowding
    yield (
        f"alone: {line.seconds * 1e3:.0f} ms and {line.per_step * 1e3:.1f} ms a step; of these "
        f"{around.prepare * 1e3:.1f} ms before and {around.deliver * 1e3:.1f} ms after the engine; "
        f"{around.outside_cpu * 1e3:.1f} ms of CPU beside the workers; {around.trip * 1e3:.1f} ms between batches, "
        f"{around.pause * 1e3:.2f} if sent before; with all ranks at work steps take {crowding.steps:.2f} times "
        f"as long, and new requests wait for {crowding.wait * 1e3:.1f} ms"
    )
    yield "predictions are from the profile" if bench.known.has_profile else "there is no profile: run `make profile`"
    stretch = bench.stretch(alone, [alone.probe])
    yield "batches alone, as a multiple of it: " + ", ".join(f"{op} {value:.2f}" for (op, _), value in stretch.items())
    for cell in CELLS:
        if of_cell := results.measured.get(cell.name):
            yield from _cell_report(bench, cell, of_cell, results, alone)


def _cell_report(
    bench: Bench,
    cell: Cell,
    measured: Mapping[str, Sequence[Outcomes]],
    results: Results,
    alone: Alone,
) -> Iterator[str]:
    """Means over the rounds of a policy, and in brackets its least and greatest."""
    predicted = {
        policy: [bench.predict(cell, policy, results, each, number) for number, each in enumerate(of)]
        for policy, of in measured.items()
    }
    yield f"\n{cell.name}, {len(bench.calls)} requests in {bench.due(cell, alone, 0)[-1]:.0f} s, times the speed"
    names = (
        f"{'speed':>7}{'in time':>9}{'least - most':>14}{'predicted':>11}{'off by':>8}{'engine':>9}{'policy':>8}"
        f"{'scheduler':>11}"
    )
    yield f"  {'':<15}{names}{'switch':>8}  batches of the first round"
    for policy, of in measured.items():
        yield f"  {policy:<15}{_speed(alone, of):>7.2f}" + policy_line(of, predicted[policy])
    yield from compared(measured, predicted)
    for policy, of in measured.items():
        ends = {name: sum(getattr(each, name) for each in of) for name in ("late", "refused", "given_up", "failed")}
        rates = {op: _normalised(bench, cell, of[0], op) for op in STAGES if op in of[0].mean_batch}
        others = ", ".join(f"{count} {name}" for name, count in ends.items() if count) or "none late"
        goodput = ", ".join(f"{op} {g:.1f}" for op, g in rates.items()) or "none"
        yield f"  {policy:<15}{others}; in the first round normalised goodput {goodput}"


_SHARES = ("engine_cpu", "policy_cpu", "switching")
"""Of Outcomes: told as shares of worker time."""


def _speed(alone: Alone, of: Sequence[Outcomes]) -> float:
    """What steps alone took before and after these runs, as a multiple of what they took at first; the mean."""
    return statistics.fmean(probe.step_seconds for each in of for probe in each.probes) / alone.probe.step_seconds


def policy_line(measured: Sequence[Outcomes], predicted: Sequence[Simulated]) -> str:
    """What the rounds of a policy came to, beside what was predicted for them."""
    found, expected = _in_time(measured), _in_time(predicted)
    worker = sum(each.worker_seconds for each in measured)
    shares = {name: _ratio(sum(getattr(each, name) for each in measured), worker) for name in _SHARES}
    scheduler = _ratio(sum(each.scheduler_seconds for each in predicted), sum(each.busy_seconds for each in predicted))
    spread = f"({min(each.in_time for each in measured)} - {max(each.in_time for each in measured)})"
    off = (found - expected) / max(1.0, expected)
    return (
        f"{found:>9.1f}{spread:>14}{expected:>11.1f}{off:>8.1%}{shares['engine_cpu']:>9.2%}{shares['policy_cpu']:>8.2%}"
        f"{scheduler:>11.2%}{shares['switching']:>8.2%}  " + " ".join(f"{size:.1f}" for _, size in measured[0].batches)
    )


def _ratio(part: float, whole: float) -> float:
    """NaN if there is no whole: the ranks do no work where a policy refuses every request."""
    return part / whole if whole else math.nan


def _in_time(runs: Sequence[Outcomes] | Sequence[Simulated]) -> float:
    return statistics.fmean(run.in_time for run in runs)


def compared(measured: Mapping[str, Sequence[Outcomes]], predicted: Mapping[str, Sequence[Simulated]]) -> Iterator[str]:
    """Lines: requests in time of the policy `default` against each other policy, over the rounds that both have run.
    The standard error of a ratio is that of the mean difference of its rounds.
    """
    ours = measured.get(OURS)
    for policy, of in measured.items():
        if ours is None or policy == OURS:
            continue
        number = min(len(ours), len(of))
        real = _in_time(ours[:number]) / max(1.0, _in_time(of[:number]))
        simulated = _in_time(predicted[OURS][:number]) / max(1.0, _in_time(predicted[policy][:number]))
        batch = _ratio(*(each[0].mean_batch.get("denoise", 0.0) for each in (ours, of)))
        gains = [one.in_time - other.in_time for one, other in zip(ours, of, strict=False)]
        error = f" +- {_standard_error(gains) / max(1.0, _in_time(of[:number])):.3f}" if number > 1 else ""
        yield f"  {OURS} against {policy}: {real:.3f}{error} (predicted {simulated:.3f}), batches {batch:.2f}x"


def _standard_error(values: Sequence[float]) -> float:
    """Of their mean; two values or more."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _normalised(bench: Bench, cell: Cell, of: Outcomes, op: str) -> float:
    """NeuStream's equation 1 with the mean batch that was run: requests per second of all ranks."""
    times = statistics.fmean(call.steps for call in bench.calls) if op == "denoise" else 1.0
    num_ranks: int = bench.args.workers_per_engine
    seconds: float = of.probes[0].op_seconds[op]
    return of.mean_batch[op] * num_ranks / (cell.slo * seconds * times)


# ------------------------------------------------------------------------------------------------------ command


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    bench, kept = Bench(args), set(vars(args)) - {"results", "cells", "policies", "rounds"}
    settings = {name: str(getattr(args, name)) for name in sorted(kept)}
    results = Results(settings)
    if args.results.exists():
        try:
            results = msgspec.json.decode(args.results.read_bytes(), type=Results)
        except msgspec.DecodeError as error:
            sys.exit(
                f"error: {args.results} holds no results of this command ({error}): remove it, or name another file"
            )
        if results.settings != settings:
            sys.exit(f"error: {args.results} holds results of other settings: {results.settings}")
    if results.alone is None:
        results.alone = bench.measure_alone()
        _keep(results, args.results)
    for number_of_round in range(args.rounds):
        if len(results.crowding) <= number_of_round:
            results.crowding.append(bench.measure_crowding(number_of_round))
            _keep(results, args.results)
        for number in args.cells:
            _measure_cell(bench, results, CELLS[number - 1], number_of_round)
    for line in report(bench, results):
        print(line)


def _measure_cell(bench: Bench, results: Results, cell: Cell, number_of_round: int) -> None:
    """What a round of a cell lacks. In every other round policies come in the reverse order."""
    assert results.alone is not None
    of_cell = results.measured.setdefault(cell.name, {})
    done = [rounds[number_of_round] for rounds in of_cell.values() if len(rounds) > number_of_round]
    pace = done[0].pace if done else None
    for policy in bench.args.policies[:: 1 if number_of_round % 2 == 0 else -1]:
        rounds = of_cell.setdefault(policy, [])
        if len(rounds) > number_of_round:
            continue
        rounds.append(bench.measure(cell, policy, results.alone, number_of_round, pace))
        pace = rounds[-1].pace
        _keep(results, bench.args.results)
        print(f"{cell.name} {policy}: {rounds[-1].in_time} of {len(bench.calls)} in time", flush=True)


def _keep(results: Results, path: Path) -> None:
    write_atomically(path, msgspec.json.format(msgspec.json.encode(results)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workload", choices=("edits", "generations"), default="edits", help="what is sent")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="as for the server")
    parser.add_argument("--dtype", default="auto", help="as for the server")
    parser.add_argument("--workers-per-engine", type=int, default=2, help="ranks, of one thread each")
    parser.add_argument("--results", type=Path, default=Path("goodput-cells.json"), help="where they are kept")
    parser.add_argument("--cells", type=int, nargs="+", default=NUMBERS, choices=NUMBERS, help="numbers of cells")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES, help="by name")
    parser.add_argument("--rounds", type=int, default=1, help="of all cells, each with other arrivals")
    parser.add_argument("--num-prompts", type=int, default=150, help="requests of a cell")
    parser.add_argument("--num-inference-steps", default="uniform:8-50", help="N, uniform:LOW-HIGH or choice:A,B,..")
    parser.add_argument("--mask-ratio-dist", default="flashps-prod", help="of edits, see benchmark_serving")
    parser.add_argument("--num-templates", type=int, default=8, help="of edits, all of them warm")
    parser.add_argument("--sizes", default="256x256", help="of edits")
    parser.add_argument("--extra-body", type=msgspec.json.decode, default={}, metavar="JSON", help="more fields")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    return parser


if __name__ == "__main__":
    main()
