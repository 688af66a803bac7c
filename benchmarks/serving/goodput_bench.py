"""Bench: the cells in which scheduling policies are compared, and a run of one on a server and in simulated time."""

from __future__ import annotations

import argparse
import asyncio
import base64
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from benchmarks.load.arrivals import due_times
from benchmarks.load.client import Target, send_on_time, warm_up
from benchmarks.load.dataset import EditCall, Mix, generations, synthetic
from benchmarks.load.lone import LoneLatency, measure_lone
from benchmarks.load.workload import available_cores
from benchmarks.serving.cell_outcomes import Outcomes, outcomes_of
from benchmarks.serving.lone_run import Probe, crowding_of
from benchmarks.serving.recorded import CLOCKWORK, FORMER_GOODPUT, read
from benchmarks.serving.recorded_server import SETTLE_SECONDS, RecordedServer, recorded_server
from benchmarks.simulation.compared import OURS
from benchmarks.simulation.outside import Crowding, Surroundings
from benchmarks.simulation.server_engine import Known, OpAtDegree, Simulated, serve, stretch_of
from core.config import ModelConfig
from core.messages.codec import MessageDecoder, encode
from core.messages.engine import EngineRequest


class Cell(msgspec.Struct, frozen=True):
    """One load."""

    load: float  # as a share of what the ranks would do one request at a time
    cv: float  # coefficient of variation of the times between arrivals
    slo: float  # objective, as a multiple of what a request takes alone

    @property
    def name(self) -> str:
        return f"load={self.load:g} cv={self.cv:g} slo={self.slo:g}"


CELLS = (
    *(Cell(0.8, 1, 1.5), Cell(0.8, 4, 1.5)),
    *(Cell(1.2, 1, 1.5), Cell(1.2, 4, 1.5), Cell(1.2, 1, 3), Cell(1.2, 4, 3)),
)
"""Two loads around capacity, steady and bursty, tight and loose objectives; without the two that any policy serves:
little load with a loose objective."""

POLICIES = {
    OURS: OURS,
    "former goodput": FORMER_GOODPUT,
    "clockwork": CLOCKWORK,
}
"""Name -> scheduling policy."""

PROBES = 8
"""Requests sent one by one before and after each run, always the same."""

PROBE_MS = 600_000.0
"""Their timeout."""

CROWD_LOAD, CROWD_REPEATS = 1.2, 3
"""Of the requests that tell what it costs that all ranks have work: their load, and how often each is sent."""


class Alone(msgspec.Struct, frozen=True):
    """What requests take that have the server alone."""

    lone: tuple[float, float]  # of LoneLatency: seconds, and seconds per step
    probe: Probe  # with the first PROBES of them
    warm_ups: list[str]  # messages to the engine, as base64: of the requests that warm the cache
    requests: list[str]  # likewise, of the calls in their order

    @property
    def latency(self) -> LoneLatency:
        return LoneLatency(*self.lone)


class Results(msgspec.Struct):
    """The file."""

    settings: dict[str, Any]
    alone: Alone | None = None
    crowding: list[Crowding] = []  # by round
    measured: dict[str, dict[str, list[Outcomes]]] = {}  # cell -> policy -> by round

    @property
    def mean_crowding(self) -> Crowding:
        """Over the rounds: that of one differs from the next one's by as much as what is to be predicted."""
        steps, wait = ([getattr(each, name) for each in self.crowding] for name in ("steps", "wait"))
        return Crowding(statistics.fmean(steps), statistics.fmean(wait))


_DECODER: MessageDecoder[EngineRequest] = MessageDecoder(EngineRequest)


