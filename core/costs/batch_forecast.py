"""BatchForecast: when each request of a batch is done, and whether one more may join without making another late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.costs.load_report import RequestLoad


@dataclass(frozen=True, slots=True)
class Member:
    """A request among those that make steps together. left: seconds until it is due."""

    load: RequestLoad
    left: float | None


class BatchForecast:
    """The requests that make steps together. base_seconds: what a step takes whoever is in it."""

    def __init__(self, members: Iterable[Member], base_seconds: float) -> None:
        self._members = list(members)
        self._base = base_seconds

    def admit(self, newcomer: Member) -> bool:
        """Take it in, unless somebody who would be done in time would be late for it."""
        members = [*self._members, newcomer]
        before, after = self._ends(self._members), self._ends(members)
        for member, end, later in zip(self._members, before, after, strict=False):
            if member.left is not None and end <= member.left < later:
                return False
        self._members = members
        return True

    def _ends(self, members: Sequence[Member]) -> list[float]:
        return ends([member.load for member in members], self._base)


def ends(loads: Sequence[RequestLoad], base_seconds: float) -> list[float]:
    """Seconds until each of these is done if they make their steps together and nobody joins them."""
    pace = base_seconds + sum(load.step_seconds for load in loads)
    seconds = [0.0] * len(loads)
    elapsed = made = 0.0
    for index in sorted(range(len(loads)), key=lambda index: loads[index].steps_left):
        load = loads[index]
        elapsed += (load.steps_left - made) * pace
        made = load.steps_left
        pace -= load.step_seconds
        seconds[index] = elapsed + load.other_seconds
    return seconds
