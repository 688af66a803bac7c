"""EarliestFinish: which batch goes first where several ops share a rank (NeuStream, section 5).

Each op has an equal share of the rank. The batch goes first that would finish first if every op used its share all the
time (`core.scheduling.policies.papers.finish_order`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.dispatch import Decision, Dispatch
from core.scheduling.policies.papers.finish_order import FinishOrder
from core.scheduling.policies.step_pass import BatchKey
from core.scheduling.requests.request import Request
from core.scheduling.view import View

SHARE = 1.0
"""Share of each op. All are equal, because partial SLOs are the same multiple of each op's latency."""


class WaitingBatch(NamedTuple):
    """A batch that its rank could run."""

    finish: float  # virtual time, see FinishOrder
    seconds: float  # predicted when the batch was first seen


class RankQueue:
    """The batches that wait for one rank."""

    def __init__(self) -> None:
        self._order: FinishOrder[BatchKey] = FinishOrder()
        self._waiting: dict[BatchKey, WaitingBatch] = {}  # in the order in which they were first seen

    def note(self, batches: Mapping[BatchKey, float], now: float) -> None:
        """Note the batches that could run now. batches: key -> predicted seconds."""
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if key in batches}
        for key, seconds in batches.items():
            if key not in self._waiting:
                self._waiting[key] = WaitingBatch(self._order.add(key, seconds, SHARE, now), seconds)

    def first(self, keys: Sequence[BatchKey]) -> BatchKey:
        """The batch that goes first. keys: at least one of those noted."""
        return min((key for key in self._waiting if key in keys), key=lambda key: self._waiting[key].finish)

    def begin(self, key: BatchKey, seconds: float, now: float) -> None:
        """Note that a batch is sent. Requests that have joined it while it waited count as its op's next work."""
        waiting = self._waiting.pop(key)
        self._order.add(key, max(0.0, seconds - waiting.seconds), SHARE, now)


class ChosenBatch(NamedTuple):
    """A batch that the last pass chose."""

    key: BatchKey
    seconds: float  # predicted
    request: Request  # one of its requests
    node: Node
    scheduled: int  # how often the node had been sent before

    @property
    def is_sent(self) -> bool:
        return self.request.progress.scheduled[self.node.name] > self.scheduled


class EarliestFinish:
    """The waiting batches of one policy. Each rank gets at most one batch per pass, so the next batch is chosen only
    when the current one is nearly done.

    A batch waits from the first pass on in which its rank could run it; requests that come later join it.
    """

    def __init__(self) -> None:
        self._queues: dict[int, RankQueue] = {}  # by rank
        self._chosen: list[ChosenBatch] = []  # by the last pass

    def choose(
        self, view: View, decisions: Sequence[Decision], now: float, besides: Collection[int] = ()
    ) -> list[Decision]:
        """These decisions, with each rank's batches reduced to the one that goes first. besides: ranks that get all of
        their batches.
        """
        self.note_sent(now)
        dispatches = [each for each in decisions if isinstance(each, Dispatch)]
        batches = {_key(each): each for each in dispatches if any(rank not in besides for rank in each.ranks)}
        if not batches:
            return list(decisions)
        seconds = {key: _seconds(view, batch) for key, batch in batches.items()}
        first = self._first(view.ranks, seconds, now)
        self._chosen = [_chosen(batches[key], seconds[key]) for key in first]
        put_off = batches.keys() - set(first)
        return [each for each in decisions if not isinstance(each, Dispatch) or _key(each) not in put_off]

    def note_sent(self, now: float) -> None:
        """Note which of the batches that the last pass chose were sent. To be called in every pass that does not call
        `choose`.
        """
        for batch in self._chosen:
            if batch.is_sent:
                for rank in batch.key[2]:
                    self._queues[rank].begin(batch.key, batch.seconds, now)
        self._chosen = []

    def _first(self, ranks: Sequence[int], batches: Mapping[BatchKey, float], now: float) -> list[BatchKey]:
        """For each rank the batch that goes first, among those that share no rank with a batch chosen before."""
        chosen, free = list[BatchKey](), set(ranks)
        for rank in ranks:
            mine = {key: seconds for key, seconds in batches.items() if rank in key[2]}
            if mine:
                self._queues.setdefault(rank, RankQueue()).note(mine, now)
            if able := [key for key in mine if free.issuperset(key[2])]:
                chosen.append(self._queues[rank].first(able))
                free.difference_update(chosen[-1][2])
        return chosen


def _key(batch: Dispatch) -> BatchKey:
    request, node = batch.items[0]
    return request.keys_of(node), node.op, batch.ranks


def _seconds(view: View, batch: Dispatch) -> float:
    """Predicted time of a batch."""
    request, node = batch.items[0]
    op = op_of(node)
    work = sum((each.work(node) for each, node in batch.items), Work((), ()))
    return view.batch_seconds(request.keys_of(node), op, work)


def _chosen(batch: Dispatch, seconds: float) -> ChosenBatch:
    request, node = batch.items[0]
    return ChosenBatch(_key(batch), seconds, request, node, request.progress.scheduled[node.name])
