"""elastic: how many ranks compute which request's steps, decided anew between any two of its steps.

It starts from DDiT (policy `ddit`). Beyond that: short requests may overtake long ones, for a time that is bounded;
ranks leave requests as soon as others need them; ranks that nobody needs are used beyond a request's useful degree, and
small requests share steps on one rank, as with `step_batching`, while large ones have the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from core.graph.workflow import Node
from core.handles import RankIds
from core.messages.worker import Batch, BatchResult
from core.scheduling.dispatch import Decision
from core.scheduling.policies.elastic.rank_plan import Want, moves, plan, waiting
from core.scheduling.policies.group_pass import GroupPass
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.policies.step_batching import StepPass, eligible
from core.scheduling.policies.step_speeds import StepSpeeds
from core.scheduling.policies.work_left import WorkLeft
from core.scheduling.requests.deadlines import due
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

OVERTAKEN = 1.5
"""Shorter requests overtake a longer one if they come after it by no more than so many times the seconds that all ranks
together would need for what it has left to do.
"""

EFFICIENT, LOSSLESS = 0.95, 0.99
"""Ranks are given to a request before later ones get any as long as each does at least this share of what one alone
would do, so that little is lost by it, and it ends sooner. In a crowd the second one counts: where work comes faster
than it is done, what is lost adds up.
"""

CROWD = 2
"""More requests for each rank than this are a crowd, if they did not come all at once."""

SMALL = ""
"""Stands for the small requests together, which take turns with the large ones."""

Turn = tuple[Request, int]
"""A request, and the steps that it has left."""


@dataclass(frozen=True, slots=True)
class Case:
    """Predictions for one request."""

    seconds: Mapping[int, float]  # degree -> of a step
    efficient: int  # degree up to which ranks are EFFICIENT
    lossless: int  # and LOSSLESS
    is_small: bool
    before: float  # seconds before the steps
    after: float  # and after them
    place: float  # its place in line when this was made

    def others(self, request: Request) -> float:
        """Seconds of what it has left to do besides steps."""
        return self.before + self.after if request.status is Status.WAITING else self.after

    def place_in_line(self, request: Request, steps: int, num_ranks: int) -> float:
        """By what requests are ordered, in seconds, see OVERTAKEN. steps: that it has left."""
        work = self.others(request) + steps * self.seconds[1]
        return request.head.arrival + OVERTAKEN * work / num_ranks


class Elastic(SchedulingPolicy):
    """Keeps on which ranks the states of requests are, and predictions."""

    shares_steps = True

    def __init__(self) -> None:
        self._speeds = StepSpeeds()
        self._work = WorkLeft()
        self._places: dict[str, RankIds] = {}  # request id -> ranks of its last batch that is done
        self._cases: dict[str, Case] = {}  # by request id
        self._shared = 0  # rank of the small requests

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        for item in batch.items:
            if item.request_id in self._cases:  # neither work of the cache nor of a request that has ended
                self._places[item.request_id] = batch.ranks

    def on_end(self, request_id: str) -> None:
        self._places.pop(request_id, None)
        self._cases.pop(request_id, None)
        self._work.forget(request_id)

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        if not view.open_ranks:
            return ()
        if self._work.next_pass(now):
            self._cases.clear()
        requests = eligible(view)
        small = {each.id for each in requests if len(view.ranks) == 1 or self._case(view, each).is_small}
        if len(small) == len(requests):
            self._shared = view.ranks[0]
            return ElasticPass(view, shared=self._shared).run()
        ordered = self._in_order(view, requests)
        groups = self._groups(view, _turns(ordered, small), small, now)
        if shared := groups.pop(SMALL, ()):
            (self._shared,) = shared
        apart = frozenset(each.id for each in requests if not shared or each.id not in small)
        admitted = [request for request, _ in ordered if request.id in groups]
        return ElasticPass(view, apart=apart, groups=groups, admitted=admitted, shared=self._shared).run()

    def _groups(self, view: View, turns: Sequence[Turn], small: Collection[str], now: float) -> dict[str, RankIds]:
        """Request id -> ranks that it may be given work on; SMALL for the small ones."""
        wants = list[Want]()
        is_crowd = len(turns) > CROWD * len(view.ranks) and _keep_coming([request for request, _ in turns], now)
        for index, (request, steps) in enumerate(turns):
            has_turn = index < len(view.ranks)
            if request.id in small:
                want = self._want_of_small(view, small)
                if has_turn or want.is_running:
                    wants.append(want)
            elif has_turn or request.progress.in_flight:
                wants.append(self._want(view, request, steps, now, is_crowd=is_crowd))
        places = plan(wants, view.ranks)
        groups = moves(wants, places, view.ranks)
        by_id = {request.id: request for request, _ in turns}
        for name in waiting(wants, places, groups, view.seconds_left):
            if _only_makes_steps(view, by_id[name]):
                del groups[name]
        for want in wants:
            if want.is_running and places.get(want.name) == want.held:
                groups[want.name] = want.held  # its next step may be sent behind the one that runs
        return groups

    # ------------------------------------------------------------------------------------------------ order

    def _in_order(self, view: View, requests: Sequence[Request]) -> list[Turn]:
        """Requests with the steps that they have left. Those that have done their steps go first, which makes room;
        then all as scheduled. But requests of one owner and class without a due time change places with each other:
        short ones go first, see OVERTAKEN. Waiting ones for which there is no memory are left out.
        """
        lines: dict[tuple[str, int], list[tuple[float, str, Request, int]]] = {}
        places = list[tuple[Request, tuple[str, int] | None]]()
        slots = view.config.max_num_seqs
        for request in requests:
            head, is_waiting, case = request.head, request.status is Status.WAITING, self._cases[request.id]
            line = (head.owner, head.priority) if due(head) is None else None
            places.append((request, line))
            steps = -1 if is_waiting else request.progress.steps_left
            slots -= steps > 0
            if line is not None:
                place = case.place if is_waiting else case.place_in_line(request, steps, len(view.ranks))
                lines.setdefault(line, []).append((place, request.id, request, steps))
        for of in lines.values():
            of.sort(key=lambda each: each[:2], reverse=True)
        done, others = list[Turn](), list[Turn]()
        for request, line in places:
            steps = -1
            if line is not None:
                _, _, request, steps = lines[line].pop()
            if request.status is Status.WAITING:
                slots -= 1
                if slots < 0:
                    continue
            steps = request.progress.steps_left if steps < 0 else steps
            (others if steps else done).append((request, steps))
        return done + others

    # ------------------------------------------------------------------------------------------------ wants

    def _want_of_small(self, view: View, small: Collection[str]) -> Want:
        """One rank, if possible that which they had."""
        held = (self._shared,) if self._shared in view.ranks else ()
        is_running = any(each.progress.in_flight for each in view.requests.running if each.id in small)
        return Want(SMALL, 0, {1: 0.0}, 0.0, 1, held, is_running)

    def _want(self, view: View, request: Request, steps: int, now: float, *, is_crowd: bool) -> Want:
        is_running = bool(request.progress.in_flight)
        held = max(request.sent_to.values(), key=len, default=()) if is_running else self._places.get(request.id, ())
        if not set(held) <= set(view.ranks):
            held = ()
        case = self._cases[request.id]
        if not _makes_steps(view, request, steps):
            return Want(request.id, 0, case.seconds, 0.0, 1, held, is_running, request.progress.is_ending)
        first = 1 if not steps else case.lossless if is_crowd else case.efficient
        want = Want(request.id, steps, case.seconds, case.others(request), first, held, is_running)
        time = due(request.head)
        return want if time is None else replace(want, first=max(want.first, want.degree_within(time - now)))

    def _case(self, view: View, request: Request) -> Case:
        case = self._cases.get(request.id)
        if case is None:
            speeds, left = self._speeds.of(view, request), self._work.of(view, request)
            efficient, lossless = (_degree(speeds.seconds, share) for share in (EFFICIENT, LOSSLESS))
            is_small = speeds.is_small or (speeds.useful == 1 and request.spec.is_mask_aware)
            case = Case(speeds.seconds, efficient, lossless, is_small, left.before, left.after, 0.0)
            place = case.place_in_line(request, request.progress.steps_left, len(view.ranks))
            case = self._cases[request.id] = replace(case, place=place)
        return case


def _turns(ordered: Sequence[Turn], small: Collection[str]) -> list[Turn]:
    """The same, of all small requests only the first: when it is its turn all of them share a rank."""
    first = next((turn for turn in ordered if turn[0].id in small), None)
    return [turn for turn in ordered if turn is first or turn[0].id not in small]


def _keep_coming(requests: Sequence[Request], now: float) -> bool:
    """Whether the last of them came less than half as long ago as the first. requests: at least one."""
    arrivals = [request.head.arrival for request in requests]
    return now - max(arrivals) < (now - min(arrivals)) / 2


def _degree(seconds: Mapping[int, float], share: float) -> int:
    """The largest degree at which each rank does at least this share of what one alone does."""
    return max(degree for degree, of_step in seconds.items() if degree * of_step * share <= seconds[1])


def _makes_steps(view: View, request: Request, steps: int) -> bool:
    """Whether steps are what it does now. steps: that it has left."""
    names, progress = request.workflow.step_names, request.progress
    if any(name in progress.in_flight for name in names):
        return True
    return steps > 0 and (progress.steps_done > 0 or any(node.name in names for node in view.ready(request)))


def _only_makes_steps(view: View, request: Request) -> bool:
    """Whether all that it could do now is a step, of the kind that is predicted."""
    return view.ready(request) == [request.workflow.steps[-1]]


@dataclass(slots=True)
class ElasticPass(GroupPass):
    """Large requests have groups; the others run as with `step_batching`, on one rank, and decode on none of these
    groups.
    """

    shared: int = 0  # rank of these

    def _admit(self) -> list[Request]:
        return GroupPass._admit(self) + StepPass._admit(self)

    def _rank(self, request: Request, node: Node) -> int:
        if request.id in self.groups:
            return GroupPass._rank(self, request, node)
        if node.name in request.workflow.after_rounds:
            last = self.view.ranks[-1]
            return self.shared if any(last in of for of in self.groups.values()) else last
        device = self._device(request, node)
        return self.shared if device is None else device

    def _ranks(self, request: Request, node: Node) -> RankIds:
        if request.id in self.groups:
            return GroupPass._ranks(self, request, node)
        return (self._rank(request, node),)
