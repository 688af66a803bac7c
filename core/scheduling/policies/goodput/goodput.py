"""goodput: as many requests as possible meet their latency objective.

Each rank and model has a set of requests that is predicted to be in time as a whole, at the speed that its batches will
really have (`core.costs.slot_schedule`). A newcomer joins it only if all stay in time; otherwise the one of them with
most work left goes, and is served if the others are done sooner than predicted. Those that could not even be in time
alone end early (`--on-late drop`) or run when no other request needs the rank (`--on-late last`).

It starts from NeuStream's scheduling (EuroSys 2025, section 4; policy `neustream`), which limits batches by an op's
share of the objective and serves first what came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from core.config import PATIENCE_SECONDS
from core.costs.prediction_margin import CERTAIN
from core.costs.slot_schedule import Pace, Turn, best_schedules
from core.failure import Failure
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.messages.worker import Batch, BatchResult
from core.scheduling.dispatch import Decision, GiveUp
from core.scheduling.policies.goodput.goodput_pass import GoodputPass
from core.scheduling.policies.goodput.headroom import Headroom
from core.scheduling.policies.goodput.pauses import Pauses
from core.scheduling.policies.goodput.rank_shares import RankShares
from core.scheduling.policies.goodput.repeated_steps import RepeatedSteps
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.policies.step_batching import eligible
from core.scheduling.policies.turns import Turns
from core.scheduling.policies.work_left import Left, WorkLeft
from core.scheduling.requests.deadlines import TOO_LATE, due, why_late
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

PLAN_EVERY = 64
"""Passes after which a plan is made again though no request came or went, since predictions are not exact."""

LOOK_AHEAD = 4
"""Requests that a plan considers, the most urgent first, as a multiple of the slots: more of them would come too late
for any slot.
"""


@dataclass(frozen=True, slots=True)
class RankLine:
    """Requests of one model that make their steps on one rank."""

    requests: tuple[Request, ...]  # in the order in which they get slots
    num_slots: int

    @property
    def served(self) -> list[Request]:
        """Those that have a slot now."""
        return [request for request in self.requests if _has_steps(request)][: self.num_slots]


@dataclass(slots=True)
class Plan:
    """Which requests are to be served."""

    lines: tuple[RankLine, ...] = ()
    others: tuple[Request, ...] = ()  # that wait and need no slot: all of their steps were made before ranks died
    given_up: tuple[GiveUp, ...] = ()
    tried: str | None = None  # id of one that is served though it is predicted to be late
    # Those that had a slot when it was looked at the last time; of a line the one that is due first first.
    served: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.go_on()

    def go_on(self) -> bool:
        """Give slots of requests that have no steps left to the next ones in their lines; whether all are taken."""
        num_slots = len(self.served)
        self.served = [request for line in self.lines for request in line.served]
        return len(self.served) >= num_slots


def _has_steps(request: Request) -> bool:
    return request.is_live and request.progress.steps_left > 0


@dataclass(slots=True)
class Case:
    """A request with steps left, as judged for a plan."""

    request: Request
    left: Left
    seconds: float  # of computing until it is due; inf: it has no due time
    is_late: bool  # it cannot be in time

    @property
    def can_be_in_time(self) -> bool:
        """Whether it has a due time that it can meet."""
        return not self.is_late and self.seconds < inf


class Goodput(SchedulingPolicy):
    """Keeps its plan between passes.

    steps_apart: whether ranks are processes of one device, of which the first makes the steps and the last does all
    else. By default each has a device, and ops are spread over them by `RankShares`.
    """

    gives_up = True

    def __init__(self, *, steps_apart: bool = False) -> None:
        self._work = WorkLeft()
        self._shares = None if steps_apart else RankShares()
        self._pauses = Pauses()
        self._headroom = Headroom()
        self._turns = Turns()
        self._repeated = RepeatedSteps()
        self._plan = Plan()
        self._ranks: tuple[int, ...] = ()  # that lived when it was made
        self._passes_left = 0  # until it is made again
        self._tried = set[str]()  # ids of those that a plan has served though they were late
        # Since this was looked at the last time:
        self._is_slot_left = False  # a request may have left its slot
        self._has_room = False  # a request has ended, or no other of its line took its slot

    def on_arrival(self, request: Request) -> None:
        self._passes_left = 0

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        self._pauses.note(batch, result)

    def on_end(self, request_id: str) -> None:
        if all(request_id != each.request.id for each in self._plan.given_up):  # the plan is made without these
            self._is_slot_left = self._has_room = True
        self._tried.discard(request_id)
        self._repeated.drop(request_id)
        self._work.forget(request_id)
        self._headroom.note_end()
        if self._shares is not None:
            self._shares.forget(request_id)

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        self._work.next_pass(now)
        self._passes_left -= 1
        is_new = self._passes_left < 0 or view.ranks != self._ranks or self._may_be_better(view)
        if is_new:
            self._make_plan(view, now)
        again = self._repeated.next(view, self._plan.served, self._shares)
        if again is None and not is_new and self._is_stale(view):
            self._make_plan(view, now)
        plan, given_up = self._plan, self._given_up()
        if again is not None and not plan.others:
            self._turns.note_sent(now)
            self._is_slot_left |= any(each.progress.steps_left == 1 for batch in again for each, _ in batch.items)
            return [*given_up, *again]
        gone = frozenset(each.request.id for each in given_up)
        decisions = GoodputPass(view, served=plan.served, others=plan.others, gone=gone, shares=self._shares).run()
        decisions = self._turns.choose(view, decisions, now, besides=self._step_ranks(view))
        self._repeated.note(decisions)
        self._is_slot_left = True
        return [*given_up, *decisions]

    def _may_be_better(self, view: View) -> bool:
        """Whether another plan may be better: there may be room for a request without a slot, or fewer should share
        steps. A slot that is left goes to the next in line before.
        """
        plan = self._plan
        if self._is_slot_left:
            self._is_slot_left = False
            self._has_room |= not plan.go_on()
        if not self._has_room and plan.served:
            return False
        self._has_room = False
        served = {request.id for request in plan.served}
        return len(served) > len(plan.lines) or any(
            request.id not in served and (request.progress.steps_left or request.status is Status.WAITING)
            for request in view.requests.live()
        )

    def _is_stale(self, view: View) -> bool:
        """The same where a batch cannot be repeated, as one of it may have ended, or be set back: what ranks take with
        them when they die may put requests back to where no plan has seen them, at any time until these have ended.
        """
        served = self._plan.served
        if any(request.has_lost_rank for request in (*served, *view.requests.running)):
            return True
        self._is_slot_left = not all(map(_has_steps, served))
        return self._is_slot_left and self._may_be_better(view)

    def _make_plan(self, view: View, now: float) -> None:
        self._passes_left, self._ranks = PLAN_EVERY, view.ranks
        self._is_slot_left = self._has_room = False
        self._repeated.forget()
        self._plan = Planner(view, now, self._work, self._shares, self._headroom.value * self._pauses.stretch).plan()
        if self._plan.tried is not None:
            self._tried.add(self._plan.tried)

    def _given_up(self) -> list[GiveUp]:
        """Of the plan, unless they have ended since."""
        if not self._plan.given_up:
            return []
        given_up = [each for each in self._plan.given_up if each.request.is_live]
        for each in given_up:
            if each.request.status is Status.RUNNING and each.request.id not in self._tried:
                self._headroom.note_wasted()
        return given_up

    def _step_ranks(self, view: View) -> set[int]:
        """Where steps are made: there, plans count on the order of `StepPass`, by which what finishes requests goes
        first. On other ranks ops take turns.
        """
        if self._shares is None:
            return {view.ranks[0]}
        return {self._shares.home(view, request) for request in self._plan.served if request.is_live}


@dataclass(slots=True)
class Planner:
    """Makes one plan; `plan` is called once."""

    view: View
    now: float
    work: WorkLeft
    shares: RankShares | None
    stretch: float  # time that passes, as a multiple of predicted computing
    num_models: int = 1  # that requests need

    def plan(self) -> Plan:
        requests = eligible(self.view)
        if self.shares is not None:
            self.shares.update(self.view, requests, self.work)
        cases = [self._judge(request) for request in requests]
        tried = self._tried(cases)
        given_up = tuple(self._given_up(cases, tried))
        gone = {each.request.id for each in given_up}
        self.num_models = len({each.head.model for each in self.view.requests.live() if each.id not in gone}) or 1
        groups: dict[str, list[Case]] = {}  # by model: those of one share steps
        for case in cases:
            if case.request.id not in gone and case.left.steps:
                groups.setdefault(case.request.head.model, []).append(case)
        lines = [line for group in groups.values() for line in self._lines(group, tried)]
        others = [case.request for case in cases if case.request.id not in gone and not case.left.steps]
        waiting = tuple(each for each in others if each.status is Status.WAITING)
        return Plan(tuple(lines), waiting, given_up, None if tried is None else tried.request.id)

    def _judge(self, request: Request) -> Case:
        left, time = self.work.of(self.view, request), due(request.head)
        seconds = inf if time is None else (time - self.now) / self.stretch
        return Case(request, left, seconds, left.alone > seconds)

    def _tried(self, cases: Sequence[Case]) -> Case | None:
        """While none can be in time, the first late one that yet may be, of those that have begun if there are any:
        predictions may be wrong, and only batches put them right. Requests without a due time do not prevent that.
        """
        if any(case.can_be_in_time for case in cases):
            return None
        late = (case for case in cases if case.is_late)
        doubtful = (case for case in late if why_late(case.request.head, self._end(case, CERTAIN)) is None)
        return min(doubtful, key=lambda case: case.request.status is Status.WAITING, default=None)

    def _end(self, case: Case, share: float) -> float:
        """When a request is done that has a rank for itself and takes this share of what is predicted."""
        return self.now + share * case.left.alone

    def _given_up(self, cases: Sequence[Case], tried: Case | None) -> Iterator[GiveUp]:
        """Of the late requests those that are not worth a rank, even one that no other needs: they would slow other
        ranks down, and newcomers would wait for their steps.
        """
        is_needed = any(case.can_be_in_time for case in cases)
        for case in cases:
            failure = self._why_given_up(case, is_needed) if case.is_late and case is not tried else None
            if failure is not None:
                yield GiveUp(case.request, failure)

    def _why_given_up(self, case: Case, is_needed: bool) -> Failure | None:
        """It is predicted to miss its timeout, or its objective, where requests are dropped for that. One that has
        begun may miss its objective while no other needs the rank, and until that is certain.
        """
        head, has_begun = case.request.head, case.request.status is Status.RUNNING
        if head.deadline is not None and self._end(case, 1.0) > head.deadline:
            return TOO_LATE
        if self.view.config.on_late != "drop" or (has_begun and not is_needed):
            return None
        return why_late(head, self._end(case, CERTAIN if has_begun else 1.0))

    # ------------------------------------------------------------------------------------------------ the set

    def _lines(self, mine: Sequence[Case], tried: Case | None) -> Iterable[RankLine]:
        """Of a model. Late requests have slots on ranks where no other could be served. The one that is tried goes
        before requests without a due time, unless one of these is patient.
        """
        in_time = [case for case in mine if not case.is_late or self._is_patient(case)]
        late = [case for case in mine if case.is_late and not self._is_patient(case)]
        first = [case for case in late if case is tried]
        if in_time and first and not any(map(self._is_patient, in_time)):
            parts = [first, in_time, [case for case in late if case is not tried]]
        else:
            parts = [in_time, late]
        ranks = self.view.ranks if self.shares is not None else self.view.ranks[:1]
        lines = dict[int, RankLine]()
        for part in parts:
            lines |= self._scheduled(part, [rank for rank in ranks if rank not in lines])
        if self.shares is not None:
            for rank, line in lines.items():
                for request in line.requests:
                    self.shares.settle(request, rank)
        return lines.values()

    def _is_patient(self, case: Case) -> bool:
        """Whether a request is to be served though it is late, or has no due time, because it has waited so long."""
        has_no_due = case.is_late or case.seconds == inf
        return has_no_due and self.now - case.request.head.arrival > PATIENCE_SECONDS * (1 + case.request.head.priority)

    def _scheduled(self, cases: Sequence[Case], ranks: Sequence[int]) -> dict[int, RankLine]:
        """By rank, where any of these is served. ranks: those that may serve them."""
        able = {case.request.id: self._able(case.request, ranks) for case in cases}
        cases = [case for case in cases if able[case.request.id]]
        if not cases:
            return {}
        most = self._most_slots(cases[0].request)
        cases = cases[: LOOK_AHEAD * most * len(ranks)]
        turns = [self._turn(case, able[case.request.id]) for case in cases]
        pace, starts = self._pace(cases, min(most, len(cases))), [self.view.wait_seconds(rank) for rank in ranks]
        schedules = best_schedules(turns, most, pace, starts, blocks=self._blocks)
        chosen = {index for schedule in schedules for index in schedule.chosen}
        found = dict[int, RankLine]()
        for place, (rank, schedule) in enumerate(zip(ranks, schedules, strict=True)):
            indexes = schedule.chosen
            if not indexes:  # one that would be in time alone may seem late where predictions are rounded
                others = (index for index, turn in enumerate(turns) if place in turn.ranks and index not in chosen)
                indexes = tuple(islice(others, 1))
                chosen.update(indexes)
            if indexes:
                found[rank] = RankLine(tuple(cases[index].request for index in indexes), schedule.num_slots)
        return found

    def _able(self, request: Request, ranks: Sequence[int]) -> tuple[int, ...]:
        """Places of those of these ranks that can make a request's steps."""
        able = ranks if self.shares is None else self.shares.able(self.view, request)
        return tuple(place for place, rank in enumerate(ranks) if rank in able)

    @property
    def _blocks(self) -> bool:
        """Whether the rank that makes steps also does what is before and after them."""
        return self.shares is not None or len(self.view.ranks) == 1

    def _turn(self, case: Case, able: tuple[int, ...]) -> Turn:
        """All times are of the rank: with several models each has it for a share of the time."""
        head, left = case.request.head, case.left
        seconds = inf if case.is_late else case.seconds / self.num_models
        group = head.owner, head.priority
        return Turn(left.steps, left.tokens, left.before, left.after, seconds, self._is_patient(case), group, able)

    def _most_slots(self, request: Request) -> int:
        step = request.workflow.steps[-1]
        largest = self.view.largest_batch(request.head.model, op_of(step))
        slots = self.view.config.max_num_seqs
        return slots if largest is None else max(1, min(slots, largest // request.spec.num_rows))

    def _pace(self, cases: Sequence[Case], most: int) -> Pace:
        """Seconds of steps by number of requests and sum of their tokens: exact for the least and the most tokens that
        a request has, linear between.
        """
        head = cases[0].request
        step, rows = head.workflow.steps[-1], head.spec.num_rows
        keys = max(case.left.keys for case in cases)
        low, high = min(case.left.tokens for case in cases), max(case.left.tokens for case in cases)
        fixed, slope = list[float](), list[float]()
        for number in range(1, most + 1):
            below = self._step_seconds(head, step, number * rows, low / rows, keys / rows)
            above = self._step_seconds(head, step, number * rows, high / rows, keys / rows) if high > low else below
            slope.append((above - below) / (number * (high - low)) if high > low else 0.0)
            fixed.append(below - slope[-1] * number * low)
        return Pace(tuple(fixed), tuple(slope))

    def _step_seconds(self, request: Request, step: Node, rows: int, tokens: float, keys: float) -> float:
        return self.work.seconds(
            self.view, request.head.model, op_of(step), Work((round(tokens),), (round(keys),)), rows
        )
