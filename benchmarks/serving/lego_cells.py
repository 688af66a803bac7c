"""Cells: the same requests to twelve workflows, sent to a server of each system, and what became of them.

Systems have the same ranks with the same memory, and differ in what decides. `default` schedules nodes, whose
components workflows share. Those before it schedule whole workflows, each with components of its own: their server has
copies of the files, which it takes for others.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.baselines.monoliths import Monoliths, Pool, Whole, groups_that_fit, merged, planned_pools
from benchmarks.load.client import Outcome, Target, send_on_time, warm_up
from benchmarks.load.dataset import EditCall
from benchmarks.load.workload import prompt
from benchmarks.serving.lego_layout import Layout
from benchmarks.serving.lego_prediction import Asked, LoadLine, Measured, Predicted, predict
from benchmarks.serving.lego_profile import FLAGS, Known, base_of
from benchmarks.serving.lone_run import LoneRun, crowding_of, means_by_op
from benchmarks.serving.model_turns import loads_ended
from benchmarks.serving.recorded import MONOLITHS, POOLS, Batch, read, read_loading
from benchmarks.serving.recorded_server import SETTLE_SECONDS, RecordedServer, recorded_server
from benchmarks.simulation.compared import OURS, make
from benchmarks.simulation.lego.arrivals import Arrivals
from benchmarks.simulation.outside import Crowding
from core.messages.engine import EngineRequest
from core.scheduling.policies.policy import SchedulingPolicy

STEPS = {"sd3": 28, "sd35": 28, "schnell": 4, "dev": 50}
"""Base model -> denoising steps of a request, from `benchmarks/simulation/data/lego.json`."""

WARM_UP_SEED = 1_000_000
LONE_SECONDS = 600.0
"""Objective of requests that are alone, which does not matter."""

CROWD_LOAD, NUM_CROWDING = 1.2, 12
"""The load and the number of the requests that are sent to learn how much slower ranks are when all have work."""

PACES = (1.0, 0.95, 1.05)
"""What batches and loads take in predictions, as a multiple of what they took alone: all requests of a burst miss their
objectives, or none, by a percent of it.
"""


class Cell(NamedTuple):
    """load: as a share of what the ranks would do one request at a time."""

    load: float
    seed: int


class Sent(NamedTuple):
    """A request. due: seconds after the start."""

    workflow: str
    call: EditCall
    due: float


class Served(msgspec.Struct, frozen=True):
    """One system in one cell."""

    in_time: float  # share
    predicted: float  # the same, in simulated time; nan: requests never ended there
    predicted_range: tuple[float, float]  # least and most, at each of PACES
    num_requests: int
    num_wrong: int  # pictures that are not those of an idle server
    num_pictures: int
    ends: dict[str, int]  # status of HTTP -> refused requests
    num_loads: int  # of components
    predicted_loads: int
    coordinator: float  # CPU time of the engine's process, as a share of the ranks' time with batches
    busy: float  # share of the ranks' time with batches


@dataclass(frozen=True)
class Alone:
    """Requests one by one on a server of one rank that has everything. Seconds."""

    latency: Mapping[str, float]  # by workflow, median
    outside: Mapping[str, float]  # by workflow: of that, before the engine has it and after its last batch, medians
    overhead: Mapping[str, float]  # by workflow: of the rest, what is in no batch, median: the price of nodes
    num_batches: Mapping[str, float]  # by workflow: of a request
    digests: Mapping[tuple[str, int], str]  # (workflow, seed) -> of the picture
    measured: Measured


@dataclass(frozen=True)
class System:
    """pools: of a system of whole workflows, for the latencies of a server alone."""

    name: str
    is_separate: bool
    pools: Callable[[Bench, Alone], list[Pool]] | None = None

    def policy(self, pools: list[Pool] | None) -> SchedulingPolicy:
        """A new one, for the simulation."""
        return make(self.name) if pools is None else Monoliths(pools)


@dataclass(frozen=True)
class Bench:
    """layouts, known: of components that workflows share, and of separate ones. model_bytes: of each rank. number: of
    requests of a cell, about. slo_scale: a request is in time that takes at most so many times what its workflow takes
    alone. cv: of the times between a workflow's requests, as far as they are many.
    """

    layouts: tuple[Layout, Layout]
    known: tuple[Known, Known]
    num_ranks: int
    model_bytes: int
    number: int
    slo_scale: float
    cv: float

    @cached_property
    def workflows(self) -> list[str]:
        return list(self.layouts[0].workflows)

    # ------------------------------------------------------------------------------------------------ requests

    @cached_property
    def shares(self) -> dict[str, float]:
        """By workflow, of the requests: Zipf's law of exponent 1."""
        return dict(zip(self.workflows, Arrivals().shares(len(self.workflows)), strict=True))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """By workflow, of the requests of every cell."""
        return {name: max(2, round(share * self.number)) for name, share in self.shares.items()}

    def sent(self, cell: Cell, alone: Alone) -> list[Sent]:
        """Each workflow has arrivals of its own: Gamma, stretched so that as many come as its share says."""
        work = sum(number * alone.latency[name] for name, number in self.numbers.items())
        until, found = work / (cell.load * self.num_ranks), list[Sent]()
        for index, (name, number) in enumerate(self.numbers.items()):
            random = np.random.default_rng([cell.seed, index])
            gaps = random.gamma(self.cv**-2, size=number)
            times = (gaps.cumsum() / gaps.sum() + random.uniform()) % 1.0 * until
            calls = (_call(name, seed, self.slo_scale * alone.latency[name]) for seed in range(number))
            found += map(Sent, [name] * number, calls, sorted(times.tolist()))
        return sorted(found, key=lambda each: each.due)

    # ------------------------------------------------------------------------------------------------ servers

    @contextmanager
    def server(
        self, policy: str, layout: Layout, num_ranks: int, *flags: str, pools: Sequence[Pool] | None = None
    ) -> Iterator[tuple[RecordedServer, list[EngineRequest]]]:
        """(a server that has served each workflow once, these requests as they reached its engine)"""
        environment = {} if pools is None else {POOLS: msgspec.json.encode(pools).decode()}
        every = [*FLAGS, *layout.flags, "--workers-per-engine", str(num_ranks), *flags]
        with recorded_server(every, policy, environment) as recorded:
            for name in self.workflows:
                asyncio.run(warm_up(_target(recorded, layout, name), [_call(name, WARM_UP_SEED)], 1))
            time.sleep(SETTLE_SECONDS)
            yield recorded, [arrival.request for arrival in read(recorded.path)[0]]

    def measure_alone(self) -> Alone:
        """With all requests of a cell."""
        runs, layout = dict[str, LoneRun](), self.layouts[0]
        with self.server(OURS, layout, 1) as (recorded, _):
            for name, number in self.numbers.items():
                calls = [_call(name, seed, LONE_SECONDS) for seed in range(number)]
                runs[name] = recorded.send_one_by_one(_target(recorded, layout, name), calls)
        crowding = self._measure_crowding(max(self.numbers, key=lambda name: _work(runs[name])))
        ops = {
            (name, op): seconds
            for name, run in runs.items()
            for op, seconds in means_by_op(run.batches, lambda batch: batch.seconds).items()
        }
        around = {name: run.surroundings for name, run in runs.items()}
        return Alone(
            latency={name: statistics.median(run.run.latencies) for name, run in runs.items()},
            outside={name: around[name].prepare + around[name].deliver for name in runs},
            overhead={name: statistics.median(_between_batches(run)) for name, run in runs.items()},
            num_batches={name: len(run.batches) / len(run.run.outcomes) for name, run in runs.items()},
            digests={
                (name, seed): outcome.digest
                for name, run in runs.items()
                for seed, outcome in enumerate(run.run.outcomes)
            },
            measured=Measured(ops, around, self._measure_loads(), crowding),
        )

    def _measure_loads(self) -> LoadLine:
        """Least squares over the loads of a rank that swaps whole workflows; not over those of the first time, at which
        libraries are imported.
        """
        layout, pools = self.layouts[1], [Pool(frozenset(self.workflows), (0,))]
        flags = "--model-bytes", str(self.model_bytes)
        with self.server(MONOLITHS, layout, 1, *flags, pools=pools) as (recorded, _):
            started = time.monotonic()
            for name in self.workflows:
                asyncio.run(warm_up(_target(recorded, layout, name), [_call(name, WARM_UP_SEED + 1)], 1))
            loads = [each for each in loads_ended(read_loading(recorded.path)) if each[0] >= started]
        sizes = {each.key: each.nbytes for each in self.known[1].sizes}
        line = statistics.linear_regression([sizes[key] for _, key, _ in loads], [seconds for _, _, seconds in loads])
        return LoadLine(max(0.0, line.intercept), max(0.0, line.slope))

    def _measure_crowding(self, workflow: str) -> Crowding:
        """With requests to this workflow, one on each rank at a time."""
        layout = self.layouts[0]
        calls = [_call(workflow, seed, LONE_SECONDS) for seed in range(NUM_CROWDING)]
        with self.server(MONOLITHS, layout, self.num_ranks, pools=_one_pool(self)) as (recorded, _):
            target = _target(recorded, layout, workflow)
            alone = recorded.send_one_by_one(target, calls)
            rate = CROWD_LOAD * self.num_ranks / statistics.fmean(alone.run.latencies)
            due = np.random.default_rng(0).exponential(1 / rate, len(calls)).cumsum().tolist()
            return crowding_of(alone, recorded.send_on_time(target, calls, due), self.num_ranks)

    # ------------------------------------------------------------------------------------------------ a cell

    def measure(
        self, system: System, alone: Alone, cells: Sequence[Cell], least: float
    ) -> Iterator[tuple[Cell, Served]]:
        """Cells in their order, until less than `least` are in time."""
        layout, known = self.layouts[system.is_separate], self.known[system.is_separate]
        pools = None if system.pools is None else system.pools(self, alone)
        policy, flags = MONOLITHS if pools else system.name, ("--model-bytes", str(self.model_bytes))
        with self.server(policy, layout, self.num_ranks, *flags, pools=pools) as (recorded, warm_ups):
            for cell in cells:
                sent = self.sent(cell, alone)
                predicted = self._predict(known, alone, partial(system.policy, pools), sent, warm_ups)
                served = self._serve(recorded, layout, alone, sent, predicted)
                yield cell, served
                if served.in_time < least:
                    return
                time.sleep(SETTLE_SECONDS)

    def _predict(
        self,
        known: Known,
        alone: Alone,
        policy: Callable[[], SchedulingPolicy],
        sent: Sequence[Sent],
        warm_ups: Sequence[EngineRequest],
    ) -> list[Predicted]:
        """At each of PACES; none: requests never end at one of them. policy: makes a new one."""
        heads = {head.model: head for head in warm_ups}
        asked = []
        for each in sent:
            assert each.call.slo_ms is not None, "requests have an objective"
            head = heads[each.workflow]
            spec = msgspec.structs.replace(head.spec, prompt=each.call.prompt)
            asked.append(
                Asked(msgspec.structs.replace(head, spec=spec), each.workflow, each.due, each.call.slo_ms / 1e3)
            )
        size = {"num_ranks": self.num_ranks, "model_bytes": self.model_bytes}
        try:
            return [predict(known, alone.measured, policy(), asked, warm_ups, **size, pace=pace) for pace in PACES]
        except AssertionError as error:
            print(f"no prediction: {error}")
            return []

    def _serve(
        self,
        recorded: RecordedServer,
        layout: Layout,
        alone: Alone,
        sent: Sequence[Sent],
        predicted: Sequence[Predicted],
    ) -> Served:
        before, started = read(recorded.path)[1][-1], time.monotonic()
        ended = asyncio.run(_send(recorded, layout, sent))
        seconds = time.monotonic() - started
        batches = [batch for batch in read(recorded.path)[1] if batch.started >= started]
        pictures = [(each, outcome) for each, outcome in ended if not outcome.is_failed]
        wrong = [1 for each, outcome in pictures if outcome.digest != alone.digests[each.workflow, each.call.seed]]
        busy = sum(batch.seconds for batch in batches)
        last = max(batches, key=lambda batch: batch.engine_cpu, default=before)
        shares = [each.share for each in predicted] or [math.nan]
        refused = Counter(str(each.refusal.status) if each.refusal else "0" for _, each in ended if each.is_failed)
        loads = [when for when, _, _ in loads_ended(read_loading(recorded.path)) if when >= started]
        return Served(
            in_time=sum(map(_is_in_time, (outcome for _, outcome in ended))) / len(sent),
            predicted=shares[0],
            predicted_range=(min(shares), max(shares)),
            num_requests=len(sent),
            num_wrong=len(wrong),
            num_pictures=len(pictures),
            ends=dict(refused),
            num_loads=len(loads),
            predicted_loads=predicted[0].num_loads if predicted else -1,
            coordinator=(last.engine_cpu - before.engine_cpu) / busy,
            busy=busy / (self.num_ranks * seconds),
        )


