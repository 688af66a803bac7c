"""The contests `one rank`: one model without objectives, of one owner and of several with unequal loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

from benchmarks.simulation.arena.contest import MEAN, Contest, Metric, Values
from benchmarks.simulation.arena.one_engine import OneEngine
from benchmarks.simulation.arena.picture_load import PictureLoad
from benchmarks.simulation.compared import FORMER, OURS, make
from core.messages.engine import EngineRequest

POLICIES = (OURS, *FORMER)

OVERTAKING = Metric("most overtaken", is_judged=False)
"""A request is overtaken by requests of other owners (with one owner: by any) that came after it and were done before
it. The figure is the seconds that these take alone, of the request that is overtaken most.
"""

OWNERS: Mapping[str, tuple[float, ...]] = {"one owner": (1.0,), "four owners": (0.55, 0.25, 0.15, 0.05)}
KINDS: Mapping[str, tuple[float, float, float]] = {"edits": (1.0, 0.0, 0.0), "edits and pictures": (0.7, 0.3, 0.0)}
LOADS = (0.7, 1.2)


def contests() -> list[Contest]:
    return [
        Contest(f"load {load:g}, {kinds}, {owners}", partial(_play, load, kinds, owners), POLICIES, (MEAN, OVERTAKING))
        for load in LOADS
        for kinds in KINDS
        for owners in OWNERS
    ]


def _play(load: float, kinds: str, owners: str, policy: str, seed: int) -> Values:
    pictures = PictureLoad(load, 1, shares=KINDS[kinds], aimed=0.0, owners=OWNERS[owners])
    requests = pictures.requests(seed)
    latencies = OneEngine(pictures.num_ranks, max_num_seqs=8).serve(make(policy), requests)
    return {MEAN: fmean(latencies.values()), OVERTAKING: most_overtaken(pictures, requests, latencies)}


def most_overtaken(pictures: PictureLoad, requests: Sequence[EngineRequest], latencies: Mapping[str, float]) -> float:
    """See OVERTAKING. latencies: by request id, of all requests."""
    alone = {each.request_id: pictures.alone_seconds_of(each) for each in requests}
    ends = {each.request_id: each.arrival + latencies[each.request_id] for each in requests}
    has_others = len({each.owner for each in requests}) > 1
    most = 0.0
    for index, one in enumerate(requests):
        later = (each for each in requests[index + 1 :] if not has_others or each.owner != one.owner)
        most = max(most, sum(alone[each.request_id] for each in later if ends[each.request_id] < ends[one.request_id]))
    return most
