"""Turns: which batch goes first where several ops share a rank, by earliest finish (NeuStream, section 5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from core.costs.finish_order import FinishOrder
from core.costs.shares import allot
from core.graph.work import Work
from core.graph.workflow import op_of
from core.scheduling.batch_items import node_work
from core.scheduling.dispatch import Decision, Dispatch
from core.scheduling.policies.op_demands import demands_of
from core.scheduling.policies.step_batching import BatchKey, eligible
from core.scheduling.policies.work_left import WorkLeft
from core.scheduling.view import View

ALLOT_EVERY = 64
"""Passes after which shares are computed again: requests drift, and so does the machine."""


class Wait(NamedTuple):
    """A batch that its rank could run."""

    finish: float  # virtual, see FinishOrder
    seconds: float  # that were predicted when it was first seen


class RankTurns:
    """Of one rank."""

    def __init__(self) -> None:
        self._order: FinishOrder[BatchKey] = FinishOrder()
        self._waits: dict[BatchKey, Wait] = {}  # in the order in which they were first seen

    def note(self, batches: Mapping[BatchKey, float], shares: Mapping[str, float], now: float) -> None:
        """Note what could run now. batches: predicted seconds. shares: by op."""
        self._waits = {key: wait for key, wait in self._waits.items() if key in batches}
        for key, seconds in batches.items():
            if key not in self._waits:
                self._waits[key] = Wait(self._order.add(key, seconds, shares[key[1]], now), seconds)

    def first(self, keys: Iterable[BatchKey]) -> BatchKey:
        """Of these, at least one, that which goes first."""
        among = set(keys)
        return min((key for key in self._waits if key in among), key=lambda key: self._waits[key].finish)

    def begin(self, key: BatchKey, seconds: float, share: float, now: float) -> None:
        """Note that a batch is sent. What has joined it while it waited counts as its op's next work."""
        more = seconds - self._waits.pop(key).seconds
        if more > 0:
            self._order.add(key, more, share, now)


class Turns:
    """Of one policy. A rank gets one batch in a pass, so that nothing waits for more than the batches that it has.

    An op's share of a rank is its units (`core.costs.shares.allot`), of those that the ops with work for this rank
    have. Where units are too few for all ops to be within their partial SLOs, all shares are equal, since these are the
    same multiple of each op's latency. A batch waits from the first pass on in which its rank could run it; requests
    that come later join it.
    """

    def __init__(self, work: WorkLeft) -> None:
        self._work = work
        self._ranks: dict[int, RankTurns] = {}
        self._shares: dict[str, int] = {}  # by op
        self._passes_left = 0  # until these are computed again

    def choose(self, view: View, decisions: Sequence[Decision], now: float) -> list[Decision]:
        """These decisions; but of the batches of a rank only the one that goes first."""
        batches = {_key(each): each for each in decisions if isinstance(each, Dispatch)}
        if batches:
            self._update_shares(view, {op for _, op, _ in batches})
        seconds = {key: _seconds(view, batch) for key, batch in batches.items()}
        begun = self._first(view.ranks, seconds, now)
        for key in begun:
            for rank in key[2]:
                self._ranks[rank].begin(key, seconds[key], self._shares[key[1]], now)
        return [each for each in decisions if not isinstance(each, Dispatch) or _key(each) in begun]

    def _first(self, ranks: Sequence[int], batches: Mapping[BatchKey, float], now: float) -> set[BatchKey]:
        """Of each rank's batches that which goes first, unless one of its ranks has another by then."""
        chosen, free = set[BatchKey](), set(ranks)
        for rank in ranks:
            mine = {key: seconds for key, seconds in batches.items() if rank in key[2]}
            if mine:
                self._ranks.setdefault(rank, RankTurns()).note(mine, self._shares, now)
            if able := [key for key in mine if free.issuperset(key[2])]:
                first = self._ranks[rank].first(able)
                chosen.add(first)
                free.difference_update(first[2])
        return chosen

    def _update_shares(self, view: View, ops: set[str]) -> None:
        self._passes_left -= 1
        if self._passes_left < 0 or not self._shares.keys() >= ops:
            self._passes_left = ALLOT_EVERY
            demands = demands_of(view, eligible(view), self._work)
            units = allot(demands, len(view.ranks))
            are_enough = all(demand.goodput(units[op]) for op, demand in demands.items())
            self._shares = units if are_enough else dict.fromkeys(demands, 1)


def _key(batch: Dispatch) -> BatchKey:
    request, node = batch.items[0]
    return request.head.model, node.op, batch.ranks


def _seconds(view: View, batch: Dispatch) -> float:
    request, node = batch.items[0]
    work = sum((node_work(*item) for item in batch.items), Work((), ()))
    return view.batch_seconds(request.head.model, op_of(node), work)