def _target(recorded: RecordedServer, layout: Layout, workflow: str) -> Target:
    return Target(recorded.server.url, workflow, extra=layout.workflows[workflow], sends_slo=True)


def _call(workflow: str, number: int, slo_seconds: float | None = None) -> EditCall:
    """No two have the same prompt: embedded prompts are kept."""
    slo_ms = None if slo_seconds is None else 1e3 * slo_seconds
    text = f"{number} {prompt(number)} {workflow}"
    return EditCall(text, STEPS[base_of(workflow)], number, None, None, None, slo_ms)


async def _send(recorded: RecordedServer, layout: Layout, sent: Sequence[Sent]) -> list[tuple[Sent, Outcome]]:
    """Each request with its outcome."""
    by_workflow = defaultdict[str, list[Sent]](list)
    for each in sent:
        by_workflow[each.workflow].append(each)
    runs = await asyncio.gather(
        *(
            send_on_time(_target(recorded, layout, name), [each.call for each in its], [each.due for each in its])
            for name, its in by_workflow.items()
        )
    )
    return [
        pair
        for its, run in zip(by_workflow.values(), runs, strict=True)
        for pair in zip(its, run.outcomes, strict=True)
    ]


def _is_in_time(outcome: Outcome) -> bool:
    return outcome.slo_ms is not None and outcome.latency * 1e3 <= outcome.slo_ms


