"""default: who shares a step, on which ranks, and who cannot be in time, from what is known of each request.

Requests that gain by sharing steps are small: they make them in lanes, each on one rank, their home. A plan says which
of them are served (`plan.py`, after NeuStream). Each of the others has a group of ranks, whose number changes between
its steps (`groups.py`, after DDiT).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

from core.graph.op import OPS
from core.handles import RankIds
from core.messages.worker import Batch, BatchResult
from core.scheduling.dispatch import Decision, Dispatch, GiveUp
from core.scheduling.policies.planner.copies import Copies
from core.scheduling.policies.planner.groups import Groups
from core.scheduling.policies.planner.lane_pass import LanePass
from core.scheduling.policies.planner.plan import Plan, Planner, has_steps
from core.scheduling.policies.planner.predictions import Predictions
from core.scheduling.policies.planner.repeated_steps import RepeatedSteps, WholePass
from core.scheduling.policies.planner.step_homes import StepHomes
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.policies.step_pass import eligible
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

PLAN_EVERY = 64
"""Passes after which a plan is made again although no request came or went, because predictions are not exact."""

WAITS_FOR = 0.25
"""A better plan may wait until this share of the busy ranks has answered, which takes about this share of a step. Plans
take long where ranks are many."""


class Default(SchedulingPolicy):
    """Keeps its plan, and where requests are, between passes."""

    def __init__(self) -> None:
        self._predictions = Predictions()
        self._groups = Groups(self._predictions)
        self._homes = StepHomes()
        self._repeated = RepeatedSteps()
        self._demand = Copies()
        self._plan = Plan()
        self._seen: Hashable = None  # the live ranks when the plan was made, what they had, and who might begin there
        self._apart: frozenset[str] = frozenset()  # ids of the large requests in the plan
        self._small: set[str] = set()  # ids of the others that have not ended
        self._age = PLAN_EVERY  # passes since the plan was made
        self._is_wanted = False  # another plan may be better
        # Written by events, and reset when the plan is looked at.
        self._is_slot_left = False  # a request may have left its slot
        self._has_room = False  # a request has ended, or left its slot without a successor in its lane

    def on_arrival(self, request: Request) -> None:
        self._demand.note_arrival(request)
        self._is_wanted = True

    def on_adapters(self, request: Request) -> None:
        self._is_wanted = True

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        self._repeated.note_result(batch, result)
        for item in batch.items if not OPS[batch.op].serves_step else ():  # a ControlNet may be beside its step
            self._groups.note_done(item.request_id, batch.ranks)

    def on_end(self, request_id: str) -> None:
        if request_id not in self._plan.ended:  # the plan has no place for those
            self._is_slot_left = self._has_room = True
        self._small.discard(request_id)
        if self._apart and self._small and not self._groups.has_small:
            self._is_wanted = True  # small requests that had no slot when the large ones lined up have no ranks
        self._repeated.drop(request_id)
        self._predictions.forget(request_id)
        self._groups.forget(request_id)
        self._homes.forget(request_id)

    def page_rank(self, template: str, ranks: Sequence[int]) -> int:
        number = self._homes.num_on(ranks)
        return min(ranks, key=lambda rank: (number[rank], rank))

    # ------------------------------------------------------------------------------------------------ passes

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        if not view.open_ranks:
            return ()
        self._age += 1
        again: Sequence[Decision] | None = None
        if self._needs_plan(view):
            self._make_plan(view, now)
        else:
            keeps = partial(self._groups.keeps, view, now)
            again = self._repeated.next(view, self._plan, self._apart, self._moving, keeps)
            if again is None and self._is_stale(view):
                self._make_plan(view, now)
        decisions = self._over_all(view, now) if again is None else again
        if self._is_wanted and self._has_free:  # else the rank would wait for the next answer, however long that takes
            self._make_plan(view, now)
            decisions = self._over_all(view, now)
        if self._age == 0:
            self._want_copies(view, now)
        given = (item for each in decisions if isinstance(each, Dispatch) for item in each.items)
        if last := [request.id for request, _ in given if request.progress.steps_left == 1]:
            self._is_slot_left = True
            self._has_room |= not self._apart.isdisjoint(last)  # which have no lane whose next request follows
            self._repeated.forget()  # another request may begin
        return [*self._given_up(), *decisions]

    def _over_all(self, view: View, now: float) -> Sequence[Decision]:
        """The decisions of a whole pass, which is noted."""
        made = self._whole_pass(view, now)
        self._repeated.note(view, made)
        return made.decisions

    def _whole_pass(self, view: View, now: float) -> WholePass:
        """What all open ranks are to do."""
        groups, large, lanes = dict[str, RankIds](), list[Request](), self._all_lanes(view)
        if self._apart:
            groups, large, lanes = self._groups.choose(view, now)
        return LanePass(
            view,
            apart=self._apart,
            place=self._homes,
            predictions=self._predictions,
            lanes=lanes,
            groups=groups,
            large=large,
            plan=self._plan,
        ).run_whole()

    def _all_lanes(self, view: View) -> RankIds:
        """The lanes where all requests are small. Where ranks share each step, they have one lane."""
        return view.ranks if view.config.degree == 1 else view.ranks[:1]

    @property
    def _moving(self) -> frozenset[int]:
        """Ranks that are to have another group than they had in the last whole pass."""
        return self._groups.moving if self._apart else frozenset()

    # ------------------------------------------------------------------------------------------------ the plan

    def _needs_plan(self, view: View) -> bool:
        """Whether to make another plan now. While no rank has too little to do, a better one may wait for the answers
        of a share of the busy ranks, see WAITS_FOR.
        """
        if self._age > PLAN_EVERY or (view.ranks, view.residency_version, view.startable) != self._seen:
            return True
        self._is_wanted |= self._may_be_better(view)
        num_busy = len(view.ranks) - len(view.idle_ranks)
        return self._is_wanted and (self._has_free or self._age >= WAITS_FOR * num_busy)

    @property
    def _has_free(self) -> bool:
        """Whether the last whole pass left a rank without work that is not to have another group."""
        return not self._repeated.idle <= self._moving

    def _may_be_better(self, view: View) -> bool:
        """Whether another plan may be better: there may be room for a request without a slot, or fewer requests should
        share steps. Slots that requests have left are refilled from their lanes first.
        """
        plan = self._plan
        if self._is_slot_left:
            self._is_slot_left = False
            self._has_room |= not plan.refill_slots()
        if not self._has_room and (plan.served or not self._small):
            return False
        self._has_room = False
        served = {request.id for request in plan.served}
        return len(served) > len(plan.lanes) or any(
            request.id not in served and (request.progress.steps_left or request.status is Status.WAITING)
            for request in view.requests.live()
        )

    def _is_stale(self, view: View) -> bool:
        """Whether another plan may be better when a batch cannot be repeated, because one of its requests has ended,
        stands still or was set back. A rank's death can set a request back to a step that the plan does not know, so
        requests that have lost a rank make every plan stale until they end.
        """
        served = self._plan.served
        if any(request.has_lost_rank for request in (*served, *view.requests.running)):
            return True
        stands = any(each.id in self._apart and each.stands_still for each in view.requests.running)
        self._has_room |= stands  # it has no lane whose next request follows
        self._is_slot_left = stands or not all(map(has_steps, served))
        return self._is_slot_left and self._may_be_better(view)

    def _make_plan(self, view: View, now: float) -> None:
        """Decide which requests are large, which of the others are served, and in which order the large ones are."""
        self._age, self._seen = 0, (view.ranks, view.residency_version, view.startable)
        self._is_wanted = self._is_slot_left = self._has_room = False
        self._repeated.forget()
        self._groups.note_live(view.ranks)
        requests = eligible(view)
        self._small = {each.id for each in requests if self._predictions.of(view, each).is_small}
        self._apart = frozenset(each.id for each in requests if each.id not in self._small)
        lanes = self._groups.lanes if self._apart else self._all_lanes(view)
        lanes = tuple(rank for rank in lanes if rank in view.ranks) or view.ranks[:1]
        self._plan = Planner(view, now, self._homes, lanes, self._predictions).plan(requests)
        self._is_wanted = any(each.request.runs_alone for each in self._plan.given_up)  # then others may run
        if self._apart:
            ended = self._plan.ended
            still = (each for each in view.requests.running if each.stands_still)
            standing = [each for each in still if not self._predictions.of(view, each).is_small]
            lined_up = [each for each in requests if each.id not in ended]
            self._groups.line_up(view, lined_up, self._small, standing, now)

    def _want_copies(self, view: View, now: float) -> None:
        """Decide which models are to have further ranks."""
        requests = () if view.is_complete else eligible(view)
        self.copies = self._demand.wanted(view, now, requests, self._repeated.idle, self._predictions)

    def _given_up(self) -> list[GiveUp]:
        """The plan's decisions that give up requests, without those whose requests have ended since."""
        return [each for each in self._plan.given_up if each.request.is_live]
