"""Each pass of the policy default in both ways: a repetition must be what a whole pass would choose."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy

import pytest

from core.scheduling.dispatch import Decision, Dispatch
from core.scheduling.policies.planner.default import Default
from core.scheduling.policies.planner.plan import Plan
from core.scheduling.policies.planner.repeated_steps import Keeps, RepeatedSteps
from core.scheduling.view import View

Batches = list[Dispatch] | None


def _told(decision: Decision) -> tuple[tuple[int, ...], list[tuple[str, str]]]:
    assert isinstance(decision, Dispatch)
    return decision.ranks, [(request.id, node.name) for request, node in decision.items]


@contextmanager
def compared(policy: Default) -> Iterator[list[bool]]:
    """While they are; for each pass that could be one, whether it was a repetition."""
    were_repeated, find = list[bool](), RepeatedSteps.next

    def both(
        self: RepeatedSteps, view: View, plan: Plan, large: Collection[str], moving: frozenset[int], keeps: Keeps
    ) -> Batches:
        found = find(self, view, plan, large, moving, keeps)
        if found is not None:
            whole, told = [_told(each) for each in _whole_pass(policy, view)], [_told(each) for each in found]
            assert sorted(whole) == sorted(told)
        were_repeated.append(found is not None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RepeatedSteps, "next", both)
        yield were_repeated


def _whole_pass(policy: Default, view: View) -> Collection[Decision]:
    """What a whole pass would choose; the policy does not remember it."""
    before = policy._groups, policy._homes
    known = {id(each): each for each in (*view.requests.live(), *policy._groups._queue, *policy._groups._small)}
    policy._groups, policy._homes = deepcopy(before, known)
    decisions = policy._whole_pass(view, view._now).decisions
    policy._groups, policy._homes = before
    return decisions
