"""Dispatcher: carries out a policy's decisions: it checks them, derives transfers, and makes the batches of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from core.failure import Failure
from core.graph.op import Op
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.messages.worker import Batch, Delivery, Free, Item, StepPlan, Transfer
from core.scheduling.dispatch import AskAgain, CacheDispatch, Decision, Dispatch, Fetch, GiveUp
from core.scheduling.node_cache import NO_PAGES, CacheOrders, NodeCache
from core.scheduling.ops.request_op import request_op
from core.scheduling.ranks.in_flight import Flight
from core.scheduling.ranks.ranks import Ranks
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.request import Request, Status
from core.scheduling.values.inputs import deliveries, input_refs
from core.scheduling.values.values import ValueTable
from core.scheduling.view import View

PredictBatch = Callable[[ModelKeys, Op, Work, int], float]
"""(components, op, size of a batch, number of ranks) -> predicted seconds; 0 if unknown."""


@dataclass(slots=True)
class Dispatched:
    """The result of one pass: work to send, and requests that the pass has changed."""

    flights: list[Flight] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)  # ids of requests that were waiting before
    given_up: list[tuple[Request, Failure]] = field(default_factory=list)
    without_room: Request | None = None  # the first whose inputs could not be fetched, as the arena was full
    are_read_early: bool = False  # other nodes may begin before some of the sent ones end
    again_after: float = inf  # seconds until another pass is due

    @property
    def ranks(self) -> set[int]:
        """Ranks that get batches."""
        return {rank for flight in self.flights for rank in flight.batch.ranks}

    def passed_over(self, view: View, before: frozenset[int]) -> frozenset[int]:
        """Ranks that this pass or one before it left without work. before: the result of the pass before. Empty if
        there may be work for them now, because this pass has given up requests, started nodes that others may read
        early, or waits for room.
        """
        may_change = self.given_up or self.are_read_early or self.without_room
        return frozenset() if may_change else before | (view.open_ranks - self.ranks)

    def plan(self, seq: int, orders: CacheOrders, free: Iterable[Free], file_rank: int) -> StepPlan:
        """The plan with this work. orders: of the cache. free: tensors to free. file_rank: the rank that deletes the
        cache's files.
        """
        return StepPlan(
            seq=seq,
            forget=orders.forget,
            delete=orders.delete,
            file_rank=file_rank,
            copies=orders.copies,
            transfers=tuple(self.transfers),
            batches=tuple(flight.batch for flight in self.flights),
            deliveries=tuple(self.deliveries),
            free=tuple(free),
        )


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """The mechanism below every policy; one per scheduler."""

    cache: NodeCache
    values: ValueTable
    ranks: Ranks
    predict: PredictBatch
    batch_ids: Iterator[int]

    def carry_out(self, decisions: Iterable[Decision], view: View) -> Dispatched:
        """Advance the requests and jobs that the decisions name. view: the one from which they were made. Raises
        AssertionError, before anything is changed, if one of them cannot be carried out.
        """
        decisions = tuple(decisions)
        check(decisions, view)
        done = Dispatched()
        for decision in decisions:
            match decision:
                case Dispatch():
                    flight = self._dispatch(decision)
                    done.flights.append(flight)
                    done.begun += self._begin(decision)
                    done.are_read_early |= any(each.workflow.is_read_early(node.name) for each, node in decision.items)
                    done.deliveries += deliveries(flight.batch)
                case Fetch():
                    self._fetch(decision, view, done)
                case CacheDispatch():
                    done.flights.append(self._dispatch_job(decision))
                case GiveUp():
                    done.given_up.append((decision.request, decision.failure))
                case AskAgain():
                    done.again_after = min(done.again_after, decision.seconds)
        return done

    # ------------------------------------------------------------------------------------------------ requests

    def _dispatch(self, dispatch: Dispatch) -> Flight:
        request, node = dispatch.items[0]
        keys, op, ranks = request.keys_of(node), op_of(node), dispatch.ranks
        items = tuple(self._item(request, node, ranks) for request, node in dispatch.items)
        work = sum((request.work(node) for request, node in dispatch.items), Work((), ()))
        for request, node in dispatch.items:
            request.send(node, ranks)
        batch = Batch(next(self.batch_ids), op.name, ranks, items, *self.ranks.meeting(ranks))
        seconds = self.predict(keys, op, work, len(ranks))
        is_step, is_mixed = node.name in request.workflow.step_names, len({r.head.model for r, _ in dispatch.items}) > 1
        return Flight(batch, keys, work, seconds, is_step=is_step, is_mixed=is_mixed)

    def _item(self, request: Request, node: Node, ranks: tuple[int, ...]) -> Item:
        op = request_op(node)
        work = op.make(request, node, NO_PAGES if op.pages == "none" else self.cache.read(request, node))
        version = request.progress.scheduled[node.name] + 1 if node.region else 0
        inputs = input_refs(request, node, ranks, self.values)
        return Item(request.id, node.name, request.model_of(node), work, inputs, version)

    def _begin(self, dispatch: Dispatch) -> list[str]:
        """Note that the waiting requests among these run now; returns their ids."""
        begun = []
        for request, _ in dispatch.items:  # several of these nodes may belong to one request
            if request.status is Status.WAITING:
                request.move_to(Status.RUNNING)
                begun.append(request.id)
        return begun

    def _fetch(self, fetch: Fetch, view: View, done: Dispatched) -> None:
        """Make transfers of the inputs that only other ranks have, or none if the arena has no room for all of them."""
        elsewhere = view.inputs(fetch.request, fetch.node, fetch.ranks).elsewhere
        transfers = self.values.move(elsewhere, view.open_ranks)
        if transfers is None:
            done.without_room = done.without_room or fetch.request
            return
        fetch.request.num_moving += len(transfers)
        done.transfers += transfers

    # ------------------------------------------------------------------------------------------------ the cache

    def _dispatch_job(self, dispatch: CacheDispatch) -> Flight:
        """A batch of one piece of a job. Pieces of several jobs are not joined, because they end at different times."""
        piece = self.cache.start(dispatch.job.id, dispatch.token_budget, dispatch.rank)
        batch, job = Batch(next(self.batch_ids), piece.op.name, (dispatch.rank,), piece.items), dispatch.job
        return Flight(batch, job.keys, piece.size, self.predict(job.keys, piece.op, piece.size, 1), job.id)


def check(decisions: Iterable[Decision], view: View) -> None:
    """Raise AssertionError unless all decisions can be carried out now, and each node and job is named at most once."""
    seen = set[tuple[str, str]]()  # (request or job, node)
    for decision in decisions:
        match decision:
            case Dispatch():
                names = _check_dispatch(decision, view)
            case Fetch():
                names = _check_fetch(decision, view)
            case CacheDispatch():
                names = _check_job(decision, view)
            case GiveUp():
                names = _check_give_up(decision)
            case AskAgain():
                names = []
        for name in names:
            assert name not in seen, f"{name} is dispatched twice"
            seen.add(name)


def _check_dispatch(dispatch: Dispatch, view: View) -> list[tuple[str, str]]:
    assert dispatch.ranks, "a dispatch needs a rank"
    assert view.open_ranks.issuperset(dispatch.ranks), f"a rank of {dispatch.ranks} is not open"
    assert len(set(dispatch.ranks)) == len(dispatch.ranks), f"a rank of {dispatch.ranks} is named twice"
    first, node = dispatch.items[0]
    key = first.keys_of(node), node.op
    for request, node in dispatch.items:
        assert (request.keys_of(node), node.op) == key, "a batch has one op and one set of components"
        assert node in view.ready(request), f"{node.name} of {request.id} is not ready"
        assert view.has_components(request, node, dispatch.ranks), f"{node.name} of {request.id} lacks its model"
        assert view.can_read(request, node, dispatch.ranks), f"{node.name} of {request.id} lacks inputs"
    return [(request.id, node.name) for request, node in dispatch.items]


def _check_fetch(fetch: Fetch, view: View) -> list[tuple[str, str]]:
    request, node = fetch.request, fetch.node
    assert node in view.ready(request), f"{node.name} of {request.id} is not ready"
    assert view.can_fetch(request, node, fetch.ranks), f"inputs of {node.name} of {request.id} cannot be fetched"
    return [(request.id, node.name)]


def _check_job(dispatch: CacheDispatch, view: View) -> list[tuple[str, str]]:
    assert dispatch.rank in view.open_ranks, f"rank {dispatch.rank} is not open"
    assert dispatch.job in view.jobs(), f"{dispatch.job.id} is not offered"
    assert dispatch.rank in view.ranks_with(dispatch.job.keys), (
        f"rank {dispatch.rank} lacks what {dispatch.job.id} needs"
    )
    assert dispatch.job.rank in (None, dispatch.rank), f"{dispatch.job.id} can run on rank {dispatch.job.rank} alone"
    return [(dispatch.job.id, "")]


def _check_give_up(decision: GiveUp) -> list[tuple[str, str]]:
    """All nodes of the request count as named, because a request that is given up runs nothing more."""
    assert decision.request.is_live, f"{decision.request.id} has ended"
    return [(decision.request.id, node.name) for node in decision.request.workflow.nodes]
