"""lego: every node of a workflow is scheduled on its own (LegoDiffusion, section 5, algorithm 1).

A baseline to compare with. The ready node that came first, of those of one request the one that comes first in its
workflow, takes other ready nodes of its model into its batch, whatever workflows they are of. The batch gets as many of
the ranks that are free now as are useful to its model, those with the least time for fetching its inputs and loading
its model. A rank that has to load waits for that, and keeps the batch. A new request is rejected if it is predicted to
end late, after all that were admitted before it.

The paper leaves open, and this policy decides: a model's largest batch and its degree (`_largest_batch`, `_degree`);
what makes room for a load: what was used least recently; that ranks form sets as everywhere here (`Buddies`), so a
batch gets 1, 2, 4, ... of them; that a ControlNet has one rank; and that a mask-aware edit whose pages are on
the device of a busy rank lets others go ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import islice
from math import inf

from core.graph.workflow import Node, op_of
from core.handles import ModelKey, RankIds
from core.messages.worker import Load
from core.scheduling.dispatch import AskAgain, Decision, GiveUp, Loads
from core.scheduling.model_demand import ModelDemand
from core.scheduling.node_cache import CacheJob
from core.scheduling.policies.buddies import Buddies, power_of_two
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.policies.step_pass import MOST_ANYWHERE, StepPass, beside_suspects
from core.scheduling.policies.step_speeds import MIN_GAIN, StepSpeeds
from core.scheduling.policies.where_needed import where_needed
from core.scheduling.ranks.residency import Residency
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.deadlines import TOO_LATE, due, why_late
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

FETCH_SECONDS = 0.001
"""Of an input that another rank has (section 7.5: below 1 ms)."""


@dataclass(slots=True)
class Placed:
    """A batch that has its ranks, and is sent to them as soon as they have its model and inputs."""

    items: list[tuple[Request, Node]]
    number: dict[tuple[str, str], int]  # (request id, node) -> how often the node had been sent before
    is_ordered: bool = False  # what its ranks have to load

    @property
    def keys(self) -> ModelKeys:
        request, node = self.items[0]
        return request.keys_of(node)

    def is_left(self, view: View, ranks: RankIds, request: Request, node: Node) -> bool:
        """Whether a node of it is still to be sent to these ranks."""
        if request.progress.scheduled[node.name] != self.number[request.id, node.name]:
            return False
        return node in view.ready(request) and view.has_pages(request, node, ranks)


class Lego(SchedulingPolicy):
    """Keeps the requests that it has admitted, and batches from when they get ranks until they are sent."""

    def __init__(self) -> None:
        self._speeds = StepSpeeds()
        self._new: list[Request] = []  # since the last pass
        self._admitted: dict[str, Request] = {}  # by id, in the order in which they came
        self._rejected: dict[str, GiveUp] = {}  # by id, those that have not ended
        self._placed: dict[RankIds, Placed] = {}

    def on_arrival(self, request: Request) -> None:
        self._new.append(request)

    def on_end(self, request_id: str) -> None:
        self._admitted.pop(request_id, None)
        self._rejected.pop(request_id, None)

    # ------------------------------------------------------------------------------------------------ loads

    def loads(self, demand: ModelDemand, now: float) -> Loads:
        """What placed batches need, at every pass. While none of them has to wait for that, what is wanted without a
        request is loaded as for other policies: for pages, and where no request was admitted.
        """
        residency = demand.residency
        up = {rank for ranks in residency.sets for rank in ranks}
        orders = [
            order
            for ranks, placed in self._placed.items()
            if up.issuperset(ranks)  # else the next pass places it again
            for order in self._orders(residency, ranks, placed, now)
        ]
        has_requests = self._new or self._admitted
        has_jobs = demand.cache.models_in_use or demand.cache.wanted_models() or demand.cache.jobs()
        if not orders and (has_jobs or not has_requests):
            return where_needed(demand, now)
        return Loads(tuple(orders), None, again=now)

    @staticmethod
    def _orders(residency: Residency, ranks: RankIds, placed: Placed, now: float) -> Iterator[Load]:
        placed.is_ordered = True
        for rank in ranks:
            alone, keys = (rank,), placed.keys.keys
            lacking = residency.lacking(keys, alone)
            if lacking and residency.refusal_on(alone, lacking, now) is None:
                drop = least_recent(residency, alone, lacking, keep=keys)
                if drop is not None:
                    yield Load(alone, tuple(lacking), tuple(drop))

    # ------------------------------------------------------------------------------------------------ passes

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        self._judge_new(view, now)
        requests = self._in_turn(view)
        self._forget_sent(view, {request.id for request in requests})
        self._place(view, requests)
        loading = [placed for ranks, placed in self._placed.items() if not _have_model(view, ranks, placed)]
        asks = [AskAgain(0.0)] if any(not placed.is_ordered for placed in loading) else []
        return [*self._rejected.values(), *LegoPass(view, placed=self._placed).run(), *asks]

    def _in_turn(self, view: View) -> list[Request]:
        """Admitted requests that may run, those first that came first: as many as there are slots."""
        room = view.config.max_num_seqs - len(view.requests.running)
        chosen = list[Request]()
        for request in beside_suspects(sorted(self._admitted.values(), key=_turn)):
            room -= request.status is Status.WAITING
            if request.status is Status.RUNNING or room >= 0:
                chosen.append(request)
        return chosen

    def _forget_sent(self, view: View, in_turn: Collection[str]) -> None:
        """Forget batches that were sent, or cannot be sent to their ranks any more, and what of others has ended.
        in_turn: ids of the requests that may run.
        """
        for ranks, placed in list(self._placed.items()):
            placed.items = [
                item for item in placed.items if item[0].id in in_turn and placed.is_left(view, ranks, *item)
            ]
            if (
                not placed.items
                or not set(ranks) <= set(view.ranks)
                or any(view.load_seconds_on(rank, placed.keys.keys) == inf for rank in ranks)
            ):
                del self._placed[ranks]

    def _place(self, view: View, requests: Sequence[Request]) -> None:
        """Algorithm 1. requests: that may run, those first that came first."""
        free = Buddies(view.idle_ranks.difference(*self._placed))
        if not free.num_free:
            return
        taken = {name for placed in self._placed.values() for name in placed.number}
        queue = [(request, node) for request in requests for node in _ready(view, request)]
        for place, (request, node) in enumerate(queue):
            if (request.id, node.name) in taken:
                continue
            ranks = self._choose_ranks(view, free, request, node)
            if ranks is None:
                continue
            free.hold(ranks)
            others = (item for item in queue[place + 1 :] if (item[0].id, item[1].name) not in taken)
            items = [(request, node), *self._others(view, ranks, request, node, others)]
            number = {(each.id, of.name): each.progress.scheduled[of.name] for each, of in items}
            self._placed[ranks] = Placed(items, number)
            taken.update(number)
            if not free.num_free:
                return

    def _choose_ranks(self, view: View, free: Buddies, request: Request, node: Node) -> RankIds | None:
        """The free ranks with the least score (lines 13 to 17); inference takes as long on any of them. None: none of
        them can run it.
        """
        keys, size = request.keys_of(node), power_of_two(min(free.num_free, self._degree(view, request, node)))
        scores: dict[int, float] = {}

        def score(rank: int) -> float:
            if rank not in scores:
                fetch = 0.0 if view.inputs(request, node, (rank,)).are_there else FETCH_SECONDS
                scores[rank] = fetch + view.load_seconds_on(rank, keys.keys)
            return scores[rank]

        while size:
            sets = [
                ranks
                for ranks in free.sets(size)
                if view.has_pages(request, node, ranks) and all(score(rank) < inf for rank in ranks)
            ]
            if sets:
                return min(
                    sets, key=lambda ranks: (sum(map(score, ranks)), not view.has_components(request, node, ranks))
                )
            size //= 2
        return None

    def _others(
        self, view: View, ranks: RankIds, request: Request, node: Node, queue: Iterable[tuple[Request, Node]]
    ) -> Iterator[tuple[Request, Node]]:
        """Ready nodes that share the batch of this one. queue: those after it."""
        key, sizes = (request.keys_of(node), node.op), request.sizes(node)
        most, tokens = self._largest_batch(view, request, node) - 1, sizes.num_step_tokens * sizes.num_rows
        alike = (
            (other, its)
            for other, its in queue
            if (other.keys_of(its), its.op) == key and view.has_pages(other, its, ranks)
        )
        for other, its in islice(alike, most) if most else ():
            if its.name in other.workflow.step_names:
                tokens += other.sizes(its).num_step_tokens * other.sizes(its).num_rows
                if tokens > view.max_step_tokens or other.runs_on_one_rank is not request.runs_on_one_rank:
                    return
            yield other, its

    # ------------------------------------------------------------------------------------------------ profiles

    def _degree(self, view: View, request: Request, node: Node) -> int:
        """The most ranks that are useful to a node: k_max."""
        return self._speeds.of(view, request).useful if node is request.step_node else 1

    def _largest_batch(self, view: View, request: Request, node: Node) -> int:
        """The largest batch up to which every doubling takes less than MIN_GAIN of the time of two batches: B_max."""
        op, keys, work = op_of(node), request.keys_of(node), request.work(node)
        most, number = MOST_ANYWHERE if op.has_own_ports else view.config.max_num_seqs, 1
        seconds = view.batch_seconds(keys, op, work)
        while 2 * number <= most and (twice := view.batch_seconds(keys, op, work, 2 * number)) > 0.0:
            if twice >= MIN_GAIN * 2 * seconds:
                break
            number, seconds = 2 * number, twice
        return number

    # ------------------------------------------------------------------------------------------------ admission

    def _judge_new(self, view: View, now: float) -> None:
        """Admit or reject new requests (section 5.3)."""
        for request in self._new:
            if not request.is_live:
                continue
            late = None
            if due(request.head) is not None:
                late = why_late(request.head, now + self._seconds_until_done(view, request))
            if late is None or (late is not TOO_LATE and view.config.on_late != "drop"):
                self._admitted[request.id] = request
            else:
                self._rejected[request.id] = GiveUp(request, late)
        self._new.clear()

    def _seconds_until_done(self, view: View, request: Request) -> float:
        """Predicted time until a new request has ended: what is left of the critical paths of those admitted before is
        worked off, in their order, by whichever rank is free first, and then its own, at k_max if all of them leave
        enough ranks.
        """
        ends = [view.wait_seconds(rank) for rank in view.ranks]
        heapify(ends)
        for other in self._admitted.values():
            heapreplace(ends, ends[0] + view.work_left(other).alone)
        speeds, seconds = self._speeds.of(view, request), view.work_left(request).alone
        degree = speeds.useful
        if degree > 1 and degree * (len(self._admitted) + 1) <= len(view.ranks):
            seconds -= request.progress.steps_left * (speeds.seconds[1] - speeds.seconds[degree])
        return ends[0] + seconds


@dataclass(slots=True)
class LegoPass(StepPass):
    """Sends placed batches to their ranks. What they lack of inputs is fetched while their ranks load."""

    placed: Mapping[RankIds, Placed] = field(default_factory=dict)

    def _admit(self) -> list[Request]:
        return []

    def run(self) -> list[Decision]:
        self._jobs = self.view.jobs()
        self._choose_waited_for_pieces()
        tokens: dict[int, int] = {}
        for ranks, placed in self.placed.items():
            for request, node in placed.items:
                self._known_ranks[request.id, node.name] = ranks
                self._candidates.append((request, [node]))
            if all(self.view.can_run(request, node, ranks) for request, node in placed.items):
                self._add(placed.items)
                sizes = [request.sizes(node) for request, node in placed.items]
                tokens |= dict.fromkeys(ranks, sum(each.num_step_tokens * each.num_rows for each in sizes))
        self._choose_cache_work(tokens)
        return [*self._fetches(), *(self._decision(key) for key in self._order)]

    def _can_prime(self, job: CacheJob) -> bool:
        """Not on a rank that is to load: it may have to drop what the job computes with."""
        rank = self._rank_of(job)
        loads = (ranks for ranks, placed in self.placed.items() if not _have_model(self.view, ranks, placed))
        return StepPass._can_prime(self, job) and all(rank not in ranks for ranks in loads)


def least_recent(
    residency: Residency, ranks: RankIds, load: Sequence[ModelKey], keep: Sequence[ModelKey]
) -> list[ModelKey] | None:
    """What makes room for a load, used least recently first; None: too much is being loaded there."""
    present = residency.present(ranks)
    idle = present - residency.awaited(ranks) - {*keep}
    idle_first = sorted(idle, key=lambda key: (residency.last_use(key), key.component, key.content))
    drop = list[ModelKey]()
    for key in idle_first:
        if residency.excess(load, present - {*drop}) <= 0:
            break
        drop.append(key)
    return drop if residency.excess(load, present - {*drop}) <= 0 else None


def _turn(request: Request) -> tuple[float, str]:
    return request.head.arrival, request.id


def _ready(view: View, request: Request) -> list[Node]:
    """The nodes of a request all of whose inputs are made, but for those that are taken as the node runs."""
    busy = request.progress.in_flight
    return [node for node in view.ready(request) if not any(source in busy for source in _eager_sources(node))]


def _eager_sources(node: Node) -> Iterator[str]:
    for edge in node.inputs:
        if not edge.deferred:
            yield edge.source
            if edge.carried:
                yield edge.carried


def _have_model(view: View, ranks: RankIds, placed: Placed) -> bool:
    return view.has_components(*placed.items[0], ranks)
