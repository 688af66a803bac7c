"""Lateness: what the scheduler did for policies that left it to decide which requests are too late."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.baselines.former.deadlines import Deadlines, MayJoin
from benchmarks.baselines.former.inside_view import base_seconds, load_seconds
from benchmarks.baselines.former.remaining_loads import RemainingLoads
from core.scheduling.dispatch import GiveUp
from core.scheduling.requests.deadlines import due
from core.scheduling.requests.request import Request
from core.scheduling.view import View


class Judgement(NamedTuple):
    """What is decided at the start of a pass."""

    # Requests to give up. A pass with any decides nothing else; the next one, which follows at once, has their room.
    given_up: tuple[GiveUp, ...] = ()
    may_join: MayJoin | None = None  # to be asked once per waiting request, in order; None: no request has a due time


class Lateness:
    """Judges the requests of one policy. shares_steps: see RemainingLoads."""

    def __init__(self, *, shares_steps: bool) -> None:
        self._loads = RemainingLoads(shares_steps=shares_steps)

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._loads.forget(request_id)

    def judge(self, view: View, now: float) -> Judgement:
        """Which requests to give up, and which of the others may join the running ones."""
        live = list(view.requests.live())
        if all(due(request.head) is None for request in live):
            return Judgement()
        deadlines = Deadlines(
            view.config.max_num_seqs,
            partial(self._loads.of, view),
            partial(_base_seconds, view),
            partial(load_seconds, view),
        )
        given_up = tuple(GiveUp(request, failure) for request, failure in deadlines.too_late(live, now))
        return Judgement(given_up, deadlines.joining(live, now))


def _base_seconds(view: View, requests: Sequence[Request]) -> float:
    """The constant part of the time of a step with these requests; 0 without requests."""
    node = requests[0].step_node if requests else None
    return 0.0 if node is None else base_seconds(view, requests[0], node)
