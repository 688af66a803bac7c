"""RunningLoads: the remaining work of the running requests of one scheduler.

Many requests may run, and few of them make progress between two reports. So a request's work is predicted again only
after work of it was sent or answered, and not for every report.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.costs.exact_sum import ExactSum
from core.costs.load_report import RequestLoad
from core.scheduling.reports.predictor import Predictor
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request, Status


class RunningLoads:
    """One per scheduler, in its Reporter."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._loads: dict[str, RequestLoad] = {}  # request id -> its load, in the order in which they began
        self._seconds = ExactSum()
        self._steps = 0

    def update(self, moved: Iterable[Request], requests: LiveRequests) -> None:
        """Predict the work of requests that have made progress. requests: the live requests after that."""
        for request in moved:
            self._count(self._loads.get(request.id), -1)
            if request.status is Status.RUNNING and requests.get(request.id) is request:
                load = self._loads[request.id] = self._predictor.remaining_load(request)
                self._count(load, 1)
            else:
                self._loads.pop(request.id, None)

    def by_id(self) -> dict[str, RequestLoad]:
        """Request id -> its load."""
        return dict(self._loads)

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def steps(self) -> int:
        """Remaining steps of all running requests."""
        return self._steps

    @property
    def seconds(self) -> float:
        """Seconds of all remaining work, without the constant part of steps."""
        return float(self._seconds)

    def _count(self, load: RequestLoad | None, sign: int) -> None:
        if load is not None:
            self._steps += sign * load.steps_left
            (self._seconds.add if sign > 0 else self._seconds.remove)(load.seconds)
