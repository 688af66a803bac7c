"""goodput: as many requests as possible meet their latency objective.

Each rank has a set of requests of each denoiser, its lane. All of them are predicted to be in time together, at the
speed that their batches will really have (`slot_schedule.py`). A newcomer joins only if all stay in time; else
the one with most work left goes, and is served if the others are done sooner than predicted. Requests that could not be
in time even alone end early (`--on-late drop`) or run when no other request needs the rank (`--on-late last`).

It starts from NeuStream's scheduling (EuroSys 2025, section 4; policy `neustream`), which limits batches by an op's
share of the objective and serves requests in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from benchmarks.baselines.former.earliest_finish import EarliestFinish
from benchmarks.baselines.former.goodput_pass import GoodputPass
from benchmarks.baselines.former.headroom import Headroom
from benchmarks.baselines.former.pauses import Pauses
from benchmarks.baselines.former.rank_shares import RankShares
from benchmarks.baselines.former.repeated_steps import RepeatedSteps
from benchmarks.baselines.former.slot_schedule import Pace, SlotTask, best_schedules
from benchmarks.baselines.former.step_batching import eligible
from benchmarks.baselines.former.work_estimator import RemainingWork, WorkEstimator
from core.config import PATIENCE_SECONDS
from core.costs.prediction_margin import CERTAIN
from core.failure import Failure
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.messages.worker import Batch, BatchResult
from core.scheduling.dispatch import Decision, GiveUp
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.deadlines import TOO_LATE, due, why_late
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

PLAN_EVERY = 64
"""Passes after which a plan is made again although no request came or went, because predictions are not exact."""

LOOK_AHEAD = 4
"""Requests that a plan considers, the most urgent first, as a multiple of the slots. Later ones would get a slot too
late.
"""


@dataclass(frozen=True, slots=True)
class RankLane:
    """The requests of one denoiser that make their steps on one rank."""

    requests: tuple[Request, ...]  # in the order in which they get slots
    num_slots: int

    @property
    def served(self) -> list[Request]:
        """The requests that have a slot now."""
        return [request for request in self.requests if _has_steps(request)][: self.num_slots]


@dataclass(slots=True)
class Plan:
    """Which requests are to be served."""

    lanes: tuple[RankLane, ...] = ()
    others: tuple[Request, ...] = ()  # waiting ones that need no slot: they made all of their steps before a rank died
    given_up: tuple[GiveUp, ...] = ()
    tried: str | None = None  # id of the request that is served although it is predicted to be late
    # The requests that had a slot at the last `refill_slots`, lane by lane.
    served: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.refill_slots()

    def refill_slots(self) -> bool:
        """Give the slots of requests without remaining steps to the next ones in their lanes. Returns whether as many
        requests have slots as before.
        """
        num_slots = len(self.served)
        self.served = [request for lane in self.lanes for request in lane.served]
        return len(self.served) >= num_slots


def _denoiser(request: Request) -> ModelKeys:
    """The components that a request's next steps are computed with, or if none is left, that its last ones were."""
    return request.keys_of(_step_node(request))


def _step_node(request: Request) -> Node:
    assert request.step_node is not None, f"{request.id} has no steps"
    return request.step_node


def _has_steps(request: Request) -> bool:
    return request.is_live and request.progress.steps_left > 0


@dataclass(slots=True)
class Candidate:
    """A request, as judged for a plan."""

    request: Request
    work: RemainingWork
    seconds: float  # computing time until it is due; inf: it has no due time
    is_late: bool  # it cannot be in time

    @property
    def can_be_in_time(self) -> bool:
        """Whether it has a due time that it can meet."""
        return not self.is_late and self.seconds < inf


