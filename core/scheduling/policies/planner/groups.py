"""Groups: how many ranks each large request has, and how many ranks the small ones have together, in one order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf, isinf
from typing import NamedTuple

from core.graph.workflow import op_of
from core.handles import RankIds
from core.scheduling.policies.buddies import power_of_two
from core.scheduling.policies.planner.predictions import Prediction, Predictions, able_ranks
from core.scheduling.policies.planner.rank_plan import Contender, degrees, moves, pays, plan
from core.scheduling.policies.planner.rank_sets import RankSets
from core.scheduling.policies.step_speeds import StepCost
from core.scheduling.requests.deadlines import due, must_be_served
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

EFFICIENT, LOSSLESS = 0.95, 0.99
"""A request gets more ranks, before later requests get any, while each rank does at least this share of what one rank
alone does: it ends sooner, and little is lost. In a crowd LOSSLESS counts instead of EFFICIENT, because there work
arrives faster than it is done, and losses add up.
"""

CROWD = 2
"""More requests per rank than this are a crowd, if they did not all arrive at once."""

SMALL = ""
"""Name of the small requests as one contender, which takes turns with the large requests."""

LANE = "/"
"""Begins the names of their lanes as contenders, which no id of a request does."""


class Groups:
    """The groups of one policy."""

    def __init__(self, predictions: Predictions) -> None:
        self._predictions = predictions
        self._sets = RankSets()
        self._places: dict[str, RankIds] = {}  # request id -> ranks of the last batch that it was done in
        # As of the last `line_up`.
        self._queue: list[Request] = []  # in order; of the small ones only the first
        self._small: list[Request] = []  # in order
        self._large = set[str]()  # ids of the others that have not ended
        self._able: dict[str, RankIds] = {}  # request id -> the ranks that have its model, if not all have it
        self._num_next = 0  # small ones among the first requests, of which there are as many as ranks
        self._is_crowd = False  # see CROWD
        # As of the last `choose`, for as long as neither the line nor the predictions change.
        self._known: dict[str, tuple[Hashable, Contender]] = {}  # by request id
        self._small_costs: list[StepCost] = []
        self._known_by = 0  # the view's predictions
        self._first: dict[str, int] = {}  # request id -> Contender.first at the last `choose`
        self.lanes: RankIds = ()
        """The ranks of the small requests."""
        self.moving = frozenset[int]()
        """The ranks of those that did not have the ranks that were planned for them at the last `choose`, and the
        planned ones."""

    def note_done(self, request_id: str, ranks: RankIds) -> None:
        """Note the ranks of a batch that has ended, with a request. One that is not large, or has ended, is ignored."""
        if request_id in self._large:
            self._places[request_id] = ranks

    def note_live(self, ranks: RankIds) -> None:
        """Note which ranks live."""
        self._sets.note_live(ranks)

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._places.pop(request_id, None)
        self._known.pop(request_id, None)
        self._large.discard(request_id)

    def line_up(
        self,
        view: View,
        requests: Sequence[Request],
        small: Collection[str],
        standing: Iterable[Request],
        now: float,
    ) -> None:
        """Note the requests that may run, in scheduling order, some of them large. small: ids of the others. standing:
        large ones that stand still, whose ranks are taken only while these compute them.
        """
        self._able = {each.id: able for each in requests if (able := able_ranks(view, each))}
        ordered = self._in_order(view, requests, now)
        self._known, self._small_costs = {}, []
        large = [each for each in requests if each.id not in small]
        self._large = {each.id for each in (*large, *standing)}
        self._small = [each for each in ordered if each.id in small]
        self._queue = [each for each in ordered if each.id in self._large or each is self._small[0]]
        self._num_next = sum(each.id in small for each in ordered[: len(view.ranks)])
        self._is_crowd = len(self._queue) > CROWD * len(view.ranks) and _keep_coming(self._queue, now)

    def choose(self, view: View, now: float) -> tuple[dict[str, RankIds], list[Request], RankIds]:
        """(large request -> the ranks on which it may be given work, these requests in order, ranks on which small ones
        may).
        """
        if view.predictions != self._known_by:
            self._known, self._small_costs, self._known_by = {}, [], view.predictions
        queue = self._ready_queue(view)
        contenders = [
            self._contender(view, each, now) if each.id in self._large else self._small_contender(view)
            for each in queue
        ]
        contenders = self._with_lanes(view, contenders)
        self._first = {each.name: each.first for each in contenders}
        places = plan(contenders, view.ranks, self._sets)
        groups = moves(contenders, places, view.ranks, self._sets)
        for ranks in groups.values():
            self._sets.note(ranks)
        moving = set[int]()
        for each in contenders:
            has, is_to_have = groups.get(each.name, each.held), places.get(each.name, ())
            if has != is_to_have:
                moving.update(has, is_to_have)
            elif each.is_running and each.held:
                groups[each.name] = each.held  # its next step may be queued behind the running one
        self.moving = frozenset(moving)
        lanes = tuple(ranks[0] for name, ranks in groups.items() if name.startswith(LANE))
        self.lanes = lanes or self.lanes
        groups = {name: ranks for name, ranks in groups.items() if not name.startswith(LANE)}
        return groups, [request for request in queue if request.id in groups], lanes

    def keeps(self, view: View, now: float, request: Request, ranks: RankIds) -> bool:
        """Whether a large request that has these ranks is to have as many for its next step, as far as that depends on
        itself: it has not come to need more to be in time, and those that it does not need still pay.
        """
        contender = self._contender(view, request, now)
        first = contender.first
        return first == self._first.get(request.id) and (len(ranks) <= first or pays(contender, len(ranks)))

    @property
    def has_small(self) -> bool:
        """Whether any of the small requests that lined up has not ended."""
        return self._first_small is not None

    @property
    def _first_small(self) -> Request | None:
        return next((each for each in self._small if each.is_live), None)

    def _ready_queue(self, view: View) -> list[Request]:
        """The requests that could be given ranks now, of the small ones only the first that has not ended: those that
        have done all steps, as many others as there are ranks that have their models, but for those that stand still,
        and all that are computed.
        """
        first_small = self._first_small
        running = [each for each in view.requests.running if each.id in self._large]
        queue = {each.id: each for each in running if not each.progress.steps_left}
        most, of_model = len(queue) + len(view.ranks), Counter[RankIds]()
        for request in self._queue:
            if len(queue) >= most:
                break
            if request.id in self._large and request.stands_still:
                continue
            if request.id in self._large and (able := self._able.get(request.id)):
                of_model[able] += 1
                if of_model[able] > len(able):
                    continue
            mine = first_small if self._small and request is self._small[0] else request
            if mine is not None and mine.is_live:
                queue.setdefault(mine.id, mine)
        queue |= {each.id: each for each in running if each.progress.in_flight}
        return list(queue.values())

    # ------------------------------------------------------------------------------------------------ order

    def _in_order(self, view: View, requests: Sequence[Request], now: float) -> list[Request]:
        """Requests in order. Those that have done all steps go first, because that makes room. The others keep the
        scheduling order of owners and classes; the requests of one owner, class and set of ranks are in the order of
        `_smith`. Waiting requests for which there is no slot are left out.
        """
        lines: dict[tuple[str, int, RankIds], list[_Member]] = {}  # (owner, class, ranks) -> its requests
        places = list[tuple[str, int, RankIds]]()
        slots, seconds = view.config.max_num_seqs, defaultdict[RankIds, float](float)
        for request in requests:
            head, is_waiting = request.head, request.status is Status.WAITING
            prediction = self._predictions.of(view, request)
            steps = request.progress.steps_left
            slots -= not is_waiting and steps > 0
            able = self._able.get(request.id, ())
            num_ranks = len(able or view.ranks)
            place = prediction.place_in_line(request, steps, num_ranks)
            work = prediction.work(request) / num_ranks
            seconds[able] += work
            places.append((head.owner, head.priority, able))
            slack = self._slack(request, prediction, steps, now)
            lines.setdefault(places[-1], []).append(_Member(place, request, steps, work, slack))
        ordered = {line: _smith(members, seconds[line[2]]) for line, members in lines.items()}
        done, others = list[Request](), list[Request]()
        for line in places:
            member = ordered[line].pop()
            if member.request.status is Status.WAITING:
                slots -= 1
                if slots < 0:
                    continue
            (others if member.steps else done).append(member.request)
        return done + others

    def _slack(self, request: Request, prediction: Prediction, steps: int, now: float) -> float:
        """Seconds until a request has to begin, with as many ranks as are efficient, or more if that is now; inf: it
        has no due time, or is late; -inf: so it is, and has waited so long that it must be served.
        """
        time, beside = due(request.head), prediction.other_seconds(request)
        if time is not None and now + beside + steps * prediction.least_step <= time:
            return max(0.0, time - now - beside - steps * prediction.seconds[prediction.largest_degree(EFFICIENT)])
        return -inf if must_be_served(request.head, now) else inf

    # ------------------------------------------------------------------------------------------------ contenders

    def _small_contender(self, view: View) -> Contender:
        """All small requests together, which need one rank at least. Its steps are rounds in which each of them makes
        one, so that what further ranks save is summed over the requests.
        """
        mine = [each for each in self._small if each.is_live]
        number = len(mine)
        if len(self._small_costs) != number:
            self._small_costs = [self._predictions.of(view, each).cost for each in mine]
        base = max(cost.base for cost in self._small_costs)
        extra = sum(cost.extra for cost in self._small_costs)
        ables = {self._able.get(each.id, ()) for each in mine} if self._able else {()}
        able = () if () in ables else tuple(sorted(set().union(*ables)))
        seconds, lanes = dict[int, float](), 1
        while lanes <= min(number, len(able or view.ranks)):
            seconds[lanes] = number * (base + extra / lanes)
            lanes *= 2
        steps = round(sum(each.progress.steps_left for each in mine) / number)
        held = tuple(each for each in self.lanes if each in (able or view.ranks))
        # On one lane so many of them take at most twice the time of one.
        together = 1 + int(base * number / extra) if extra else number
        first = power_of_two(max(1, min(self._num_next // together, max(seconds))))
        return Contender(SMALL, steps, seconds, 0.0, first, held, is_running=False, able=able)

    def _with_lanes(self, view: View, contenders: list[Contender]) -> list[Contender]:
        """These contenders with the small requests' lanes in place of all small ones together."""
        small = next((each for each in contenders if each.name == SMALL), None)
        if small is None:
            return contenders
        ending = {rank for each in contenders if each.is_ending for rank in each.held}
        others = [each for each in contenders if not each.is_ending]
        number = max(1, degrees(others, [rank for rank in view.ranks if rank not in ending]).get(SMALL, 0))
        busy = {rank for each in self._small for ranks in each.sent_to.values() for rank in ranks}
        # A large request that runs on a lane would else have to leave it for requests that are not there.
        taken = {rank for each in contenders if each.is_running for rank in each.held} - busy
        held = sorted((rank for rank in small.held if rank not in taken), key=lambda rank: rank not in busy)
        lanes = list[Contender]()
        for lane in range(max(number, sum(rank in busy for rank in held))):
            ranks: RankIds = (held[lane],) if lane < len(held) else ()
            is_running = not busy.isdisjoint(ranks)
            lanes.append(Contender(f"{LANE}{lane}", 0, {1: 0.0}, 0.0, 1, ranks, is_running, able=small.able))
        index = contenders.index(small)
        return contenders[:index] + lanes + contenders[index + 1 :]

    def _contender(self, view: View, request: Request, now: float) -> Contender:
        place = self._places.get(request.id, ())
        doings = _doings(request, place)
        known, found = self._known.get(request.id, (None, None))
        if found is None or known != doings:
            found = self._made_contender(view, request, place)
            self._known[request.id] = doings, found
        time = due(request.head) if found.steps else None
        within = 1 if time is None else found.degree_within(time - now)
        return found if within <= found.first else replace(found, first=within)

    def _made_contender(self, view: View, request: Request, place: RankIds) -> Contender:
        """A contender as if it had no due time. place: ranks of the last batch that it was done in."""
        steps = request.progress.steps_left
        sent = [
            ranks for (node, _), ranks in request.sent_to.items() if ranks == place or not _is_beside(request, node)
        ]
        is_running, held = bool(sent), max(sent, key=len, default=place)
        able, makes_steps = able_ranks(view, request), _makes_steps(view, request, steps)
        if not set(held) <= set((makes_steps and able) or view.ranks):
            held = ()
        prediction = self._predictions.of(view, request)
        if not makes_steps:
            is_ending = request.progress.is_ending
            return Contender(request.id, 0, prediction.seconds, 0.0, 1, held, is_running, is_ending, able)
        first = prediction.largest_degree(LOSSLESS if self._is_crowd else EFFICIENT) if steps else 1
        other_seconds = prediction.other_seconds(request)
        return Contender(request.id, steps, prediction.seconds, other_seconds, first, held, is_running, able=able)