@dataclass(frozen=True)
class Bench:
    """The workload, and the server that it is sent to."""

    args: argparse.Namespace

    @cached_property
    def calls(self) -> list[EditCall]:
        """The requests of every cell."""
        args, random = self.args, np.random.default_rng(self.args.seed)
        mix = Mix(
            args.mask_ratio_dist,
            f"fixed:{args.num_templates}",
            num_inference_steps=args.num_inference_steps,
            sizes=args.sizes,
        )
        make = synthetic if args.workload == "edits" else generations
        return make(mix, args.num_prompts, random)

    @property
    def probes(self) -> list[EditCall]:
        """The requests that tell how fast the machine is. All have a timeout, which does not matter."""
        return [replace(call, slo_ms=PROBE_MS) for call in self.calls[:PROBES]]

    @property
    def warm_ups(self) -> list[EditCall]:
        """One edit of each template, twice; and as many generations."""
        return 2 * self.calls[: self.args.num_templates]

    def due(self, cell: Cell, alone: Alone, number_of_round: int) -> list[float]:
        """When requests are due. Every round has others."""
        mean = statistics.fmean(alone.latency.of(call.steps) for call in self.calls)
        rate, number = cell.load * self.args.workers_per_engine / mean, len(self.calls)
        random = np.random.default_rng([self.args.seed, round(1e3 * cell.cv), number_of_round])
        return _arrivals(number, rate, cell.cv, random)

    @contextmanager
    def server(self, policy: str, *more: str) -> Iterator[tuple[Target, RecordedServer]]:
        """A server with this policy of POLICIES, warm. more: flags."""
        args = self.args
        flags = ["--model", args.model, "--dtype", args.dtype, "--threads", "1", *more]
        flags += ["--workers-per-engine", str(args.workers_per_engine)]
        with recorded_server(flags, POLICIES[policy]) as recorded:
            target = Target(recorded.server.url, extra=args.extra_body, sends_slo=True)
            asyncio.run(self._warm(target))
            yield target, recorded

    async def _warm(self, target: Target) -> None:
        await warm_up(target, self.warm_ups, 1)
        await asyncio.sleep(SETTLE_SECONDS)

    # ------------------------------------------------------------------------------------------------ alone

    def measure_alone(self) -> Alone:
        """Send requests one by one: all edits, since each has its own mask, and the first generations."""
        calls = self.calls if self.args.workload == "edits" else self.calls[:PROBES]
        with self.server(OURS) as (target, recorded):
            lone = asyncio.run(measure_lone(target, self.calls, [call.steps for call in self.calls]))
            probe = recorded.send_one_by_one(target, self.probes).probe
            heads = [arrival.head for arrival in recorded.send_one_by_one(target, calls).arrivals]
            warm_ups = read(recorded.path)[0][: len(self.warm_ups)]
        if len(heads) < len(self.calls):
            heads = [_with_steps(heads[0], call.steps) for call in self.calls]
        return Alone(
            lone=(lone.seconds, lone.per_step),
            probe=probe,
            warm_ups=[arrival.head for arrival in warm_ups],
            requests=heads,
        )

    def measure_crowding(self, number_of_round: int) -> Crowding:
        """Send the first requests one by one, then some times in an open loop, to ranks that make one at a time."""
        calls, num_ranks = self.calls[: 2 * PROBES], self.args.workers_per_engine
        with self.server("clockwork", "--max-num-seqs", "1") as (target, recorded):
            alone = recorded.send_one_by_one(target, calls)
            rate = CROWD_LOAD * num_ranks / statistics.fmean(alone.run.latencies)
            random = np.random.default_rng([self.args.seed, number_of_round])
            due = _arrivals(CROWD_REPEATS * len(calls), rate, 1.0, random)
            together = recorded.send_on_time(target, CROWD_REPEATS * calls, due)
        return crowding_of(alone, together, num_ranks)

    # ------------------------------------------------------------------------------------------------ a cell

    def measure(
        self, cell: Cell, policy: str, alone: Alone, number_of_round: int, pace: float | None = None
    ) -> Outcomes:
        """pace: see Outcomes; None: as steps are now."""
        with self.server(policy) as (target, recorded):
            first = recorded.send_one_by_one(target, self.probes).probe
            pace = pace or first.step_seconds / alone.probe.step_seconds
            load = self._load(cell, alone, pace, number_of_round)
            before = recorded.since(0.0)[1][-1]
            run = asyncio.run(send_on_time(target, *load))
            batches = recorded.since(run.started)[1]
            last = recorded.send_one_by_one(target, self.probes).probe
        return msgspec.structs.replace(outcomes_of(run, before, batches, pace), probes=(first, last))

    def _load(self, cell: Cell, alone: Alone, pace: float, number_of_round: int) -> tuple[list[EditCall], list[float]]:
        """The requests with their objectives, and when they are due."""
        due = self.due(cell, alone, number_of_round)
        return alone.latency.scaled(self.calls, cell.slo * pace), [when * pace for when in due]

    def predict(self, cell: Cell, policy: str, results: Results, of: Outcomes, number_of_round: int) -> Simulated:
        """of: a run of these results."""
        alone = results.alone
        assert alone is not None
        calls, due = self._load(cell, alone, of.pace, number_of_round)
        until = [when + (call.slo_ms or 0.0) / 1e3 for when, call in zip(due, calls, strict=True)]
        requests = [
            msgspec.structs.replace(_decode(head), request_id=str(index), arrival=when, deadline=end)
            for index, (head, when, end) in enumerate(zip(alone.requests, due, until, strict=True))
        ]
        around = replace(_mean([probe.surroundings for probe in of.probes]), crowding=results.mean_crowding)
        return serve(
            self.known,
            around,
            POLICIES[policy],
            requests,
            list(map(_decode, alone.warm_ups)),
            num_ranks=self.args.workers_per_engine,
            num_cores=available_cores(),
            own={str(index): replace(around, send=late) for index, late in enumerate(of.sending)},
            stretch=self.stretch(alone, of.probes),
        )

    def stretch(self, alone: Alone, probes: Sequence[Probe]) -> dict[OpAtDegree, float]:
        """See `stretch_of`."""
        requests, warm_ups = list(map(_decode, alone.requests[:PROBES])), list(map(_decode, alone.warm_ups))
        seconds = {(op, 1): statistics.fmean(probe.op_seconds[op] for probe in probes) for op in alone.probe.op_seconds}
        return stretch_of(self.known, seconds, requests, warm_ups, num_ranks=self.args.workers_per_engine)

    @cached_property
    def known(self) -> Known:
        return Known.of_new_process(ModelConfig(model=self.args.model, dtype=self.args.dtype, threads=1))


