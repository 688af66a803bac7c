"""BatchForecast: predicts when the requests of a batch finish, and whether one may join without making others late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.baselines.former.remaining_loads import RemainingLoad
from benchmarks.baselines.former.slot_schedule import RankSlots, SlotTask, linear_pace


@dataclass(frozen=True, slots=True)
class Member:
    """A request of the batch."""

    load: RemainingLoad
    due_in: float | None  # seconds until it is due; None: it has no due time


class BatchForecast:
    """The requests that share steps now, and those admitted since."""

    def __init__(self, members: Iterable[Member], base_seconds: float) -> None:
        """base_seconds: the part of a step's time that does not depend on its requests."""
        self._members = list(members)
        self._base = base_seconds

    def admit(self, newcomer: Member) -> bool:
        """Add a request unless that makes a member late that would otherwise be in time; whether it was added."""
        members = [*self._members, newcomer]
        before, after = self._ends(self._members), self._ends(members)
        for member, end, later in zip(self._members, before, after, strict=False):
            if member.due_in is not None and end <= member.due_in < later:
                return False
        self._members = members
        return True

    def _ends(self, members: Sequence[Member]) -> list[float]:
        return ends([member.load for member in members], self._base)


def ends(loads: Sequence[RemainingLoad], base_seconds: float) -> list[float]:
    """Seconds until each of these is done if they share their steps and no other request joins."""
    tasks = [SlotTask(load.steps_left, load.step_seconds, after=load.other_seconds) for load in loads]
    return RankSlots(len(tasks), linear_pace(base_seconds), blocks=False).ends(tasks)