class Goodput(SchedulingPolicy):
    """Keeps its plan between passes.

    steps_apart: whether the ranks are processes of one device, where the first makes the steps and the last does all
    other work. By default each rank has a device, and `RankShares` spreads the ops over them.
    """

    spreads_models = False

    def __init__(self, *, steps_apart: bool = False) -> None:
        self._work = WorkEstimator()
        self._shares = None if steps_apart else RankShares()
        self._pauses = Pauses()
        self._headroom = Headroom()
        self._earliest_finish = EarliestFinish()
        self._repeated = RepeatedSteps()
        self._plan = Plan()
        self._ranks: tuple[int, ...] = ()  # the ranks that lived when the plan was made
        self._passes_left = 0  # passes until the plan is made again
        self._tried = set[str]()  # ids of live requests that plans have served although they were late
        # Written by events, and reset when the plan is looked at.
        self._is_slot_left = False  # a request may have left its slot
        self._has_room = False  # a request has ended, or left its slot without a successor in its lane

    def on_arrival(self, request: Request) -> None:
        self._passes_left = 0

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        self._pauses.note(batch, result)

    def on_end(self, request_id: str) -> None:
        if all(request_id != each.request.id for each in self._plan.given_up):  # the plan has no place for those
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
            self._earliest_finish.note_sent(now)
            self._is_slot_left |= any(each.progress.steps_left == 1 for batch in again for each, _ in batch.items)
            return [*given_up, *again]
        ids = frozenset(each.request.id for each in given_up)
        decisions = GoodputPass(view, served=plan.served, others=plan.others, given_up=ids, shares=self._shares).run()
        decisions = self._earliest_finish.choose(view, decisions, now, besides=self._step_ranks(view))
        self._repeated.note(decisions)
        self._is_slot_left = True
        return [*given_up, *decisions]

    def _may_be_better(self, view: View) -> bool:
        """Whether another plan may be better: there may be room for a request without a slot, or fewer requests should
        share steps. Slots that requests have left are refilled from their lanes first.
        """
        plan = self._plan
        if self._is_slot_left:
            self._is_slot_left = False
            self._has_room |= not plan.refill_slots()
        if not self._has_room and plan.served:
            return False
        self._has_room = False
        served = {request.id for request in plan.served}
        return len(served) > len(plan.lanes) or any(
            request.id not in served and (request.progress.steps_left or request.status is Status.WAITING)
            for request in view.requests.live()
        )

    def _is_stale(self, view: View) -> bool:
        """Whether another plan may be better when a batch cannot be repeated, because one of its requests has ended or
        was set back. A rank's death can set a request back to a step that the plan does not know, so requests that have
        lost a rank make every plan stale until they end.
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
        """The plan's decisions that give up requests, without those whose requests have ended since."""
        if not self._plan.given_up:
            return []
        given_up = [each for each in self._plan.given_up if each.request.is_live]
        for each in given_up:
            if each.request.status is Status.RUNNING and each.request.id not in self._tried:
                self._headroom.note_wasted()
        return given_up

    def _step_ranks(self, view: View) -> set[int]:
        """The ranks that make steps. Plans assume the order of `StepPass` there: work that finishes requests goes
        first. On the other ranks `EarliestFinish` orders the batches.
        """
        if self._shares is None:
            return {view.ranks[0]}
        return {self._shares.home(view, request) for request in self._plan.served if request.is_live}


