"""Predictions of a mix of edits: the requests of a run once more in simulated time, with latencies of this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import msgspec

from benchmarks.load.client import Run
from benchmarks.load.workload import available_cores
from benchmarks.serving.cell_outcomes import seconds_by_op
from benchmarks.serving.lone_run import LoneRun
from benchmarks.serving.recorded import Arrival
from benchmarks.simulation.outside import Surroundings
from benchmarks.simulation.server_engine import Known, OpAtDegree, serve, stretch_of
from core.messages.engine import EngineRequest


class System(NamedTuple):
    """Engines behind a router, all alike. degree: of steps, if the policy does not choose it."""

    policy: str
    num_engines: int
    ranks_per_engine: int
    degree: int = 1

    @property
    def flags(self) -> list[str]:
        """Of its server, without the policy's."""
        flags = {"--data-parallel-size": self.num_engines, "--workers-per-engine": self.ranks_per_engine}
        return [str(word) for flag in (flags | {"--degree": self.degree}).items() for word in flag]

    @property
    def num_cores(self) -> float:
        """Of each engine."""
        return available_cores() / self.num_engines


@dataclass(frozen=True)
class Alone:
    """What edits take, by kind, that have a server alone whose ranks compute all steps together; what prepared it."""

    degree: int
    by_kind: Mapping[str, LoneRun]
    warm_ups: Sequence[EngineRequest]

    @property
    def surroundings(self) -> dict[str, Surroundings]:
        """By kind. What lies between two batches depends on none, and is the mean."""
        trip = fmean(lone.surroundings.trip for lone in self.by_kind.values())
        return {kind: replace(lone.surroundings, trip=trip) for kind, lone in self.by_kind.items()}

    def stretch(self, known: Known) -> dict[OpAtDegree, float]:
        """See `stretch_of`; of all kinds together, and so with the weight of large ones."""
        batches = [batch for lone in self.by_kind.values() for batch in lone.batches]
        requests = [arrival.request for lone in self.by_kind.values() for arrival in lone.arrivals]
        seconds = seconds_by_op(batches)
        return stretch_of(known, seconds, requests, self.warm_ups, num_ranks=self.degree, degree=self.degree)


@dataclass(frozen=True)
class Round:
    """Edits as they have reached the engines of a system. kinds, due: of each edit; due in seconds after the start."""

    warm_ups: list[Arrival]
    arrivals: list[Arrival]  # in the order of the edits
    kinds: Sequence[str]
    due: Sequence[float]

    @classmethod
    def of(cls, run: Run, arrivals: Sequence[Arrival], kinds: Sequence[str], due: Sequence[float]) -> Round:
        """arrivals: all since the server's start. The seeds of the run's edits are their numbers, by which they are
        ordered: on their way to an engine small ones overtake large ones.
        """
        warm_ups = [arrival for arrival in arrivals if arrival.now < run.started]
        of_run = [arrival for arrival in arrivals if arrival.now >= run.started]
        of_run.sort(key=_seed)
        assert list(map(_seed, of_run)) == list(range(len(run.outcomes)))
        return cls(warm_ups, of_run, kinds, due)


class Prediction(NamedTuple):
    """latencies: of each edit, from when it is due. num_steps: degree -> denoising steps of edits. worker_seconds: of
    all ranks.
    """

    latencies: list[float]
    num_steps: Mapping[int, int]
    worker_seconds: float


def predict(
    known: Known, alone: Alone, system: System, edits: Round, stretch: Mapping[OpAtDegree, float]
) -> Prediction:
    """Each engine has the edits that it was given by the router of the run: routing is not predicted. Pages of
    templates count as being there. stretch: of `Alone.stretch`.
    """
    surroundings = alone.surroundings
    latencies, num_steps, worker_seconds = dict[str, float](), Counter[int](), 0.0
    for engine in {arrival.engine for arrival in edits.arrivals}:
        numbers = [number for number, arrival in enumerate(edits.arrivals) if arrival.engine == engine]
        requests = [
            msgspec.structs.replace(edits.arrivals[number].request, request_id=str(number), arrival=edits.due[number])
            for number in numbers
        ]
        served = serve(
            known,
            next(iter(surroundings.values())),
            system.policy,
            requests,
            [arrival.request for arrival in edits.warm_ups if arrival.engine == engine],
            num_ranks=system.ranks_per_engine,
            num_cores=system.num_cores,
            degree=system.degree,
            own={str(number): surroundings[edits.kinds[number]] for number in numbers},
            stretch=stretch,
        )
        latencies |= served.latencies
        num_steps += served.num_steps
        worker_seconds += served.busy_seconds
    return Prediction([latencies[str(number)] for number in range(len(edits.arrivals))], num_steps, worker_seconds)


def _seed(arrival: Arrival) -> int:
    seed = arrival.request.picture.sampling.seed
    assert seed is not None, "edits of the mix have seeds"
    return seed
