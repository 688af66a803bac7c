"""RepeatedSteps: each rank's last batch of steps, which is sent again while no request needs anything else of the open
ranks.

Most passes end like that. To find it out by a whole pass costs a policy several times as much as to check that nothing
has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.baselines.former.rank_shares import RankShares
from core.scheduling.dispatch import Decision, Dispatch
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View


class RepeatedSteps:
    """The last batches of one policy. Steps that several ranks share are not repeated."""

    def __init__(self) -> None:
        self._batches: dict[int, Dispatch] = {}  # rank -> its last batch, if that was one of steps
        self._names = set[str]()  # ids of the requests in these batches

    def forget(self) -> None:
        """Note that other requests may be served from now on."""
        self._batches.clear()
        self._names.clear()

    def drop(self, request_id: str) -> None:
        """Note that a request has ended."""
        if request_id in self._names:
            self._batches = {rank: last for rank, last in self._batches.items() if not _is_of(last, {request_id})}
            self._names = {request.id for batch in self._batches.values() for request, _ in batch.items}

    def note(self, decisions: Iterable[Decision]) -> None:
        """Note the work that ranks are given."""
        for each in decisions:
            if isinstance(each, Dispatch):
                request, node = each.items[0]
                names = {request.id for request, _ in each.items}
                self._batches = {rank: last for rank, last in self._batches.items() if not _is_of(last, names)}
                for rank in each.ranks:
                    self._batches.pop(rank, None)
                    if node.name in request.workflow.step_names and len(each.ranks) == 1:
                        self._batches[rank] = each
        self._names = {request.id for batch in self._batches.values() for request, _ in batch.items}

    def next(self, view: View, served: Sequence[Request], shares: RankShares | None) -> list[Dispatch] | None:
        """The batches that the open ranks are to repeat; None if there may be anything else to do. served: requests
        that are to make their steps. shares: the rule by which ranks are chosen for requests; None: the policy has
        another.
        """
        ids = {request.id for request in served}
        newcomers = [request for request in served if request.id not in self._names]
        if any(not each.progress.steps_left or not _is_elsewhere(view, each, shares) for each in newcomers):
            return None
        if view.jobs():
            return None
        for request in view.requests.running:
            if request.has_lost_rank:  # its inputs may have to be fetched
                return None
            if not request.progress.steps_left and _is_sent_to(request, view.open_ranks):  # its decode is next
                return None
            names = request.workflow.step_names
            for node in view.ready(request):
                if node.name not in names and not _is_elsewhere(view, request, shares):
                    return None
        batches = [self._batches[rank] for rank in view.open_ranks if rank in self._batches]
        return batches if all(_can_be_repeated(view, batch, ids) for batch in batches) else None


def _is_elsewhere(view: View, request: Request, shares: RankShares | None) -> bool:
    """Whether a request that has begun has nothing on the open ranks, and needs none of them next. False for a waiting
    request, because a whole pass may have to make room for it, and where several ranks share steps, which is not
    examined.
    """
    if shares is None or view.config.degree > 1 or request.status is not Status.RUNNING:
        return False
    if not view.open_ranks.isdisjoint(request.ranks):
        return False
    return all(shares.rank(view, request, node) not in view.open_ranks for node in view.ready(request))


def _is_sent_to(request: Request, ranks: frozenset[int]) -> bool:
    """Whether one of these ranks has unanswered work of this request."""
    return not all(map(ranks.isdisjoint, request.sent_to.values()))


def _is_of(batch: Dispatch, names: set[str]) -> bool:
    """Whether any of these requests is in a batch. names: request ids."""
    return any(request.id in names for request, _ in batch.items)


def _can_be_repeated(view: View, batch: Dispatch, served: set[str]) -> bool:
    """Whether a batch can be sent again. served: ids of requests; others were in it only to make room."""
    for request, node in batch.items:
        if request.id not in served:
            return False
        is_running = request.status is Status.RUNNING
        if not is_running or node not in view.ready(request) or not view.can_run(request, node, batch.ranks):
            return False
    if len(batch.items) == 1:
        return True
    sizes = [request.sizes(node) for request, node in batch.items]
    return sum(each.num_step_tokens * each.num_rows for each in sizes) <= view.max_step_tokens
