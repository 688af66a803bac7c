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

    given_up: tuple[GiveUp, ...] = ()
    may_join: MayJoin | None = None  # to be asked once per waiting request, in order; None: no request has a due time

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the requests that are given up."""
        return frozenset(each.request.id for each in self.given_up)


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
        gone = {each.request.id for each in given_up}
        return Judgement(given_up, deadlines.joining([each for each in live if each.id not in gone], now))


def _base_seconds(view: View, requests: Sequence[Request]) -> float:
    """The constant part of the time of a step with these requests; 0 without requests."""
    node = requests[0].step_node if requests else None
    return 0.0 if node is None else base_seconds(view, requests[0], node)
