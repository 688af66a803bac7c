"""RepeatedSteps: each group of ranks' last batch of steps, which is sent again while no request needs anything else of
the open ranks.

Most passes end like that. To find it out by a whole pass costs a policy several times as much as to check that nothing
has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from core.handles import RankIds
from core.scheduling.dispatch import Decision, Dispatch
from core.scheduling.policies.planner.step_homes import StepHomes
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View


class RepeatedSteps:
    """The last batches of one policy."""

    def __init__(self) -> None:
        self._batches: dict[RankIds, Dispatch] = {}  # ranks -> their last batch, if that was one of steps
        self._names = set[str]()  # ids of the requests in these batches

    def forget(self) -> None:
        """Note that other requests may be served from now on."""
        self._batches.clear()
        self._names.clear()

    def drop(self, request_id: str) -> None:
        """Note that a request has ended."""
        if request_id in self._names:
            self._keep(lambda batch: not _is_of(batch, {request_id}))

    def _keep(self, is_kept: Callable[[Dispatch], bool]) -> None:
        self._batches = {ranks: last for ranks, last in self._batches.items() if is_kept(last)}
        self._names = {request.id for batch in self._batches.values() for request, _ in batch.items}

    def note(self, decisions: Iterable[Decision]) -> None:
        """Note the work that ranks are given. Ranks that get two batches of steps have none to repeat."""
        given = [each for each in decisions if isinstance(each, Dispatch)]
        if not given:
            return
        taken = [rank for each in given for rank in each.ranks]
        names = {request.id for each in given for request, _ in each.items}
        self._keep(lambda last: not _is_of(last, names) and set(last.ranks).isdisjoint(taken))
        for each in given:
            request, node = each.items[0]
            if node.name in request.workflow.step_names and all(taken.count(rank) == 1 for rank in each.ranks):
                self._batches[each.ranks] = each
                self._names.update(request.id for request, _ in each.items)

    def has_all(self, ranks: frozenset[int]) -> bool:
        """Whether each of these ranks has a batch to repeat."""
        return ranks.issubset({rank for each in self._batches for rank in each})

    def next(self, view: View, served: Sequence[Request], homes: StepHomes) -> list[Dispatch] | None:
        """The batches that the open ranks are to repeat; None if there may be anything else to do. served: requests
        that are to make steps. homes: of the small requests.
        """
        newcomers = [request for request in served if request.id not in self._names]
        if view.jobs() or not all(is_elsewhere(view, request, homes) for request in newcomers):
            return None
        ids = {request.id for request in served}
        batches = [batch for ranks, batch in self._batches.items() if view.open_ranks.issuperset(ranks)]
        all_repeat = sum(len(batch.ranks) for batch in batches) == len(view.open_ranks)
        for request in view.requests.running:
            if request.has_lost_rank:  # its inputs may have to be fetched
                return None
            if not request.progress.steps_left and _is_sent_to(request, view.open_ranks):  # its decode is next
                return None
            names = request.workflow.step_names
            is_only_stepping = all(node.name in names for node in view.ready(request))
            if not (is_only_stepping or (all_repeat and is_elsewhere(view, request, homes))):
                return None
        can_all = all(_can_be_repeated(view, batch, ids) for batch in batches)
        return batches if batches and can_all else None


def is_elsewhere(view: View, request: Request, homes: StepHomes) -> bool:
    """Whether a request has begun, has nothing on the open ranks, and is not at home on one of them. Other work of it
    than previews goes there or to a rank without requests, but nodes of users' classes go anywhere.
    """
    return (
        request.status is Status.RUNNING
        and not request.workflow.has_own_ports
        and view.open_ranks.isdisjoint(request.ranks)
        and homes.of(request) not in (None, *view.open_ranks)
    )


def _is_sent_to(request: Request, ranks: frozenset[int]) -> bool:
    """Whether one of these ranks has unanswered work of this request."""
    return not all(map(ranks.isdisjoint, request.sent_to.values()))


def _is_of(batch: Dispatch, names: set[str]) -> bool:
    """Whether any of these requests is in a batch. names: request ids."""
    return any(request.id in names for request, _ in batch.items)


def _can_be_repeated(view: View, batch: Dispatch, served: Collection[str]) -> bool:
    """Whether a batch can be sent again. served: ids of requests; others were in it only to make room."""
    for request, node in batch.items:
        is_alone = len(batch.ranks) == 1
        if request.id not in served or (request.num_broken and request.runs_on_one_rank is not is_alone):
            return False
        is_running = request.status is Status.RUNNING
        if not is_running or node not in view.ready(request) or not view.can_run(request, node, batch.ranks):
            return False
    if len(batch.items) == 1:
        return True
    sizes = [request.sizes(node) for request, node in batch.items]
    return sum(each.num_step_tokens * each.num_rows for each in sizes) <= view.max_step_tokens
