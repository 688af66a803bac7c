"""A scheduling policy for tests that knows no reason."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from core.graph.workflow import Node
from core.scheduling.dispatch import Decision, Dispatch, Fetch
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.request import Request
from core.scheduling.view import View


class AnyRanks(SchedulingPolicy):
    """Runs every ready node as soon as it can, together with others, on ranks drawn at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        fetches: list[Decision] = []
        batches: dict[tuple[str, tuple[int, ...]], list[tuple[Request, Node]]] = {}
        for request in list(view.requests.live()):
            for node in view.ready(request):
                ranks = self._ranks(view)
                if view.can_run(request, node, ranks):
                    batches.setdefault((node.op, ranks), []).append((request, node))
                elif view.can_fetch(request, node, ranks):
                    fetches.append(Fetch(request, node, ranks))
        return [*fetches, *(Dispatch(tuple(items), ranks) for (_, ranks), items in batches.items())]

    def _ranks(self, view: View) -> tuple[int, ...]:
        count = self._random.choice([1, 1, 1, 2, view.num_ranks])
        return tuple(sorted(self._random.sample(range(view.num_ranks), min(count, view.num_ranks))))
