"""RepeatedSteps: each group of ranks' last batch of steps, which is sent again while nothing else can be next.

Most passes end like that. To find it out by a whole pass takes as long as there are requests and ranks; a repetition
looks only at the ranks whose steps have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from core.handles import RankIds
from core.messages.worker import Batch, BatchResult
from core.scheduling.dispatch import Decision, Dispatch
from core.scheduling.policies.planner.plan import Plan, has_steps
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

Keeps = Callable[[Request, RankIds], bool]


class WholePass(NamedTuple):
    """What a pass over all requests has decided."""

    decisions: Sequence[Decision]
    is_all: bool  # nothing is left that may run now
    later: frozenset[int]  # ranks of nodes that are left, because not all of these were open


class RepeatedSteps:
    """The last batches of one policy."""

    def __init__(self) -> None:
        self._batches: dict[int, Dispatch] = {}  # rank -> its last batch, if that was one of steps
        self.idle: frozenset[int] = frozenset()  # open ranks that the last whole pass left without work
        self._later: frozenset[int] = frozenset()  # ranks that may be asked for more than their steps
        self._is_only_stepping = False
        """Whether only steps have ended since the last whole pass, and that one left no work for later."""

    def forget(self) -> None:
        """Note that other requests may be served from now on."""
        self._is_only_stepping = False

    def drop(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._is_only_stepping = False
        self._keep(lambda batch: all(request.id != request_id for request, _ in batch.items))

    def _keep(self, is_kept: Callable[[Dispatch], bool]) -> None:
        self._batches = {rank: last for rank, last in self._batches.items() if is_kept(last)}

    def note_result(self, batch: Batch, result: BatchResult) -> None:
        """Note that a batch has ended."""
        last = self._batches.get(batch.ranks[0])
        sent = last and (last.ranks, last.items[0][1].op, [request.id for request, _ in last.items])
        is_same = sent == (batch.ranks, batch.op, [item.request_id for item in batch.items])
        self._is_only_stepping &= is_same and not any(item.failure for item in result.items)
        self.idle = self.idle.difference(batch.ranks)

    def note(self, view: View, made: WholePass) -> None:
        """Note the work that ranks are given. Ranks that get two batches of steps have none to repeat."""
        given = [each for each in made.decisions if isinstance(each, Dispatch)]
        taken = [rank for each in given for rank in each.ranks]
        names = {request.id for each in given for request, _ in each.items}
        self._keep(
            lambda last: names.isdisjoint(request.id for request, _ in last.items) and set(last.ranks).isdisjoint(taken)
        )
        for each in given:
            request, node = each.items[0]
            if node.name in request.workflow.step_names and all(taken.count(rank) == 1 for rank in each.ranks):
                self._batches |= dict.fromkeys(each.ranks, each)
        self.idle, self._later = view.open_ranks.difference(taken), made.later.union(_holding(view, names))
        self._is_only_stepping = (
            made.is_all
            and len(given) == len(made.decisions)
            and not any(each.has_lost_rank or each.progress.is_restarting for each in view.requests.running)
        )

    def next(
        self, view: View, plan: Plan, large: Collection[str], moving: frozenset[int], keeps: Keeps
    ) -> list[Dispatch] | None:
        """The batches that the ranks whose steps have ended are to repeat; None if there may be anything else to do.
        large: ids of the requests with groups. moving: ranks that are to have another group. keeps: whether one of
        these requests keeps its ranks.
        """
        asked = view.open_ranks - self.idle
        if not self._is_only_stepping or not asked or not asked.isdisjoint(moving | self._later) or view.jobs():
            return None
        if large and not self.idle <= moving:  # a group may grow
            return None
        batches = {last.ranks: last for rank in asked if (last := self._batches.get(rank)) is not None}
        if sum(map(len, batches)) != len(asked) or not all(map(asked.issuperset, batches)):
            return None
        is_same = all(_can_be_repeated(view, batch, plan, large, keeps) for batch in batches.values())
        return list(batches.values()) if is_same else None


def _holding(view: View, given: Collection[str]) -> Iterator[int]:
    """The ranks that may hold what requests that stand still need elsewhere: they write it to shared memory when they
    are open. given: ids of requests that are given work now.
    """
    for request in view.requests.running if len(view.ranks) > 1 else ():
        stands = not request.progress.in_flight and request.id not in given
        if stands and len(request.ranks) > 1 and request.progress.steps_left:
            yield from request.ranks


def _can_be_repeated(view: View, batch: Dispatch, plan: Plan, large: Collection[str], keeps: Keeps) -> bool:
    """Whether a batch can be sent again and nothing else is to be done there. It may have had requests only to make
    room.
    """
    is_alone = len(batch.ranks) == 1
    first = batch.items[0][0]
    served = [first] if first.id in large else [each for each in plan.served_by(batch.ranks[0]) if has_steps(each)]
    if {each.id for each in served} != {request.id for request, _ in batch.items}:
        return False
    if first.id in large and not keeps(first, batch.ranks):
        return False
    for request, node in batch.items:
        if request.num_broken and request.runs_on_one_rank is not is_alone:
            return False
        if request.status is not Status.RUNNING or not _only_makes(view, request, node.name):
            return False
        if not view.can_run(request, node, batch.ranks):
            return False
    if len(batch.items) == 1:
        return True
    sizes = [request.sizes(node) for request, node in batch.items]
    return sum(each.num_step_tokens * each.num_rows for each in sizes) <= view.max_step_tokens


def _only_makes(view: View, request: Request, node: str) -> bool:
    """Whether this node, a step's, is all that is ready."""
    ready = view.ready(request)
    return len(ready) == 1 and ready[0].name == node
