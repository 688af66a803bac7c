"""Whole workflows as units, as LegoDiffusion compares with them (section 7.1): Diffusers, Diffusers-C and Diffusers-S.

A request runs on one rank from its first op to its last, alone. Each served model has a pool of ranks. A new request
gets the rank of its pool that is predicted to end it first, after those that came before it, and is rejected if that is
late. A rank that lacks what the request needs loads it first, in the place of what it used least recently.

- Diffusers: a pool for each workflow, which has nothing else to load (`equal_pools`, `planned_pools`).
- Diffusers-S, after Shepherd: a pool for each group of workflows that fit on a rank together (`groups_that_fit`); with
  fewer ranks than such groups, of several groups, between which its ranks swap (`merged`).
- Diffusers-C, after Clockwork: one pool; ranks swap whole workflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from typing import NamedTuple

from core.handles import ModelKey
from core.messages.worker import Batch, BatchResult, Load
from core.scheduling.dispatch import AskAgain, Decision, Dispatch, GiveUp, Loads
from core.scheduling.model_demand import ModelDemand
from core.scheduling.policies.papers.lego import least_recent
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.ranks.residency import Residency, keys_of
from core.scheduling.requests.deadlines import MISSED, why_late
from core.scheduling.requests.request import Request
from core.scheduling.view import View


class Pool(NamedTuple):
    """Ranks that serve some models."""

    models: frozenset[str]
    ranks: tuple[int, ...]


@dataclass(slots=True)
class _Job:
    """A request in a rank's line."""

    request: Request
    keys: tuple[ModelKey, ...]
    seconds: float  # predicted, of what is left of it
    load_seconds: float  # predicted, of what is to be loaded for it
    is_ordered: bool = False  # what its rank lacks


@dataclass(slots=True)
class _Line:
    """What a rank has to do."""

    jobs: list[_Job] = field(default_factory=list)  # that have not ended; the first one runs
    free_at: float = 0.0  # predicted, when it has done all of them
    there: list[ModelKey] = field(default_factory=list)  # what it has by then, used least recently first