def _work(run: LoneRun) -> float:
    return sum(run.run.latencies)


def _between_batches(run: LoneRun) -> Iterator[float]:
    """Of each request, the seconds from when its engine has it until its last batch ends that are in none of them."""
    batches = defaultdict[str, list[Batch]](list)
    for batch in run.batches:
        for name in batch.requests:
            batches[name].append(batch)
    for arrival in run.arrivals:
        mine = batches[arrival.request.request_id]
        yield max(each.ended for each in mine) - arrival.now - sum(each.seconds for each in mine)


# ---------------------------------------------------------------------------------------------------- systems


def _one_pool(bench: Bench, alone: Alone | None = None) -> list[Pool]:
    return [Pool(frozenset(bench.workflows), tuple(range(bench.num_ranks)))]


def _shepherd(bench: Bench, alone: Alone) -> list[Pool]:
    wholes = {
        name: Whole(bench.layouts[1].bytes_of(name), alone.latency[name], share) for name, share in bench.shares.items()
    }
    groups = merged(groups_that_fit(wholes, bench.model_bytes), wholes, bench.num_ranks)
    training = [(each.due, each.workflow) for each in bench.sent(Cell(0.5, 1000), alone)]
    return planned_pools(groups, wholes, bench.num_ranks, bench.slo_scale, training)


SYSTEMS = {
    OURS: System(OURS, is_separate=False),
    "Diffusers-C": System("Diffusers-C", is_separate=True, pools=_one_pool),
    "Diffusers-S": System("Diffusers-S", is_separate=True, pools=_shepherd),
    "pooled": System("pooled", is_separate=False, pools=_one_pool),
}
"""By name. pooled: a control that is in no paper: whole workflows, which share components."""
