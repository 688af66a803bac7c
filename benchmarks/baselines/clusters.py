"""Clusters: ranks in clusters, each with a fixed degree: the baselines of DDiT (section 6.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.baselines.former.group_pass import GroupPass
from core.graph.workflow import Node
from core.scheduling.dispatch import Decision
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.request import Request
from core.scheduling.view import View

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Cluster:
    """Ranks of which every `degree` free ones serve a request, from its start to its end."""

    ranks: Ranks
    degree: int


@dataclass(slots=True)
class WholePass(GroupPass):
    """Decoding takes all ranks of the group, too."""

    def _ranks(self, request: Request, node: Node) -> Ranks:
        return self.groups[request.id]


class Clusters(SchedulingPolicy):
    """First come, first served in each cluster.

    homes: tokens of a request -> indices of the clusters that may serve it; it takes the first one with room.
    decouples: decoding takes one rank alone, the others are free.
    """

    def __init__(self, clusters: Sequence[Cluster], homes: Mapping[int, Sequence[int]], *, decouples: bool) -> None:
        self._clusters, self._homes, self._decouples = clusters, homes, decouples
        self._free = [list(cluster.ranks) for cluster in clusters]
        self._groups: dict[str, Ranks] = {}
        self._cluster: dict[str, int] = {}  # request id -> index of its cluster

    def on_end(self, request_id: str) -> None:
        self._give(request_id, self._groups.pop(request_id))
        del self._cluster[request_id]

    def _give(self, request_id: str, ranks: Ranks) -> None:
        free = self._free[self._cluster[request_id]]
        free += ranks
        free.sort()

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        for request in view.requests.running if self._decouples else ():
            ranks = self._groups[request.id]
            if len(ranks) > 1 and not request.progress.steps_left and not request.progress.num_in_flight:
                self._groups[request.id] = ranks[:1]
                self._give(request.id, ranks[1:])
        if any(self._has_room(index) for index in range(len(self._clusters))):
            self._start(view)
        admitted = [view.requests[name] for name in self._groups]
        pass_type = GroupPass if self._decouples else WholePass
        return pass_type(view, groups=self._groups, admitted=admitted).run()

    def _start(self, view: View) -> None:
        for request in view.requests.live():
            if request.id not in self._groups:
                homes = self._homes[request.spec.canvas("").num_tokens]
                index = next((index for index in homes if self._has_room(index)), None)
                if index is not None:
                    degree = self._clusters[index].degree
                    self._groups[request.id] = tuple(self._free[index][:degree])
                    self._cluster[request.id] = index
                    del self._free[index][:degree]

    def _has_room(self, index: int) -> bool:
        return len(self._free[index]) >= self._clusters[index].degree


# ------------------------------------------------------------------------------------------------ the baselines


def static(num_ranks: int, degree: int, sizes: Sequence[int], *, decouples: bool = False) -> Clusters:
    """SDoP: one cluster. sizes: tokens of the classes of requests, the smallest first."""
    return Clusters([Cluster(tuple(range(num_ranks)), degree)], dict.fromkeys(sizes, (0,)), decouples=decouples)


def isolated(num_ranks: int, degree: int, sizes: Sequence[int], shares: Sequence[float]) -> Clusters:
    """SPCI: a cluster per class, all of one degree, with groups in proportion to the share of its requests. Where there
    are fewer groups than classes the degree is halved.
    """
    while num_ranks // degree < len(sizes):
        degree //= 2
    numbers = _apportioned(num_ranks // degree, shares)
    clusters = _clusters([(number, degree) for number in numbers])
    return Clusters(clusters, {size: (index,) for index, size in enumerate(sizes)}, decouples=False)


def by_class(num_ranks: int, degrees: Sequence[int], sizes: Sequence[int], *, is_isolated: bool) -> Clusters:
    """DPCI: a cluster per class with its useful degree, all with equally many groups. DP, if it is not isolated: a
    request whose own cluster is full goes to another one, to the next lower degree first.
    """
    clusters = _clusters([(num_ranks // sum(degrees), degree) for degree in degrees])
    homes = {size: (index,) if is_isolated else _nearest(index, degrees) for index, size in enumerate(sizes)}
    return Clusters(clusters, homes, decouples=False)


def _nearest(own: int, degrees: Sequence[int]) -> Sequence[int]:
    return sorted(range(len(degrees)), key=lambda index: (degrees[index] > degrees[own], abs(index - own)))


def _clusters(groups: Sequence[tuple[int, int]]) -> list[Cluster]:
    """groups: (number, degree) of each cluster."""
    clusters, first = list[Cluster](), 0
    for number, degree in groups:
        clusters.append(Cluster(tuple(range(first, first + number * degree)), degree))
        first += number * degree
    return clusters


def _apportioned(number: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers, each at least 1, in proportion to shares: the largest remainders round up."""
    exact = [share / sum(shares) * number for share in shares]
    given = [max(1, int(each)) for each in exact]
    while sum(given) < number:
        given[max(range(len(given)), key=lambda index: exact[index] - given[index])] += 1
    while sum(given) > number:
        given[given.index(max(given))] -= 1
    return given
