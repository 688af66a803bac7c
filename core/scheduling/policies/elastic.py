"""elastic: how many ranks compute which request's steps, decided anew between any two of its steps.

It starts from DDiT (policy `ddit`). Beyond that: short requests may overtake long ones, for a time that is bounded;
ranks leave requests as soon as others need them; ranks that nobody needs are used beyond a request's useful degree, and
small requests share steps on one rank, as with `step_batching`, while large ones have the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.graph.workflow import Node
from core.messages.worker import Batch, BatchResult
from core.scheduling.deadlines import due
from core.scheduling.dispatch import Decision
from core.scheduling.policies.buddies import Ranks
from core.scheduling.policies.group_pass import GroupPass
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.policies.rank_plan import Want, moves, plan
from core.scheduling.policies.step_batching import StepPass, eligible
from core.scheduling.policies.step_speeds import StepSpeeds
from core.scheduling.policies.work_left import WorkLeft
from core.scheduling.request import Request, Status
from core.scheduling.view import View

AGING = 4.0
"""Seconds of work by which a request may be longer than a later one, for every second that it came before it, and go
first nevertheless. So no request that comes R / AGING seconds after one with R seconds of work overtakes it.
"""

EFFICIENT, LOSSLESS = 0.95, 0.99
"""Ranks are given to a request before later ones get any as long as each does at least this share of what one alone
would do, so that little is lost by it, and it ends sooner. While more requests are there than ranks the second one
counts: where work comes faster than it is done, what is lost adds up.
"""

FORGET_EVERY = 64
"""Passes after which what is known of waiting requests is predicted again."""


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

    def place_in_line(self, request: Request, steps: int) -> float:
        """By what requests are ordered, see AGING. steps: that it has left."""
        return self.others(request) + steps * self.seconds[1] + AGING * request.head.arrival


class Elastic(SchedulingPolicy):
    """Keeps on which ranks the states of requests are, and predictions."""

    shares_steps = True

    def __init__(self) -> None:
        self._speeds = StepSpeeds()
        self._work = WorkLeft()
        self._places: dict[str, Ranks] = {}  # request id -> ranks of its last batch that is done
        self._cases: dict[str, Case] = {}  # by request id
        self._passes = 0

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
        self._work.next_pass()
        self._passes += 1
        if self._passes % FORGET_EVERY == 0:
            self._cases.clear()
        requests = eligible(view)
        large = [] if len(view.ranks) == 1 else [each for each in requests if not self._case(view, each).is_small]
        if not large:
            return ElasticPass(view).run()
        ranks = view.ranks[len(requests) > len(large) :]
        ordered = self._in_order(view, large)
        wants = {
            request.id: self._want(view, request, steps, now, has_many=len(ordered) > len(ranks))
            for index, (request, steps) in enumerate(ordered)
            if index < len(ranks) or request.progress.in_flight
        }
        places = plan(list(wants.values()), ranks)
        groups = moves(list(wants.values()), places, ranks)
        for name, want in wants.items():
            if want.is_running and places.get(name) == want.held:
                groups[name] = want.held  # its next step may be sent behind the one that runs
        admitted = [request for request, _ in ordered if request.id in groups]
        apart = frozenset(request.id for request in large)
        return ElasticPass(view, apart=apart, groups=groups, admitted=admitted).run()

    # ------------------------------------------------------------------------------------------------ order

    def _in_order(self, view: View, requests: Sequence[Request]) -> list[tuple[Request, int]]:
        """Requests with the steps that they have left. Those that have done their steps go first, which makes room;
        then all as scheduled. But requests of one owner and class without a due time change places with each other:
        short ones go first, see AGING. Waiting ones for which there is no memory are left out.
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
                place = case.place if is_waiting else case.place_in_line(request, steps)
                lines.setdefault(line, []).append((place, request.id, request, steps))
        for of in lines.values():
            of.sort(key=lambda each: each[:2], reverse=True)
        done, others = list[tuple[Request, int]](), list[tuple[Request, int]]()
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

    def _want(self, view: View, request: Request, steps: int, now: float, *, has_many: bool) -> Want:
        is_running = bool(request.progress.in_flight)
        held = max(request.sent_to.values(), key=len, default=()) if is_running else self._places.get(request.id, ())
        if not set(held) <= set(view.ranks):
            held = ()
        case = self._cases[request.id]
        if not _makes_steps(view, request, steps):
            return Want(request.id, 0, case.seconds, 0.0, 1, held, is_running)
        first = case.lossless if has_many else case.efficient
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
            place = case.place_in_line(request, request.progress.steps_left)
            case = self._cases[request.id] = replace(case, place=place)
        return case


def _degree(seconds: Mapping[int, float], share: float) -> int:
    """The largest degree at which each rank does at least this share of what one alone does."""
    return max(degree for degree, of_step in seconds.items() if degree * of_step * share <= seconds[1])


def _makes_steps(view: View, request: Request, steps: int) -> bool:
    """Whether steps are what it does now. steps: that it has left."""
    names, progress = request.workflow.step_names, request.progress
    if any(name in progress.in_flight for name in names):
        return True
    return steps > 0 and (progress.steps_done > 0 or any(node.name in names for node in view.ready(request)))


@dataclass(slots=True)
class ElasticPass(GroupPass):
    """Large requests have groups; the others run as with `step_batching`, on one rank each, and decode on none of these
    groups.
    """

    def _admit(self) -> list[Request]:
        return GroupPass._admit(self) + StepPass._admit(self)

    def _rank(self, request: Request, node: Node) -> int:
        if request.id in self.groups:
            return GroupPass._rank(self, request, node)
        rank = StepPass._rank(self, request, node)
        is_taken = node.name in request.workflow.after_rounds and any(rank in of for of in self.groups.values())
        return self.view.ranks[0] if is_taken else rank

    def _ranks(self, request: Request, node: Node) -> Ranks:
        if request.id in self.groups:
            return GroupPass._ranks(self, request, node)
        return (self._rank(request, node),)
