"""The contests `troubles`: `default` may fall behind the best former policy in the same trouble by a tenth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from benchmarks.simulation.arena.bar import Bar
from benchmarks.simulation.arena.contest import IN_TIME, MEAN, Contest, Play, Values
from benchmarks.simulation.arena.degree_machine import DegreeMachine
from benchmarks.simulation.arena.one_engine import OneEngine
from benchmarks.simulation.arena.perturbed import Perturbed
from benchmarks.simulation.arena.picture_load import PictureLoad, in_time_and_mean
from benchmarks.simulation.arena.tournament import Played
from benchmarks.simulation.arena.verdict import against
from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.compared import FORMER, OURS, make
from benchmarks.simulation.durations import Durations
from benchmarks.simulation.scenario import MIX
from core.config import CacheConfig

POLICIES = (OURS, *FORMER)

BEHIND = 0.1
"""Share by which `default` may fall behind."""

MACHINES: Mapping[str, tuple[float, Durations]] = {
    "all takes twice as long": (0.4, Perturbed(DegreeMachine(), others=2.0)),
    "all takes half as long": (1.6, Perturbed(DegreeMachine(), others=0.5)),
    "steps take twice as long": (0.4, Perturbed(DegreeMachine(), {"denoise": 2.0})),
    "steps take half as long": (1.6, Perturbed(DegreeMachine(), {"denoise": 0.5})),
    "decodes take twice as long": (0.8, Perturbed(DegreeMachine(), {"decode": 2.0})),
    "decodes take half as long": (0.8, Perturbed(DegreeMachine(), {"decode": 0.5})),
    "one rank of four at half speed": (0.7, Perturbed(DegreeMachine(), ranks={1: 2.0})),
}
"""Trouble -> (load in terms of the profile, what the machine really does). Really the load is about 0.8 everywhere."""

GREEDY = (0.8, 0.05, 0.05, 0.05, 0.05)
"""Shares of the requests by owner."""


def bars(played: Sequence[Played]) -> Iterator[Bar]:
    """For each contest: how many former policies are not ahead of ours. One is ahead if it is better by one metric and
    not worse by the others.
    """
    for each in played:
        former = [name for name in each.contest.former if name in each.results]
        if OURS in each.results and former:
            number = sum(not _is_ahead(name, each) for name in former)
            yield Bar(f"{each.contest.name}: former policies that are not ahead of ours", number, len(former))


def _is_ahead(former: str, played: Played) -> bool:
    words = [against(former, played.contest, metric, played.results).word for metric in played.contest.metrics]
    return "WORSE" in words and "better" not in words


def contests() -> list[Contest]:
    plays: dict[str, Play] = {name: partial(_play_machine, name) for name in MACHINES}
    plays |= {"bursts": _play_bursts, "an owner sends four of five requests": _play_greedy}
    found = [Contest(name, play, POLICIES, (IN_TIME, MEAN), share=BEHIND) for name, play in plays.items()]
    return [*found, Contest("cold caches", _play_cold, POLICIES, (MEAN,), share=BEHIND)]


def _play_machine(name: str, policy: str, seed: int) -> Values:
    load, machine = MACHINES[name]
    return _play_pictures(PictureLoad(load), machine, policy, seed)


def _play_bursts(policy: str, seed: int) -> Values:
    return _play_pictures(PictureLoad(0.8, burstiness=0.25), None, policy, seed)


def _play_pictures(load: PictureLoad, true: Durations | None, policy: str, seed: int) -> Values:
    requests = load.requests(seed)
    return in_time_and_mean(requests, OneEngine(load.num_ranks, true=true).serve(make(policy), requests))


def _play_greedy(policy: str, seed: int) -> Values:
    """What the other owners get while one sends four of five requests."""
    load = PictureLoad(1.1, number=120, owners=GREEDY)
    requests = load.requests(seed)
    latencies = OneEngine(load.num_ranks).serve(make(policy), requests)
    return in_time_and_mean([each for each in requests if each.owner != "owner 0"], latencies)


def _play_cold(policy: str, seed: int) -> Values:
    """Templates come and go in the memory of two ranks, and nothing is primed."""
    cache = CacheConfig(device_bytes=22 * 10**9, host_bytes=66 * 10**9)
    scenario = replace(
        MIX, num_engines=1, num_ranks=2, load=0.35, num_edits=120, num_warm_up=0, num_templates=40, cache=cache
    )
    return {MEAN: fmean(Cluster(scenario, "mask-aware", seed, scheduling=partial(make, policy)).run().latencies)}
