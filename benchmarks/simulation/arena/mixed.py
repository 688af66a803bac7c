"""The contests `mixed`: masked edits, middle and large pictures on four ranks, a third of them under objectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.simulation.arena.bar import Bar
from benchmarks.simulation.arena.contest import IN_TIME, MEAN, Contest, Values
from benchmarks.simulation.arena.one_engine import OneEngine
from benchmarks.simulation.arena.picture_load import PictureLoad, in_time_and_mean
from benchmarks.simulation.arena.tournament import Played
from benchmarks.simulation.arena.verdict import against
from benchmarks.simulation.compared import FORMER, OURS, make

FIXED = {"degree 2": 2, "degree 4": 4}
"""Name -> degree of all steps, with the policy `former step_batching`."""

POLICIES = (OURS, *FORMER, "ddit", *FIXED)

LOADS = (0.5, 0.8, 1.1)
ARRIVALS = {"Poisson": 1.0, "bursts": 0.5}
"""Name -> burstiness."""


def contests() -> list[Contest]:
    return [
        Contest(f"load {load:g}, {name}", partial(_play, load, burstiness), POLICIES, (IN_TIME, MEAN))
        for load in LOADS
        for name, burstiness in ARRIVALS.items()
    ]


def _play(load: float, burstiness: float, policy: str, seed: int) -> Values:
    pictures = PictureLoad(load, burstiness=burstiness)
    requests = pictures.requests(seed)
    made = make("former step_batching" if policy in FIXED else policy)
    engine = OneEngine(pictures.num_ranks, degree=FIXED.get(policy, 1))
    return in_time_and_mean(requests, engine.serve(made, requests))


def bars(played: Sequence[Played]) -> Iterator[Bar]:
    """For each contest: how many former policies ours beats, which is to be better by one metric and not worse by the
    other.
    """
    for each in played:
        former = [name for name in each.contest.former if name in each.results]
        if OURS in each.results and former:
            yield Bar(f"{each.contest.name}: former policies that ours beats", _num_beaten(each, former), len(former))


def _num_beaten(played: Played, former: Sequence[str]) -> int:
    number = 0
    for name in former:
        words = [against(name, played.contest, metric, played.results).word for metric in played.contest.metrics]
        number += "better" in words and "WORSE" not in words
    return number
