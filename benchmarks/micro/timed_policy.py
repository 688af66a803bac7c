"""TimedPolicy: a scheduling policy that asks another one and notes how long it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from core.messages.worker import Batch, BatchResult
from core.scheduling.dispatch import Decision, Loads
from core.scheduling.model_demand import ModelDemand
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.request import Request
from core.scheduling.view import View


class TimedPolicy(SchedulingPolicy):
    """Decides as the other policy does."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.spreads_models = policy.spreads_models
        self.passes: list[float] = []
        """CPU seconds of each call of `choose`."""

    def loads(self, demand: ModelDemand, now: float) -> Loads:
        return self._policy.loads(demand, now)

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        start = time.thread_time()
        decisions = self._policy.choose(view, now)
        self.passes.append(time.thread_time() - start)
        return decisions

    def page_rank(self, template: str, ranks: Sequence[int]) -> int:
        return self._policy.page_rank(template, ranks)

    def on_arrival(self, request: Request) -> None:
        self._policy.on_arrival(request)

    def on_result(self, batch: Batch, result: BatchResult) -> None:
        self._policy.on_result(batch, result)

    def on_end(self, request_id: str) -> None:
        self._policy.on_end(request_id)
