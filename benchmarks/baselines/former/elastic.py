"""elastic: how many ranks compute each request's steps, decided anew between any two of them.

It starts from DDiT (policy `ddit`) and adds four things. Short requests may overtake long ones, for a bounded time.
Ranks leave a request as soon as others need them. Ranks that nobody needs are used beyond a request's useful degree.
Small requests share steps on one rank, as with `step_batching`, while large ones have the other ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.baselines.former.deadlines import MayJoin
from benchmarks.baselines.former.group_pass import GroupPass
from benchmarks.baselines.former.lateness import Lateness
from benchmarks.baselines.former.rank_plan import Contender, better_to_wait, moves, plan
from benchmarks.baselines.former.step_batching import StepPass, eligible
from benchmarks.baselines.former.step_speeds import StepSpeeds
from benchmarks.baselines.former.work_estimator import WorkEstimator
from core.graph.workflow import Node
from core.handles import RankIds
from core.messages.worker import Batch, BatchResult
from core.scheduling.dispatch import Decision
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.deadlines import due
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

OVERTAKEN = 1.5
"""Shorter requests overtake a longer one if they arrive after it by at most this many times the seconds that all ranks
together would need for its remaining work.
"""

EFFICIENT, LOSSLESS = 0.95, 0.99
"""A request gets more ranks, before later requests get any, while each rank does at least this share of what one rank
alone does: it ends sooner, and little is lost. In a crowd LOSSLESS counts instead of EFFICIENT, because there work
arrives faster than it is done, and losses add up.
"""

CROWD = 2
"""More requests per rank than this are a crowd, if they did not all arrive at once."""

SMALL = ""
"""Name of the small requests as one contender, which takes turns with the large requests."""

RequestSteps = tuple[Request, int]
"""(request, its remaining steps)"""


@dataclass(frozen=True, slots=True)
class RequestPrediction:
    """Predictions for one request."""

    seconds: Mapping[int, float]  # degree -> seconds of a step
    efficient: int  # the largest degree that is EFFICIENT
    lossless: int  # the largest degree that is LOSSLESS
    is_small: bool  # see Speeds
    before: float  # seconds of other work before the steps
    after: float  # seconds of other work after the steps
    place: float  # its place in line when this prediction was made

    def other_seconds(self, request: Request) -> float:
        """Seconds of its remaining work besides steps."""
        return self.before + self.after if request.status is Status.WAITING else self.after

    def place_in_line(self, request: Request, steps: int, num_ranks: int) -> float:
        """The sort key of a request, lowest first, in seconds; see OVERTAKEN. steps: its remaining steps."""
        work = self.other_seconds(request) + steps * self.seconds[1]
        return request.head.arrival + OVERTAKEN * work / num_ranks


class Elastic(SchedulingPolicy):
    """Keeps predictions, and the ranks on which the states of requests are."""

    spreads_models = False

    def __init__(self) -> None:
        self._lateness = Lateness(shares_steps=True)
        self._speeds = StepSpeeds()
        self._work = WorkEstimator()
        self._places: dict[str, RankIds] = {}  # request id -> ranks of the last batch that it was done in
        self._predictions: dict[str, RequestPrediction] = {}  # by request id
        self._shared = 0  # rank of the small requests

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        for item in batch.items:
            if item.request_id in self._predictions:  # else the batch is the cache's, or the request has ended
                self._places[item.request_id] = batch.ranks

    def on_end(self, request_id: str) -> None:
        self._places.pop(request_id, None)
        self._predictions.pop(request_id, None)
        self._work.forget(request_id)
        self._lateness.forget(request_id)

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        if not view.open_ranks:
            return ()
        judgement = self._lateness.judge(view, now)
        return judgement.given_up or self._choose_work(view, judgement.may_join, now)

    def _choose_work(self, view: View, may_join: MayJoin | None, now: float) -> list[Decision]:
        if self._work.next_pass(now):
            self._predictions.clear()
        requests = eligible(view)
        small = {each.id for each in requests if len(view.ranks) == 1 or self._prediction(view, each).is_small}
        if len(small) == len(requests):
            self._shared = view.ranks[0]
            return ElasticPass(view, may_join=may_join, shared=self._shared).run()
        ordered = self._in_order(view, requests)
        groups = self._groups(view, _with_first_small(ordered, small), small, now)
        if shared := groups.pop(SMALL, ()):
            (self._shared,) = shared
        apart = frozenset(each.id for each in requests if not shared or each.id not in small)
        admitted = [request for request, _ in ordered if request.id in groups]
        return ElasticPass(
            view, apart=apart, may_join=may_join, groups=groups, admitted=admitted, shared=self._shared
        ).run()

    def _groups(self, view: View, queue: list[RequestSteps], small: Collection[str], now: float) -> dict[str, RankIds]:
        """Request id, or SMALL -> the ranks on which it may be given work. queue: see `_with_first_small`."""
        contenders = list[Contender]()
        is_crowd = len(queue) > CROWD * len(view.ranks) and _keep_coming([request for request, _ in queue], now)
        for index, (request, steps) in enumerate(queue):
            is_next = index < len(view.ranks)
            if request.id in small:
                contender = self._small_contender(view, small)
                if is_next or contender.is_running:
                    contenders.append(contender)
            elif is_next or request.progress.in_flight:
                contenders.append(self._contender(view, request, steps, now, is_crowd=is_crowd))
        places = plan(contenders, view.ranks)
        groups = moves(contenders, places, view.ranks)
        by_id = {request.id: request for request, _ in queue}
        for name in better_to_wait(contenders, places, groups, view.seconds_left):
            if _only_makes_steps(view, by_id[name]):
                del groups[name]
        for contender in contenders:
            if contender.is_running and places.get(contender.name) == contender.held:
                groups[contender.name] = contender.held  # its next step may be queued behind the running one
        return groups

    # ------------------------------------------------------------------------------------------------ order

    def _in_order(self, view: View, requests: Sequence[Request]) -> list[RequestSteps]:
        """Requests in order, with their remaining steps. Requests that have done all steps go first, because that makes
        room. The others keep the scheduling order, with one exception: among the requests of one owner and class that
        have no due time, short ones go first (see OVERTAKEN). Waiting requests for which there is no slot are left out.
        """
        # (owner, class) -> (place, id, request, steps) of each request without a due time, the last place first
        lines: dict[tuple[str, int], list[tuple[float, str, Request, int]]] = {}
        places = list[tuple[Request, tuple[str, int] | None]]()
        slots = view.config.max_num_seqs
        for request in requests:
            head, is_waiting, prediction = request.head, request.status is Status.WAITING, self._predictions[request.id]
            line = (head.owner, head.priority) if due(head) is None else None
            places.append((request, line))
            steps = -1 if is_waiting else request.progress.steps_left
            slots -= steps > 0
            if line is not None:
                place = prediction.place if is_waiting else prediction.place_in_line(request, steps, len(view.ranks))
                lines.setdefault(line, []).append((place, request.id, request, steps))
        for members in lines.values():
            members.sort(key=lambda each: each[:2], reverse=True)
        done, others = list[RequestSteps](), list[RequestSteps]()
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

    # ------------------------------------------------------------------------------------------------ contenders

    def _small_contender(self, view: View, small: Collection[str]) -> Contender:
        """All small requests together. They need one rank, if possible the one that they had."""
        held = (self._shared,) if self._shared in view.ranks else ()
        is_running = any(each.progress.in_flight for each in view.requests.running if each.id in small)
        return Contender(SMALL, 0, {1: 0.0}, 0.0, 1, held, is_running)

    def _contender(self, view: View, request: Request, steps: int, now: float, *, is_crowd: bool) -> Contender:
        is_running = bool(request.progress.in_flight)
        held = max(request.sent_to.values(), key=len, default=()) if is_running else self._places.get(request.id, ())
        if not set(held) <= set(view.ranks):
            held = ()
        prediction = self._predictions[request.id]
        if not _makes_steps(view, request, steps):
            return Contender(request.id, 0, prediction.seconds, 0.0, 1, held, is_running, request.progress.is_ending)
        first = 1 if not steps else prediction.lossless if is_crowd else prediction.efficient
        other_seconds, time = prediction.other_seconds(request), due(request.head)
        found = Contender(request.id, steps, prediction.seconds, other_seconds, first, held, is_running)
        return found if time is None else replace(found, first=max(first, found.degree_within(time - now)))

    def _prediction(self, view: View, request: Request) -> RequestPrediction:
        prediction = self._predictions.get(request.id)
        if prediction is None:
            speeds, work = self._speeds.of(view, request), self._work.remaining(view, request)
            efficient, lossless = (_degree(speeds.seconds, share) for share in (EFFICIENT, LOSSLESS))
            is_small = speeds.is_small or (speeds.useful == 1 and request.spec.is_mask_aware)
            prediction = RequestPrediction(speeds.seconds, efficient, lossless, is_small, work.before, work.after, 0.0)
            place = prediction.place_in_line(request, request.progress.steps_left, len(view.ranks))
            prediction = self._predictions[request.id] = replace(prediction, place=place)
        return prediction


def _with_first_small(ordered: Sequence[RequestSteps], small: Collection[str]) -> list[RequestSteps]:
    """`ordered`, with all small requests represented by the first one: when its turn comes, they share one rank."""
    first = next((entry for entry in ordered if entry[0].id in small), None)
    return [entry for entry in ordered if entry is first or entry[0].id not in small]


def _keep_coming(requests: Sequence[Request], now: float) -> bool:
    """Whether the last request arrived less than half as long ago as the first. requests: at least one."""
    arrivals = [request.head.arrival for request in requests]
    return now - max(arrivals) < (now - min(arrivals)) / 2


def _degree(seconds: Mapping[int, float], share: float) -> int:
    """The largest degree at which each rank does at least this share of what one rank alone does."""
    return max(degree for degree, of_step in seconds.items() if degree * of_step * share <= seconds[1])


def _makes_steps(view: View, request: Request, steps: int) -> bool:
    """Whether a request makes steps now, or does so next. steps: its remaining steps."""
    names, progress = request.workflow.step_names, request.progress
    if any(name in progress.in_flight for name in names):
        return True
    return steps > 0 and (progress.steps_done > 0 or any(node.name in names for node in view.ready(request)))


def _only_makes_steps(view: View, request: Request) -> bool:
    """Whether the only work that is ready for the request is its next denoising step."""
    return view.ready(request) == [request.step_node]


@dataclass(slots=True)
class ElasticPass(GroupPass):
    """Large requests have groups of ranks. Small requests run on one shared rank, as with `step_batching`, and are not
    decoded on a rank of any group.
    """

    shared: int = 0  # rank of the small requests

    def _admit(self) -> list[Request]:
        return GroupPass._admit(self) + StepPass._admit(self)

    def _rank(self, request: Request, node: Node) -> int:
        if request.id in self.groups:
            return GroupPass._rank(self, request, node)
        if node.name in request.workflow.after_rounds:
            last = self.view.ranks[-1]
            return self.shared if any(last in ranks for ranks in self.groups.values()) else last
        device = self._device(request, node)
        return self.shared if device is None else device

    def _ranks(self, request: Request, node: Node) -> RankIds:
        if request.id in self.groups:
            return GroupPass._ranks(self, request, node)
        return (self._rank(request, node),)