def _doings(request: Request, place: RankIds) -> tuple[Hashable, ...]:
    """What a request does now, as far as a contender depends on it: while this is equal, the contender is. place: ranks
    of the last batch that it was done in.
    """
    progress, is_alone = request.progress, request.runs_on_one_rank
    sent, over = len(request.sent_to), len(progress.over)  # of nodes in flight, and that do not run any more
    doings = progress.steps_left, sent, over, progress.is_restarting, request.status, place, is_alone
    return *doings, request.stands_still


class _Member(NamedTuple):
    """A request of a line."""

    place: float  # see Prediction.place_in_line
    request: Request
    steps: int  # remaining
    work: float  # seconds that all ranks together need for it
    slack: float  # see `Groups._slack`

    def limit(self, scale: float) -> float:
        """Seconds until it has to be done, if all ranks compute it together with `1 / scale` of their time."""
        return self.slack + scale * self.work


def _smith(members: Sequence[_Member], total: float) -> list[_Member]:
    """The requests of one line, the last one first, so that as many as possible begin when they must, and short ones go
    first where that is so. From the end of all work on, of those that could still begin then the one with the last
    place is last (Smith, Naval Research Logistics Quarterly 1956). total: seconds of the work of all lines, of which
    each is assumed to get its share all the time.
    """
    in_line = sorted(members, key=lambda each: (each.place, each.request.id), reverse=True)
    if all(isinf(each.slack) for each in members):
        return in_line
    own = sum(each.work for each in members)
    scale = total / own if own else 1.0
    left_out = _left_out(members, scale)
    patient = [each for each in in_line if each.slack == -inf]
    found = [each for each in in_line if each.request.id in left_out]
    waiting = [each for each in members if each.slack > -inf and each.request.id not in left_out]
    waiting.sort(key=lambda each: (each.limit(scale), each.request.id), reverse=True)
    heap, index, left = list[tuple[float, str, int]](), 0, scale * sum(each.work for each in (*waiting, *patient))
    while len(found) < len(members) - len(patient):
        while index < len(waiting) and (not heap or waiting[index].limit(scale) >= left):
            heappush(heap, (-waiting[index].place, waiting[index].request.id, index))
            index += 1
        found.append(waiting[heappop(heap)[-1]])
        left -= scale * found[-1].work
    return found + patient


