"""Goodput of a simulated server by load and objective: the code that serves, in simulated time.

Loads are shares of what the engine does with full batches; the objective is a multiple of a mean edit's time alone.
Batches may take longer than the cost model says, as they do where other processes use the same cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.report import print_report
from benchmarks.simulation.machine import IMAGE_TOKENS, TEXT_TOKENS, Machine
from benchmarks.simulation.masks import MASKS
from benchmarks.simulation.overload import Goodput, OverloadedCluster
from benchmarks.simulation.scenario import Scenario
from benchmarks.simulation.scenarios import REFERENCE
from core.messages.engine import EditRequest
from core.messages.worker import Batch

LOADS = (0.6, 0.8, 1.0, 1.2, 1.5)
OVERLOAD = 2.0


@dataclass(frozen=True)
class UnknownMachine(Machine):
    """Takes `bias` times what it told the cost model, and every batch so much more or less: noise is the deviation of
    the logarithm.
    """

    bias: float = 1.0
    noise: float = 0.0

    def batch_seconds(self, batch: Batch, edits: dict[str, EditRequest]) -> float:
        seconds = super().batch_seconds(batch, edits) * self.bias
        return seconds * float(np.exp(self.noise * np.random.default_rng(batch.id).standard_normal()))


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    scenario = replace(REFERENCE, num_engines=args.data_parallel_size, num_edits=args.num_prompts)
    scenario = replace(scenario, machine=UnknownMachine(bias=args.bias, noise=args.noise))
    rows, result = [], {}
    for times in args.slo_scale:
        slo = times * args.bias * _lone_seconds(scenario)
        sweep = {load: _measure(scenario, load / args.bias, slo) for load in LOADS}
        load, knee = max(sweep.items(), key=lambda item: item[1].goodput)
        overload = _measure(scenario, OVERLOAD * load / args.bias, slo)
        ratio, name = overload.goodput / knee.goodput, f"{times:g} x alone"
        rows += [(f"{name}, load {share:g}", _show(goodput)) for share, goodput in sweep.items()]
        rows.append((f"{name}, load {OVERLOAD * load:g}", f"{_show(overload)}: {ratio:.2f} of the knee's"))
        open_door = OverloadedCluster(replace(scenario, load=OVERLOAD * load / args.bias), None, seed=0).measure(slo)
        rows.append((f"{name}, load {OVERLOAD * load:g}", f"{_show(open_door)}, if all are let in"))
        result[f"ratio_{times:g}"] = ratio
    title = (
        f"Simulated overload: {args.data_parallel_size} engine(s), {args.num_prompts} edits at each load, batches take "
        f"{args.bias:g} x what is predicted, noise {args.noise:g}"
    )
    print_report(title, rows, result)


def _measure(scenario: Scenario, load: float, slo: float) -> Goodput:
    return OverloadedCluster(replace(scenario, load=load), slo, seed=0).measure(slo)


def _lone_seconds(scenario: Scenario) -> float:
    """Of a mean edit, on a machine that keeps to its word."""
    ratio = float(MASKS[scenario.masks](np.random.default_rng(0), 200_000).mean())
    return scenario.steps[0] * Machine().step_seconds(round(TEXT_TOKENS + ratio * IMAGE_TOKENS))


def _show(goodput: Goodput) -> str:
    ends = goodput.ends
    return (
        f"{goodput.goodput:6.2f} of {goodput.rate:6.2f} edits/s   in time {ends['in time']:4d}   late "
        f"{ends['finished']:4d}   refused {ends['refused']:4d}   dropped {ends['dropped']:3d}"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-parallel-size", type=int, default=1, help="engines")
    parser.add_argument("--num-prompts", type=int, default=300, help="edits at each load")
    parser.add_argument("--slo-scale", type=float, nargs="+", default=[3.0, 6.0, 10.0], help="in times of a lone edit")
    parser.add_argument("--bias", type=float, default=1.0, help="actual / predicted time of a batch")
    parser.add_argument("--noise", type=float, default=0.0, help="deviation of the logarithm of a batch's time")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
