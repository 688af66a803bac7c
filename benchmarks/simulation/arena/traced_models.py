"""The contests `models`: windows of a production trace with 87 models, on ranks that hold two models each."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from statistics import fmean

import msgspec

from benchmarks.simulation.arena import production_trace
from benchmarks.simulation.arena.contest import IN_TIME, MEAN, Contest, Values
from benchmarks.simulation.arena.production_trace import TracedRequest
from benchmarks.simulation.compared import FORMER, OURS
from benchmarks.simulation.machine import IMAGE_TOKENS
from benchmarks.simulation.model_engine import serve
from benchmarks.simulation.model_scenario import EIGHTY_SEVEN, ModelScenario
from benchmarks.simulation.scenario import edit_of
from core.messages.engine import EngineRequest

POLICIES = (OURS, *FORMER)

NUM_REQUESTS = 300
"""A run serves a window of so many requests, which name 16 to 37 models. Each request makes one picture."""

SCENARIO = replace(EIGHTY_SEVEN, name="gentd26", num_ranks=8, fits=2)

LOADS = (0.2, 0.4)
"""Shares of what the ranks can do if nothing has to be loaded: times are compressed to that."""


def contests() -> list[Contest]:
    return [Contest(f"87 models, load {load:g}", partial(_play, load), POLICIES, (MEAN, IN_TIME)) for load in LOADS]


def _play(load: float, policy: str, seed: int) -> Values:
    """Another seed is another window. A request is in time that takes at most `SCENARIO.slo_scale` times its time
    alone.
    """
    served = serve(SCENARIO, policy, seed, window(SCENARIO, load, seed))
    latencies = served.latencies.values()
    return {MEAN: fmean(latencies), IN_TIME: served.in_time / (len(latencies) + served.failures.total())}


@cache
def _trace() -> tuple[list[TracedRequest], dict[str, str]]:
    """The trace, and the name of each of its models in a ModelSet."""
    every = list(production_trace.read())
    names = sorted({request.model for request in every})
    return every, {name: str(index) for index, name in enumerate(names)}


def window(scenario: ModelScenario, load: float, seed: int) -> list[EngineRequest]:
    """So many requests of the trace, one after the other: seeds begin at even distances."""
    every, names = _trace()
    first = (2 * seed + 1) * len(every) // 32 % len(every)
    chosen = every[first:][:NUM_REQUESTS]
    work = sum(scenario.alone_seconds(_request(0, 0.0, each, names)) for each in chosen)
    span = chosen[-1].seconds - chosen[0].seconds
    pace = work / scenario.num_ranks / load / span
    arrivals = [(each.seconds - chosen[0].seconds) * pace for each in chosen]
    return [
        _request(index, arrival, each, names)
        for index, (arrival, each) in enumerate(zip(arrivals, chosen, strict=True))
    ]


def _request(index: int, arrival: float, traced: TracedRequest, names: dict[str, str]) -> EngineRequest:
    """An exact edit, which takes as long as a picture of a prompt."""
    edit = edit_of(index, arrival, IMAGE_TOKENS, traced.steps, 0)
    spec = msgspec.structs.replace(edit.spec, is_mask_aware=False)
    return msgspec.structs.replace(edit, model=names[traced.model], owner=traced.owner, spec=spec)