def _left_out(members: Sequence[_Member], scale: float) -> set[str]:
    """The ids of those that have a due time and go after all others, so that as many as possible are in time: while one
    cannot be, that with most work is left out (Moore and Hodgson). scale: see `_smith`.
    """
    chosen, total, found = list[tuple[float, str]](), 0.0, set[str]()
    for each in sorted(members, key=lambda each: (each.limit(scale), each.request.id)):
        if isinf(each.slack):
            continue
        heappush(chosen, (-each.work, each.request.id))
        total += scale * each.work
        if total > each.limit(scale):
            work, name = heappop(chosen)
            total += scale * work
            found.add(name)
    return found


def _keep_coming(requests: Sequence[Request], now: float) -> bool:
    """Whether the last request arrived less than half as long ago as the first. requests: at least one."""
    arrivals = [request.head.arrival for request in requests]
    return now - max(arrivals) < (now - min(arrivals)) / 2


def _makes_steps(view: View, request: Request, steps: int) -> bool:
    """Whether a request makes steps now, or does so next. steps: its remaining steps."""
    if request.stands_still:
        return False  # after the one that may be made now, it needs its ranks no more
    names, progress = request.workflow.step_names, request.progress
    if any(name in progress.in_flight for name in names):
        return True
    return steps > 0 and (progress.steps_done > 0 or any(node.name in names for node in view.ready(request)))


def _is_beside(request: Request, node: str) -> bool:
    """Whether a node works for steps, perhaps on a rank beside theirs."""
    return op_of(request.workflow.node(node)).serves_step