@dataclass(slots=True)
class Planner:
    """Makes one plan; `plan` is called once."""

    view: View
    now: float
    work: WorkEstimator
    shares: RankShares | None
    stretch: float  # time that passes, as a multiple of the predicted computing time
    num_denoisers: int = 1  # that live requests make steps with; set by `plan`

    def plan(self) -> Plan:
        requests = eligible(self.view)
        if self.shares is not None:
            self.shares.update(self.view, requests, self.work)
        candidates = [self._judge(request) for request in requests]
        tried = self._tried(candidates)
        given_up = tuple(self._given_up(candidates, tried))
        dropped = {each.request.id for each in given_up}
        live = (each for each in self.view.requests.live() if each.id not in dropped and each.workflow.steps)
        self.num_denoisers = len({_denoiser(each) for each in live}) or 1
        kept = [each for each in candidates if each.request.id not in dropped]
        groups: dict[ModelKeys, list[Candidate]] = {}  # denoiser -> candidates, which may share steps
        for candidate in kept:
            if candidate.work.steps:
                groups.setdefault(_denoiser(candidate.request), []).append(candidate)
        lanes = [lane for group in groups.values() for lane in self._lanes(group, tried)]
        others = [each.request for each in kept if not each.work.steps]
        waiting = tuple(each for each in others if each.status is Status.WAITING)
        return Plan(tuple(lanes), waiting, given_up, None if tried is None else tried.request.id)

    def _judge(self, request: Request) -> Candidate:
        work, time = self.work.remaining(self.view, request), due(request.head)
        seconds = inf if time is None else (time - self.now) / self.stretch
        return Candidate(request, work, seconds, work.alone > seconds)

    def _tried(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The late request that is served nevertheless, while no candidate can be in time: predictions may be wrong,
        and only batches correct them. It is the first that is not certain to be late, preferably one that has begun.
        Candidates without a due time do not prevent the trial.
        """
        if any(each.can_be_in_time for each in candidates):
            return None
        late = (each for each in candidates if each.is_late)
        doubtful = (each for each in late if why_late(each.request.head, self._end(each, CERTAIN)) is None)
        return min(doubtful, key=lambda each: each.request.status is Status.WAITING, default=None)

    def _end(self, candidate: Candidate, share: float) -> float:
        """Finish time of a request alone on a rank, if it takes `share` of its predicted time."""
        return self.now + share * candidate.work.alone

    def _given_up(self, candidates: Sequence[Candidate], tried: Candidate | None) -> Iterator[GiveUp]:
        """Decisions that give up late requests, even if no other one needs a rank: they would slow other ranks down,
        and newcomers would wait for their steps.
        """
        is_needed = any(each.can_be_in_time for each in candidates)
        for each in candidates:
            failure = self._why_given_up(each, is_needed) if each.is_late and each is not tried else None
            if failure is not None:
                yield GiveUp(each.request, failure)

    def _why_given_up(self, candidate: Candidate, is_needed: bool) -> Failure | None:
        """Why to give up a late request: it is predicted to miss its timeout or, with `--on-late drop`, its objective.
        None: it is kept. A request that has begun is kept while no other needs the rank, and later until it is certain
        to miss its objective.
        """
        head, has_begun = candidate.request.head, candidate.request.status is Status.RUNNING
        if head.deadline is not None and self._end(candidate, 1.0) > head.deadline:
            return TOO_LATE
        if self.view.config.on_late != "drop" or (has_begun and not is_needed):
            return None
        return why_late(head, self._end(candidate, CERTAIN if has_begun else 1.0))

    # ------------------------------------------------------------------------------------------------ the set

    def _lanes(self, mine: Sequence[Candidate], tried: Candidate | None) -> Iterable[RankLane]:
        """The lanes of one denoiser. Late requests get slots only on ranks where no other one could be served. The one
        that is tried goes before requests without a due time, unless one of these is patient.
        """
        in_time = [each for each in mine if not each.is_late or self._is_patient(each)]
        late = [each for each in mine if each.is_late and not self._is_patient(each)]
        first = [each for each in late if each is tried]
        if in_time and first and not any(map(self._is_patient, in_time)):
            parts = [first, in_time, [each for each in late if each is not tried]]
        else:
            parts = [in_time, late]
        ranks = self.view.ranks if self.shares is not None else self.view.ranks[:1]
        lanes = dict[int, RankLane]()
        for part in parts:
            lanes |= self._scheduled(part, [rank for rank in ranks if rank not in lanes])
        if self.shares is not None:
            for rank, lane in lanes.items():
                for request in lane.requests:
                    self.shares.set_home(request, rank)
        return lanes.values()

    def _is_patient(self, candidate: Candidate) -> bool:
        """Whether a request that is late or has no due time has waited so long that it must be served."""
        head, has_no_due = candidate.request.head, candidate.is_late or candidate.seconds == inf
        return has_no_due and self.now - head.arrival > PATIENCE_SECONDS * (1 + head.priority)

    def _scheduled(self, candidates: Sequence[Candidate], ranks: Sequence[int]) -> dict[int, RankLane]:
        """Rank -> its lane, for the ranks that serve any of these candidates. ranks: those that may serve them."""
        able = {each.request.id: self._able(each.request, ranks) for each in candidates}
        candidates = [each for each in candidates if able[each.request.id]]
        if not candidates:
            return {}
        most = self._most_slots(candidates[0].request)
        candidates = candidates[: LOOK_AHEAD * most * len(ranks)]
        tasks = [self._slot_task(each, able[each.request.id]) for each in candidates]
        pace = self._pace(candidates, min(most, len(candidates)))
        starts = [self.view.wait_seconds(rank) for rank in ranks]
        schedules = best_schedules(tasks, most, pace, starts, blocks=self._blocks)
        chosen = {index for schedule in schedules for index in schedule.chosen}
        found = dict[int, RankLane]()
        for place, (rank, schedule) in enumerate(zip(ranks, schedules, strict=True)):
            indexes = schedule.chosen
            if not indexes:  # one that would be in time alone may seem late because predictions are rounded
                others = (index for index, task in enumerate(tasks) if place in task.ranks and index not in chosen)
                indexes = tuple(islice(others, 1))
                chosen.update(indexes)
            if indexes:
                found[rank] = RankLane(tuple(candidates[index].request for index in indexes), schedule.num_slots)
        return found

    def _able(self, request: Request, ranks: Sequence[int]) -> tuple[int, ...]:
        """Indexes of the ranks that can make a request's steps."""
        able = ranks if self.shares is None else self.shares.step_ranks(self.view, request)
        return tuple(place for place, rank in enumerate(ranks) if rank in able)

    @property
    def _blocks(self) -> bool:
        """Whether the rank that makes steps also does the work before and after them."""
        return self.shares is not None or len(self.view.ranks) == 1

    def _slot_task(self, candidate: Candidate, able: tuple[int, ...]) -> SlotTask:
        """A candidate for `best_schedules`. Times are seconds of the rank, of which each denoiser gets a fraction."""
        head, work = candidate.request.head, candidate.work
        seconds = inf if candidate.is_late else candidate.seconds / self.num_denoisers
        must, group = self._is_patient(candidate), (head.owner, head.priority)
        return SlotTask(work.steps, work.tokens, work.before, work.after, seconds, must, group, able)

    def _most_slots(self, request: Request) -> int:
        step = _step_node(request)
        largest = self.view.largest_batch(request.keys_of(step), op_of(step))
        slots = self.view.config.max_num_seqs
        return slots if largest is None else max(1, min(slots, largest // request.spec.num_rows))

    def _pace(self, candidates: Sequence[Candidate], most: int) -> Pace:
        """Seconds of steps by number of requests and sum of their tokens: exact where all requests have the fewest or
        all have the most tokens of any candidate, and linear between.
        """
        head = candidates[0].request
        step, rows = _step_node(head), head.spec.num_rows
        keys, tokens = max(each.work.keys for each in candidates), [each.work.tokens for each in candidates]
        low, high = min(tokens), max(tokens)
        fixed, slope = list[float](), list[float]()
        for number in range(1, most + 1):
            below = self._step_seconds(head, step, number * rows, low / rows, keys / rows)
            above = self._step_seconds(head, step, number * rows, high / rows, keys / rows) if high > low else below
            slope.append((above - below) / (number * (high - low)) if high > low else 0.0)
            fixed.append(below - slope[-1] * number * low)
        return Pace(tuple(fixed), tuple(slope))

    def _step_seconds(self, request: Request, step: Node, rows: int, tokens: float, keys: float) -> float:
        work = Work((round(tokens),), (round(keys),))
        return self.work.batch_seconds(self.view, request.keys_of(step), op_of(step), work, rows)
