"""Goodput of a simulated server by load and latency objective: the code that serves, in simulated time.

Loads are shares of what the engine does with full batches; the objective is a multiple of a mean edit's time alone.
Batches may take longer than the cost model says, as they do where other processes use the same cores. What is simulated
ends with the worker: an edit that is not refused has no images to prepare or to encode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from benchmarks.command import command
from benchmarks.report import Row, print_report
from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.machine import IMAGE_TOKENS, TEXT_TOKENS, Machine
from benchmarks.simulation.masks import MASKS
from benchmarks.simulation.scenario import MODEL, REFERENCE, Scenario, make_trace
from core.costs.load_report import LoadReport
from core.costs.prediction_margin import PredictionMargin
from core.messages.engine import EngineRequest, Finished
from core.messages.worker import Batch
from core.routing.admission import Terms, judge
from core.routing.fleet import RequestShape
from core.routing.policies import outlook
from core.scheduling.outputs import Output

LOADS = (0.6, 0.8, 1.0, 1.2, 1.5)
OVERLOAD = 2.0


@dataclass(frozen=True)
class Goodput:
    """rate: edits sent per second. goodput: edits per second that were done within the objective, until the last
    one had ended. ends: how many were in time, late, refused, dropped.
    """

    rate: float
    goodput: float
    ends: Counter[str] = field(default_factory=Counter)
    margin: float = 1.0

    def __str__(self) -> str:
        ends = self.ends
        return (
            f"{self.goodput:6.2f} of {self.rate:6.2f} edits/s   in time {ends['in time']:4d}   late "
            f"{ends['finished']:4d}   refused {ends['refused']:4d}   dropped {ends['dropped']:3d}"
        )


class OverloadedCluster(Cluster):
    """One run of a scenario under an objective of `slo_seconds`; None: nothing is refused."""

    def __init__(self, scenario: Scenario, slo_seconds: float | None, seed: int) -> None:
        super().__init__(scenario, "mask-aware", seed)
        self._slo = slo_seconds
        self._margin = PredictionMargin()
        self._ends: dict[int, str] = {}
        self._arrivals: dict[int, float] = {}
        self._predictions: dict[int, float] = {}

    def measure(self, slo_seconds: float) -> Goodput:
        """Run it, and count what was done within so many seconds."""
        trace = make_trace(self.scenario, self.seed)
        self.run_trace()
        ends = Counter(
            "in time" if end == "finished" and self._latencies[index] <= slo_seconds else end
            for index, end in self._ends.items()
        )
        seconds = self.clock.now - self._started
        assert sum(ends.values()) == len(trace), "every edit ends once"
        return Goodput(len(trace) / trace[-1].arrival, ends["in time"] / seconds, ends, self._margin.high)

    def _route(self, edit: EngineRequest) -> None:
        index, now = int(edit.request_id), self.clock.now
        self._arrivals[index] = now
        if self._slo is not None:
            ahead = outlook(RequestShape.of_request(edit, MODEL), self.fleet, self._policy, now)
            assert ahead is not None
            verdict = judge(ahead, Terms(None, self._slo), self._margin)
            if verdict.refused:
                self._ends[index] = "refused"
                return
            self._predictions[index] = ahead.seconds
            if verdict.has_objective:
                edit = msgspec.structs.replace(edit, objective=now + self._slo)
        super()._route(edit)

    def _hear(self, engine: int, report: LoadReport, outputs: tuple[Output, ...]) -> None:
        self.fleet.observe(engine, report, self.clock.now)
        for output in outputs:
            if not output.request_id.isdecimal():
                continue
            index = int(output.request_id)
            self._latencies[index] = seconds = self.clock.now - self._arrivals[index]
            self._ends[index] = "finished" if isinstance(output, Finished) else "dropped"
            if index in self._predictions:
                assert self._slo is not None
                taken = seconds if isinstance(output, Finished) else max(seconds, self._slo)
                self._margin.observe(self._predictions[index], taken)


@dataclass(frozen=True)
class UnknownMachine(Machine):
    """Takes `bias` times what it told the cost model, and every batch so much more or less: noise is the deviation of
    the logarithm.
    """

    bias: float = 1.0
    noise: float = 0.0

    def batch_seconds(self, batch: Batch, edits: dict[str, EngineRequest]) -> float:
        seconds = super().batch_seconds(batch, edits) * self.bias
        return seconds * float(np.exp(self.noise * np.random.default_rng(batch.id).standard_normal()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, engines=1, edits=300)
    parser.add_argument("--slo-scale", type=float, nargs="+", default=[3.0, 6.0, 10.0], help="in times of a lone edit")
    parser.add_argument("--bias", type=float, default=1.0, help="actual / predicted time of a batch")
    parser.add_argument("--noise", type=float, default=0.0, help="deviation of the logarithm of a batch's time")
    args = parser.parse_args(argv)
    machine = UnknownMachine(bias=args.bias, noise=args.noise)
    scenario = replace(REFERENCE, num_engines=args.engines, num_edits=args.edits, machine=machine)
    rows, result = list[Row](), dict[str, float]()
    for times in args.slo_scale:
        result[f"ratio_{times:g}"], more = _sweep(scenario, machine, times)
        rows += more
    title = (
        f"Simulated overload: {args.engines} engine(s), {args.edits} edits at each load, batches take {args.bias:g} x "
        f"what is predicted, noise {args.noise:g}"
    )
    print_report(title, rows, {"benchmark": "simulated_overload"} | result, args.output)


def _sweep(scenario: Scenario, machine: UnknownMachine, times: float) -> tuple[float, list[Row]]:
    """(goodput under overload / at the knee, rows), for an objective of so many times a lone edit."""
    slo = times * machine.bias * _lone_seconds(scenario)

    def measure(load: float, objective: float | None = slo) -> Goodput:
        return OverloadedCluster(replace(scenario, load=load / machine.bias), objective, seed=0).measure(slo)

    sweep = {load: measure(load) for load in LOADS}
    load, knee = max(sweep.items(), key=lambda item: item[1].goodput)
    overload, name = measure(OVERLOAD * load), f"{times:g} x alone, load"
    ratio = overload.goodput / knee.goodput
    rows = [(f"{name} {share:g}", str(goodput)) for share, goodput in sweep.items()]
    rows.append((f"{name} {OVERLOAD * load:g}", f"{overload}: {ratio:.2f} of the knee's"))
    rows.append((f"{name} {OVERLOAD * load:g}", f"{measure(OVERLOAD * load, None)}, if all are let in"))
    return ratio, rows


def _lone_seconds(scenario: Scenario) -> float:
    """Of a mean edit, on a machine as fast as predicted."""
    ratio = float(MASKS[scenario.masks](np.random.default_rng(0), 200_000).mean())
    return scenario.steps[0] * Machine().step_seconds(round(TEXT_TOKENS + ratio * IMAGE_TOKENS))


if __name__ == "__main__":
    main()
