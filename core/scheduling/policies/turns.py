"""Turns: which batch goes first where several ops share a rank, by earliest finish (NeuStream, section 5)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from core.costs.finish_order import FinishOrder
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.dispatch import Decision, Dispatch
from core.scheduling.policies.step_batching import BatchKey
from core.scheduling.requests.request import Request
from core.scheduling.view import View

SHARE = 1.0
"""Of each op on a rank: all are equal, as partial SLOs are the same multiple of each op's latency."""


class Wait(NamedTuple):
    """A batch that its rank could run."""

    finish: float  # virtual, see FinishOrder
    seconds: float  # that were predicted when it was first seen


class RankTurns:
    """Of one rank."""

    def __init__(self) -> None:
        self._order: FinishOrder[BatchKey] = FinishOrder()
        self._waits: dict[BatchKey, Wait] = {}  # in the order in which they were first seen

    def note(self, batches: Mapping[BatchKey, float], now: float) -> None:
        """Note what could run now. batches: predicted seconds."""
        self._waits = {key: wait for key, wait in self._waits.items() if key in batches}
        for key, seconds in batches.items():
            if key not in self._waits:
                self._waits[key] = Wait(self._order.add(key, seconds, SHARE, now), seconds)

    def first(self, keys: Sequence[BatchKey]) -> BatchKey:
        """Of these, at least one, that which goes first."""
        return min((key for key in self._waits if key in keys), key=lambda key: self._waits[key].finish)

    def begin(self, key: BatchKey, seconds: float, now: float) -> None:
        """Note that a batch is sent. What has joined it while it waited counts as its op's next work."""
        wait = self._waits.pop(key)
        self._order.add(key, max(0.0, seconds - wait.seconds), SHARE, now)


class Choice(NamedTuple):
    """A batch that was to be sent."""

    key: BatchKey
    seconds: float  # predicted
    request: Request  # one of it
    node: Node
    scheduled: int  # how often the node had been sent before

    @property
    def is_sent(self) -> bool:
        return self.request.progress.scheduled[self.node.name] > self.scheduled


class Turns:
    """Of one policy. A rank gets one batch in a pass, so that the next one is chosen when that is nearly done.

    A batch waits from the first pass on in which its rank could run it; requests that come later join it.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, RankTurns] = {}
        self._choices: list[Choice] = []  # of the last pass

    def choose(
        self, view: View, decisions: Sequence[Decision], now: float, besides: Collection[int] = ()
    ) -> list[Decision]:
        """These decisions; but of the batches of a rank only the one that goes first. besides: ranks that get all of
        theirs.
        """
        self.note_sent(now)
        dispatches = [each for each in decisions if isinstance(each, Dispatch)]
        batches = {_key(each): each for each in dispatches if any(rank not in besides for rank in each.ranks)}
        if not batches:
            return list(decisions)
        seconds = {key: _seconds(view, batch) for key, batch in batches.items()}
        first = self._first(view.ranks, seconds, now)
        self._choices = [_choice(batches[key], seconds[key]) for key in first]
        put_off = batches.keys() - set(first)
        return [each for each in decisions if not isinstance(each, Dispatch) or _key(each) not in put_off]

    def note_sent(self, now: float) -> None:
        """Note which of the batches were sent that were chosen in the pass before. To be called in every pass in which
        `choose` is not.
        """
        for choice in self._choices:
            if choice.is_sent:
                for rank in choice.key[2]:
                    self._ranks[rank].begin(choice.key, choice.seconds, now)
        self._choices = []

    def _first(self, ranks: Sequence[int], batches: Mapping[BatchKey, float], now: float) -> list[BatchKey]:
        """Of each rank's batches that which goes first, without those that share a rank with one chosen before."""
        chosen, free = list[BatchKey](), set(ranks)
        for rank in ranks:
            mine = {key: seconds for key, seconds in batches.items() if rank in key[2]}
            if mine:
                self._ranks.setdefault(rank, RankTurns()).note(mine, now)
            if able := [key for key in mine if free.issuperset(key[2])]:
                chosen.append(self._ranks[rank].first(able))
                free.difference_update(chosen[-1][2])
        return chosen


def _key(batch: Dispatch) -> BatchKey:
    request, node = batch.items[0]
    return request.head.model, node.op, batch.ranks


def _seconds(view: View, batch: Dispatch) -> float:
    request, node = batch.items[0]
    op = op_of(node)
    work = sum((each.work(of) for each, of in batch.items), Work((), ()))
    return view.batch_seconds(request.head.model, op, work)


def _choice(batch: Dispatch, seconds: float) -> Choice:
    request, node = batch.items[0]
    return Choice(_key(batch), seconds, request, node, request.progress.scheduled[node.name])
