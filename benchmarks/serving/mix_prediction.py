"""Predictions of a mix of edits on one engine: the same requests in simulated time, with latencies of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import msgspec

from benchmarks.load.client import Run
from benchmarks.load.workload import available_cores
from benchmarks.serving.cell_outcomes import means_by_op
from benchmarks.serving.recorded import Arrival
from benchmarks.serving.recorded_server import Lone
from benchmarks.simulation.server_engine import Known, Surroundings, serve, stretch_of
from core.messages.engine import EngineRequest


class OneEngine(NamedTuple):
    """A system that can be predicted. degree: of its steps, if the policy does not choose it."""

    policy: str
    num_ranks: int
    degree: int = 1


@dataclass(frozen=True)
class Alone:
    """What edits take that have one rank alone, by kind; what it prepared them with."""

    by_kind: Mapping[str, Lone]
    warm_ups: Sequence[EngineRequest]

    @property
    def surroundings(self) -> dict[str, Surroundings]:
        """By kind. What lies between two batches depends on none, and is the mean."""
        trip = fmean(lone.surroundings.trip for lone in self.by_kind.values())
        return {kind: replace(lone.surroundings, trip=trip) for kind, lone in self.by_kind.items()}

    def stretch(self, known: Known) -> dict[str, float]:
        """See `stretch_of`; of all kinds together."""
        batches = [batch for lone in self.by_kind.values() for batch in lone.batches]
        requests = [arrival.request for lone in self.by_kind.values() for arrival in lone.arrivals]
        seconds = means_by_op(batches, lambda batch: batch.seconds)
        return stretch_of(known, seconds, requests, self.warm_ups, num_ranks=1)


def by_seed(run: Run, arrivals: Sequence[Arrival]) -> tuple[list[EngineRequest], list[EngineRequest]]:
    """(warm-ups, requests of a run) of an engine's records. The seeds of the run's edits are their numbers, by which
    they are ordered: on their way to the engine small ones overtake large ones.
    """
    warm_ups = [arrival.request for arrival in arrivals if arrival.now < run.started]
    requests = [arrival.request for arrival in arrivals if arrival.now >= run.started]
    requests.sort(key=lambda request: request.spec.sampling.seed)
    assert [request.spec.sampling.seed for request in requests] == list(range(len(run.outcomes)))
    return warm_ups, requests


def predict(
    known: Known,
    alone: Alone,
    system: OneEngine,
    warm_ups: Sequence[EngineRequest],
    requests: Sequence[EngineRequest],
    kinds: Sequence[str],
    due: Sequence[float],
    stretch: Mapping[str, float],
) -> list[float]:
    """Seconds of each request from when it is due. kinds, due: of each, `due` in seconds after the start. The templates
    of masked requests must be among those of the warm-ups: their pages count as being there.
    """
    warm = {request.spec.content_id for request in warm_ups if request.spec.is_mask_aware}
    assert all(request.spec.content_id in warm for request in requests if request.spec.is_mask_aware), "cold templates"
    named = [
        msgspec.structs.replace(request, request_id=str(index), arrival=when)
        for index, (request, when) in enumerate(zip(requests, due, strict=True))
    ]
    surroundings = alone.surroundings
    served = serve(
        known,
        next(iter(surroundings.values())),
        system.policy,
        named,
        warm_ups,
        num_ranks=system.num_ranks,
        has_spare_cores=available_cores() > system.num_ranks,
        degree=system.degree,
        own={str(index): surroundings[kind] for index, kind in enumerate(kinds)},
        stretch=stretch,
    )
    return [served.latencies[request.request_id] for request in named]