def _arrivals(number: int, rate: float, cv: float, random: np.random.Generator) -> list[float]:
    """Gamma arrivals, stretched so that the last comes when the rate says."""
    times = due_times("poisson", number, rate, cv**-2, random)
    return [time * number / rate / times[-1] for time in times]


def _decode(head: str) -> EngineRequest:
    return _DECODER.decode(base64.b64decode(head))


def _mean(every: Sequence[Surroundings]) -> Surroundings:
    """What the server does not know of a delivery can be told before a run only: it learns from the last ones."""
    return Surroundings(
        prepare=statistics.fmean(each.prepare for each in every),
        deliver=statistics.fmean(each.deliver for each in every),
        trip=statistics.fmean(each.trip for each in every),
        pause=statistics.fmean(each.pause for each in every),
        outside_cpu=statistics.fmean(each.outside_cpu for each in every),
        arrive=statistics.fmean(each.arrive for each in every),
        hand_over=every[0].hand_over,
    )


def _with_steps(head: str, steps: int) -> str:
    request = _decode(head)
    sampling = msgspec.structs.replace(request.picture.sampling, num_inference_steps=steps)
    spec = msgspec.structs.replace(request.spec, sampling=sampling)
    return base64.b64encode(encode(msgspec.structs.replace(request, spec=spec, rounds=(steps,)))).decode()
