"""What routing costs: time of a decision, and processor time of the router against an engine's.

A simulated fleet runs once, and its router's inputs are recorded: load reports and edits with their times. The
recording is then replayed to a new Fleet and policy; with --models also as if each edit were of one of so many models,
of which each engine has two and room for no other, and with --machines as if engines were spread over so many, of which
the router's own is the first. Schedulers are measured by `benchmarks.micro.scheduler_scale`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from benchmarks.command import command
from benchmarks.report import percentile, print_report
from benchmarks.simulation.cluster import Cluster, Outcome
from benchmarks.simulation.scenario import MODEL, SCENARIOS, Scenario
from core.config import RouterPolicy
from core.costs.load_report import LoadReport, ModelLoad, SpareBytes
from core.messages.engine import EngineRequest
from core.routing.fleet import Fleet
from core.routing.policies import make_policy
from core.routing.request_shape import RequestShape

REPEATS = 5

BYTE_SECONDS = 1 / 0.3e9
"""A byte takes this long to an engine of another machine, see `Fleet.note_link`."""

MODEL_BYTES = 24_000_000_000
LOAD_SECONDS = MODEL_BYTES / 5e9

Event = tuple[float, int, LoadReport] | tuple[float, int, EngineRequest]
"""Time, engine, and what it reported or was sent."""


class Recorder(Cluster):
    """A cluster that records its router's inputs in order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.events: list[Event] = []

    def note_report(self, engine: int, report: LoadReport) -> None:
        self.events.append((self.clock.now, engine, report))

    def note_sent(self, engine: int, edit: EngineRequest) -> None:
        self.events.append((self.clock.now, engine, edit))


def of_models(events: list[Event], number: int) -> list[Event]:
    """The recording as if the edits were of so many models."""
    return [(now, engine, _of_models(engine, what, number)) for now, engine, what in events]  # type: ignore[misc]


def _of_models(engine: int, what: LoadReport | EngineRequest, number: int) -> LoadReport | EngineRequest:
    if isinstance(what, EngineRequest):
        return msgspec.structs.replace(what, model=str(int(what.request_id) % number))
    if what.is_first:
        there = {str((2 * engine + each) % number) for each in range(2)}
        models = tuple(
            ModelLoad(name, "model", "loaded", 0.0)
            if name in there
            else ModelLoad(name, "model", "unloaded", LOAD_SECONDS, nbytes=MODEL_BYTES)
            for name in map(str, range(number))
        )
        what = msgspec.structs.replace(what, models=models)
    idle = MODEL_BYTES * (what.num_running < 2)
    return msgspec.structs.replace(what, room=SpareBytes(0, idle, 1.0), load_seconds=None)


def least(events: list[Event], scenario: Scenario, policy: RouterPolicy, machines: int) -> tuple[list[float], float]:
    """As `replay`, the least of REPEATS runs, without what other processes took."""
    times, seconds = zip(*(replay(events, scenario, policy, machines) for _ in range(REPEATS)), strict=True)
    return [min(of_one) for of_one in zip(*times, strict=True)], min(seconds)


def replay(events: list[Event], scenario: Scenario, policy: RouterPolicy, machines: int) -> tuple[list[float], float]:
    """Seconds of each decision, and processor seconds in all. Edits go where they went in the recording, so that
    policies are compared on the same state."""
    fleet, chooser, times = Fleet(scenario.num_engines, scenario.max_num_seqs), make_policy(policy), list[float]()
    for engine in range(scenario.num_engines // machines, scenario.num_engines):
        fleet.note_link(engine, BYTE_SECONDS)
    start = time.process_time()
    for now, engine, what in events:
        if isinstance(what, LoadReport):
            fleet.observe(engine, what, now)
            continue
        shape = RequestShape.of_request(what, msgspec.structs.replace(MODEL, name=what.model))
        fleet.settle()  # part of the last reports' cost
        begun = time.perf_counter()
        chooser.choose(shape, fleet, now)
        times.append(time.perf_counter() - begun)
        fleet.sent(engine, shape, now)
    return times, time.process_time() - start


def measure(scenario: str, num_models: Sequence[int], machines: int, output: Path | None) -> None:
    cluster = Recorder(SCENARIOS[scenario], "mask-aware", seed=0)
    outcome = cluster.run()
    for number in num_models:
        events = of_models(cluster.events, number) if number > 1 else cluster.events
        _measure(scenario, number, machines, events, outcome, output)


def _measure(
    scenario: str, num_models: int, machines: int, events: list[Event], outcome: Outcome, output: Path | None
) -> None:
    setting, rows = SCENARIOS[scenario], list[tuple[str, str]]()
    result = dict[str, float | str](benchmark="router_decision", scenario=scenario, models=num_models)
    result["machines"] = machines
    seconds = dict[RouterPolicy, float]()
    for policy in get_args(RouterPolicy):
        times, seconds[policy] = least(events, setting, policy, machines)
        median, p99 = statistics.median(times) * 1e6, percentile(times, 0.99) * 1e6
        rows.append((f"decision, {policy}", f"median {median:.0f} us, P99 {p99:.0f} us"))
        result |= {f"{policy}_median_us": median, f"{policy}_p99_us": p99}
    router = seconds["mask-aware"] / statistics.mean(outcome.busy_seconds)
    rows.append(("reports, edits", f"{len(events)} events"))
    rows.append(("router", f"{router:.2%} of one engine's busy time"))
    title = f"{scenario}: {setting.num_engines} engines, models: {num_models}, machines: {machines}"
    print_report(title, rows, result | {"router_share": router}, output)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    names = ["decision-8", "decision-64", "decision-256"]
    parser.add_argument("--scenarios", nargs="+", default=names, choices=SCENARIOS)
    parser.add_argument("--models", type=int, nargs="+", default=[1], metavar="NUMBER", help="numbers of models")
    parser.add_argument("--machines", type=int, default=1, help="machines that the engines are on")
    args = parser.parse_args(argv)
    for scenario in args.scenarios:
        measure(scenario, args.models, args.machines, args.output)


if __name__ == "__main__":
    main()
