"""Plan: which requests are served, where some have a due time.

Each rank has a set of requests of each denoiser, its lane. All of them are predicted to be in time together, at the
speed that their batches will really have (`core.costs.forecast`). A newcomer joins only if all stay in time; else
the one with most work left goes, and is served if the others are done sooner than predicted. Requests that could not be
in time even alone end early (`--on-late drop`) or run when no other request needs the rank (`--on-late last`).

It starts from NeuStream's scheduling (EuroSys 2025, section 4; policy `neustream`), which limits batches by an op's
share of the objective and serves requests in the order of arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import NamedTuple

from core.costs.forecast import Pace, SlotTask
from core.costs.lane_filling import best_lanes
from core.costs.prediction_margin import CERTAIN
from core.failure import Failure
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.handles import RankIds
from core.scheduling.dispatch import GiveUp
from core.scheduling.policies.planner.predictions import Prediction, Predictions
from core.scheduling.policies.planner.step_homes import StepHomes
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.deadlines import TOO_LATE, due, must_be_served, why_late
from core.scheduling.requests.request import Request, Status
from core.scheduling.requests.work_left import WorkLeft
from core.scheduling.view import View

HEADROOM = 1.03
"""Time until a request is due, as a multiple of the time that it may be planned to take: plans are not exact."""

LOOK_AHEAD = 4
"""Requests that a plan considers, the most urgent first, as a multiple of the slots. Later ones would get a slot too
late.
"""


@dataclass(frozen=True, slots=True)
class RankLane:
    """The requests of one denoiser that make their steps on one rank."""

    rank: int
    requests: tuple[Request, ...]  # in the order in which they get slots
    num_slots: int

    @property
    def served(self) -> list[Request]:
        """The requests that have a slot now."""
        return [request for request in self.requests if has_steps(request)][: self.num_slots]


@dataclass(slots=True)
class Plan:
    """Which requests are to be served."""

    lanes: tuple[RankLane, ...] = ()
    others: tuple[Request, ...] = ()  # waiting ones that make no steps, or have made all of them before a rank died
    given_up: tuple[GiveUp, ...] = ()
    # The requests that had a slot at the last `refill_slots`, lane by lane.
    served: list[Request] = field(default_factory=list)
    served_on: list[tuple[int, list[Request]]] = field(default_factory=list)  # (rank, those of one of its lanes)

    def __post_init__(self) -> None:
        self.refill_slots()

    def refill_slots(self) -> bool:
        """Give the slots of requests without remaining steps to the next ones in their lanes. Returns whether as many
        requests have slots as before.
        """
        num_slots = len(self.served)
        self.served_on = [(lane.rank, lane.served) for lane in self.lanes]
        self.served = [request for _, served in self.served_on for request in served]
        return len(self.served) >= num_slots

    @property
    def ended(self) -> set[str]:
        """Ids of the requests that it gives up."""
        return {each.request.id for each in self.given_up}

    def served_by(self, rank: int) -> list[Request]:
        """Those of `served` that have their slots in a lane of this rank."""
        return [request for on, served in self.served_on if on == rank for request in served]


def has_steps(request: Request) -> bool:
    """Whether a request has steps to make, and its next one need not wait for adapters."""
    return request.is_live and request.progress.steps_left > 0 and not request.stands_still


def step_node(request: Request) -> Node:
    assert request.step_node is not None, f"{request.id} has no steps"
    return request.step_node


def _denoiser(request: Request) -> ModelKeys:
    assert request.denoiser is not None, f"{request.id} has no steps"
    return request.denoiser


class Candidate(NamedTuple):
    """A request, as judged for a plan."""

    request: Request
    prediction: Prediction
    work: WorkLeft
    alone: float  # seconds of its remaining work, with as many ranks as are useful
    seconds: float  # that it may be predicted to take; inf: it has no due time
    is_late: bool  # it cannot be in time

    @property
    def can_be_in_time(self) -> bool:
        """Whether it has a due time that it can meet."""
        return not self.is_late and self.seconds < inf


@dataclass(slots=True)
class Planner:
    """Makes one plan; `plan` is called once."""

    view: View
    now: float
    place: StepHomes
    lanes: RankIds  # ranks where small requests make steps
    predictions: Predictions
    _num_on: Counter[int] = field(default_factory=Counter)  # rank -> denoisers whose requests may make steps there

    def plan(self, requests: Sequence[Request]) -> Plan:
        """requests: that may run, the most urgent first."""
        candidates = [self._judge(request) for request in requests]
        tried = self._tried(candidates)
        given_up = (*self._given_up(candidates, tried), *self._loaded_too_late(requests))
        dropped = {each.request.id for each in given_up}
        kept = [each for each in candidates if each.request.id not in dropped]
        groups: dict[ModelKeys, list[Candidate]] = {}  # denoiser -> candidates, which may share steps
        for candidate in kept:
            if candidate.work.steps and candidate.prediction.is_small:
                groups.setdefault(_denoiser(candidate.request), []).append(candidate)
        self._num_on.update(rank for group in groups.values() for rank in self._ranks(group[0].request))
        if len(groups) > 1:
            self._place_apart(groups)
        lanes = [lane for group in groups.values() for lane in self._lanes(group, tried)]
        others = [each.request for each in kept if not each.work.steps]
        waiting = tuple(each for each in others if each.status is Status.WAITING)
        return Plan(tuple(lanes), waiting, given_up)

    def _judge(self, request: Request) -> Candidate:
        prediction, work = self.predictions.of(self.view, request), self.view.work_left(request)
        alone, time = prediction.alone(request, work), due(request.head)
        seconds = inf if time is None else (time - self.now) / (HEADROOM * self.view.slowness)
        return Candidate(request, prediction, work, alone, seconds, alone > seconds)

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
        """Finish time of a request alone, if it takes `share` of its predicted time."""
        return self.now + share * candidate.alone

    def _given_up(self, candidates: Sequence[Candidate], tried: Candidate | None) -> Iterator[GiveUp]:
        """Decisions that give up late requests, even if no other one needs a rank: they would slow other ranks down,
        and newcomers would wait for their steps.
        """
        is_needed = any(each.can_be_in_time for each in candidates)
        if len(candidates) == len(self.view.requests) == 1:
            candidates = [each for each in candidates if each.request.head.deadline is not None]  # nobody else waits
        for each in candidates:
            failure = self._why_given_up(each, is_needed=is_needed) if each.is_late and each is not tried else None
            if failure is not None:
                yield GiveUp(each.request, failure)

    def _loaded_too_late(self, requests: Sequence[Request]) -> Iterator[GiveUp]:
        """Decisions that give up requests whose timeout will pass because of their model's load. requests: that may
        run.
        """
        may_run = {request.id for request in requests}
        for request in self.view.requests.live() if self.view.requests.has_due else ():
            deadline = request.head.deadline
            if deadline is None or request.id in may_run or request.status is Status.RUNNING:
                continue
            if self.now + self.view.load_seconds(request) + self._judge(request).alone > deadline:
                yield GiveUp(request, TOO_LATE)

    def _why_given_up(self, candidate: Candidate, *, is_needed: bool) -> Failure | None:
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

    def _place_apart(self, groups: Mapping[ModelKeys, Sequence[Candidate]]) -> None:
        """Give the first requests of each denoiser homes, because lanes are planned for each denoiser alone."""
        for denoiser, group in groups.items():
            ranks = self._ranks(group[0].request)
            for each in group[: LOOK_AHEAD * self.view.config.max_num_seqs]:
                if self.place.find(each.request, denoiser) not in ranks:
                    self.place.place(each.request, denoiser, ranks, each.prediction.cost)

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
        devices = {rank for each in mine if (rank := self.view.page_rank(each.request)) is not None}
        ranks = sorted({*self._ranks(mine[0].request), *devices})
        lanes = dict[int, RankLane]()
        for part in parts:
            lanes |= self._scheduled(part, [rank for rank in ranks if rank not in lanes])
        costs = {each.request.id: each.prediction.cost for each in mine}
        for rank, lane in lanes.items():
            for request in lane.requests:
                self.place.set(request, _denoiser(request), rank, costs[request.id])
        return lanes.values()

    def _ranks(self, request: Request) -> Sequence[int]:
        having = self.view.ranks_with(_denoiser(request))
        return [rank for rank in self.lanes if rank in having] or having

    def _is_patient(self, candidate: Candidate) -> bool:
        """Whether a request that is late or has no due time has waited so long that it must be served."""
        has_no_due = candidate.is_late or candidate.seconds == inf
        return has_no_due and must_be_served(candidate.request.head, self.now)

    def _scheduled(self, candidates: Sequence[Candidate], ranks: Sequence[int]) -> dict[int, RankLane]:
        """Rank -> its lane, for the ranks that serve any of these candidates. ranks: those that may serve them."""
        able = {each.request.id: self._able(each.request, ranks) for each in candidates}
        candidates = [each for each in candidates if able[each.request.id]]  # the others' ranks have other lanes
        if not candidates:
            return {}
        head = candidates[0].request
        most = self._most_slots(head)
        candidates = candidates[: LOOK_AHEAD * most * len(ranks)]
        tasks = [self._slot_task(each, able[each.request.id]) for each in candidates]
        pace = self._pace(candidates, min(most, len(candidates)))
        starts = [self.view.wait_seconds(rank) for rank in ranks]
        seen = self.view.largest_seen(_denoiser(head), op_of(step_node(head))) // head.spec.num_rows
        if (seen + 1) * sum(task.size for task in tasks) > self.view.max_step_tokens * len(tasks):
            seen = most  # more of them do not fit into a step
        filled = best_lanes(tasks, most, pace, starts, blocks=self._blocks(head), largest_seen=seen)
        chosen = {index for lane in filled for index in lane.chosen}
        found = dict[int, RankLane]()
        for place, (rank, lane) in enumerate(zip(ranks, filled, strict=True)):
            indexes = lane.chosen
            if not indexes:  # one that would be in time alone may seem late because predictions are rounded
                others = (index for index, task in enumerate(tasks) if place in task.ranks and index not in chosen)
                indexes = list(islice(others, 1))
                chosen.update(indexes)
            if indexes:
                found[rank] = RankLane(rank, tuple(candidates[index].request for index in indexes), lane.slots.number)
        return found

    def _able(self, request: Request, ranks: Sequence[int]) -> tuple[int, ...]:
        """Indexes of the ranks that can make a request's steps: one that has begun stays at home."""
        home, device = self.place.find(request, _denoiser(request)), self.view.page_rank(request)
        only = device
        if home in ranks and (request.status is Status.RUNNING or self._num_on[ranks[0]] > 1):
            only = home
        return tuple(place for place, rank in enumerate(ranks) if only is None or rank == only)

    def _blocks(self, request: Request) -> bool:
        """Whether the rank that makes steps also does the work after them: all that could make steps, too."""
        having = self.view.ranks_with(request.keys_of(request.workflow.last_output))
        return set(having) <= set(self._ranks(request))

    def _slot_task(self, candidate: Candidate, able: tuple[int, ...]) -> SlotTask:
        """A candidate for `best_lanes`. Times are seconds of the rank, of which each denoiser gets a fraction."""
        head, work = candidate.request.head, candidate.work
        ranks = self._ranks(candidate.request)
        num_denoisers = sum(self._num_on[rank] for rank in ranks) / len(ranks)
        seconds = inf if candidate.is_late else candidate.seconds / num_denoisers
        must, group = self._is_patient(candidate), (head.owner, head.priority)
        before = work.before + work.serving  # a rank that makes the steps does this, too
        times, is_last = (before, work.after, seconds), candidate.is_late and self.view.config.on_late == "last"
        has_due = due(head) is not None and not is_last
        return SlotTask(work.steps, work.tokens, *times, must, group, able, head.call_id, has_due)

    def _most_slots(self, request: Request) -> int:
        step = step_node(request)
        largest = self.view.largest_batch(request.keys_of(step), op_of(step))
        slots = self.view.config.max_num_seqs
        return slots if largest is None else max(1, min(slots, largest // request.spec.num_rows))

    def _pace(self, candidates: Sequence[Candidate], most: int) -> Pace:
        """Seconds of steps by number of requests and sum of their tokens: exact where all requests have the fewest or
        all have the most tokens of any candidate, and linear between. 0 for all while that of one is unknown.
        """
        request = candidates[0].request
        step, rows = step_node(request), request.spec.num_rows
        keys, tokens = max(each.work.keys for each in candidates), [each.work.tokens for each in candidates]
        low, high = min(tokens), max(tokens)

        def seconds(number: int, tokens: float) -> float:
            work = Work((round(tokens / rows),), (round(keys / rows),))
            return self.view.batch_seconds(request.keys_of(step), op_of(step), work, number * rows)

        if not seconds(1, high):
            return Pace((0.0,), (0.0,))
        numbers = range(1, most + 1)
        fixed, slope = [seconds(number, low) for number in numbers], [0.0] * most
        if high > low:
            slope = [(seconds(number, high) - fixed[number - 1]) / (number * (high - low)) for number in numbers]
            fixed = [fixed[number - 1] - slope[number - 1] * number * low for number in numbers]
        return Pace(tuple(fixed), tuple(slope))