class Monoliths(SchedulingPolicy):
    """Keeps the line of each rank. Where a workflow has several nodes, its rank runs them one after the other."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._ranks = {model: pool.ranks for pool in pools for model in pool.models}
        self._lines = {rank: _Line() for pool in pools for rank in pool.ranks}
        self._residency: Residency | None = None  # None: all ranks have everything
        self._new: list[Request] = []
        self._rejected: dict[str, GiveUp] = {}  # by request id, those that have not ended

    def on_arrival(self, request: Request) -> None:
        self._new.append(request)

    def on_end(self, request_id: str) -> None:
        self._rejected.pop(request_id, None)

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        line = self._lines[batch.ranks[0]]
        for job in line.jobs[:1]:
            job.seconds, job.load_seconds = max(0.0, job.seconds - result.seconds), 0.0
        ended = result.started + result.seconds
        line.free_at = ended + sum(job.seconds + job.load_seconds for job in line.jobs)

    # ------------------------------------------------------------------------------------------------ loads

    def loads(self, demand: ModelDemand, now: float) -> Loads:
        """What the first jobs need whose ranks have nothing else to do."""
        if self._residency is None:
            self._residency = demand.residency
            for rank, line in self._lines.items():
                line.there = [loaded.key for loaded in demand.residency.components(rank)]
        orders = [order for rank, line in self._lines.items() for order in self._orders(demand.residency, rank, line)]
        return Loads(tuple(orders), None, again=now)

    @staticmethod
    def _orders(residency: Residency, rank: int, line: _Line) -> Iterator[Load]:
        for job in line.jobs[:1]:
            if job.is_ordered and (lacking := residency.lacking(job.keys, (rank,))):
                drop = least_recent(residency, (rank,), lacking, keep=job.keys)
                if drop is not None:
                    yield Load((rank,), tuple(lacking), tuple(drop))

    # ------------------------------------------------------------------------------------------------ passes

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        for request in self._new:
            self._judge(view, request, now)
        self._new.clear()
        return [*self._rejected.values(), *self._next(view)]

    def _judge(self, view: View, request: Request, now: float) -> None:
        """Give a new request a rank, or reject it."""
        keys, seconds = tuple(keys_of(request.needs)), view.work_left(request).alone
        ranks = self._ranks.get(request.head.model, ())
        loads = {rank: self._load_seconds(rank, keys) for rank in ranks}
        ends = {rank: max(now, self._lines[rank].free_at) + loads[rank] + seconds for rank in ranks}
        rank = min(ends, key=lambda rank: (ends[rank], rank), default=None)
        late = MISSED if rank is None else why_late(request.head, ends[rank])
        if rank is None or late is not None:
            self._rejected[request.id] = GiveUp(request, late or MISSED)
            return
        line = self._lines[rank]
        line.jobs.append(_Job(request, keys, seconds, loads[rank]))
        line.free_at = ends[rank]
        self._use(line, keys)

    def _load_seconds(self, rank: int, keys: Sequence[ModelKey]) -> float:
        """Predicted, of what a rank has not by the time when it begins a new request with these components."""
        there = self._lines[rank].there
        return sum(self._residency.load_seconds(key) for key in keys if key not in there) if self._residency else 0.0

    def _use(self, line: _Line, keys: Sequence[ModelKey]) -> None:
        residency, others = self._residency, [key for key in line.there if key not in keys]
        while residency and others and residency.excess(keys, {*others}) > 0:
            others.pop(0)
        line.there = [*others, *keys]

    def _next(self, view: View) -> Iterator[Decision]:
        """What can run of the first job of each rank."""
        asks = False
        for rank, line in self._lines.items():
            while line.jobs and not line.jobs[0].request.is_live:
                line.jobs.pop(0)
            if not line.jobs or rank not in view.open_ranks:
                continue
            job, alone = line.jobs[0], (rank,)
            nodes = view.ready(job.request)
            for node in nodes:
                if view.can_run(job.request, node, alone):
                    yield Dispatch(((job.request, node),), alone)
            if not job.is_ordered and not all(view.has_components(job.request, node, alone) for node in nodes):
                job.is_ordered = asks = True
        if asks:
            yield AskAgain(0.0)


# ---------------------------------------------------------------------------------------------------- pools


class Whole(NamedTuple):
    """A workflow as a unit."""

    nbytes: int
    seconds: float  # of a request
    share: float  # of the requests


def equal_pools(models: Mapping[str, Whole], num_ranks: int) -> list[Pool]:
    """As many ranks for each workflow as for any other; the first ones get what is left."""
    each, left = divmod(num_ranks, len(models))
    return _pools([(name,) for name in models], [each + (index < left) for index in range(len(models))])


def groups_that_fit(models: Mapping[str, Whole], budget: int) -> list[tuple[str, ...]]:
    """The workflows in few groups, each of which fits on a rank: the largest first, each in the first group that has
    room.
    """
    groups = list[list[str]]()
    for name in sorted(models, key=lambda name: -models[name].nbytes):
        room = (group for group in groups if sum(models[each].nbytes for each in (*group, name)) <= budget)
        group = next(room, None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return [tuple(group) for group in groups]


def merged(groups: Sequence[tuple[str, ...]], models: Mapping[str, Whole], most: int) -> list[tuple[str, ...]]:
    """At most so many groups: the two with least work become one until they are as few."""
    found = list(groups)
    while len(found) > most:
        found.sort(key=lambda group: -sum(models[name].share * models[name].seconds for name in group))
        found[-2:] = [found[-2] + found[-1]]
    return found


def planned_pools(
    groups: Sequence[tuple[str, ...]],
    models: Mapping[str, Whole],
    num_ranks: int,
    slo_scale: float,
    arrivals: Sequence[tuple[float, str]],
) -> list[Pool]:
    """A pool for each group, of which the sizes are best for these arrivals, (seconds, model), as far as moving one
    rank at a time can tell. It starts in proportion to the work.
    """
    work = [sum(models[name].share * models[name].seconds for name in group) for group in groups]
    least = 1 if num_ranks >= len(groups) else 0
    sizes = [max(least, int(each / sum(work) * num_ranks)) for each in work]
    while sum(sizes) > num_ranks:
        sizes[sizes.index(max(sizes))] -= 1
    while sum(sizes) < num_ranks:
        sizes[max(range(len(sizes)), key=lambda index: work[index] / (sizes[index] or 0.01))] += 1
    best = _num_served(groups, sizes, models, slo_scale, arrivals)
    while True:
        tried = [
            (_num_served(groups, moved, models, slo_scale, arrivals), moved) for moved in _neighbours(sizes, least)
        ]
        most, moved = max(tried, default=(0, sizes))
        if most <= best:
            return _pools(groups, sizes)
        best, sizes = most, moved


def _neighbours(sizes: Sequence[int], least: int) -> Iterator[list[int]]:
    for source, size in enumerate(sizes):
        for target in range(len(sizes)):
            if source != target and size > least:
                yield [each + (index == target) - (index == source) for index, each in enumerate(sizes)]


def _num_served(
    groups: Sequence[Sequence[str]],
    sizes: Sequence[int],
    models: Mapping[str, Whole],
    slo_scale: float,
    arrivals: Sequence[tuple[float, str]],
) -> int:
    """The number of these arrivals that are served in time."""
    free = [[0.0] * size for size in sizes]
    index_of = {name: index for index, group in enumerate(groups) for name in group}
    number = 0
    for seconds, name in arrivals:
        ranks, takes = free[index_of[name]], models[name].seconds
        if ranks and (begin := max(ranks[0], seconds)) + takes <= seconds + slo_scale * takes:
            heapreplace(ranks, begin + takes)
            number += 1
    return number


def _pools(groups: Sequence[tuple[str, ...]], sizes: Sequence[int]) -> list[Pool]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [
        Pool(frozenset(group), tuple(range(end - size, end)))
        for group, size, end in zip(groups, sizes, ends, strict=True)
    ]
