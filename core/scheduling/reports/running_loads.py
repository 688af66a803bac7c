"""RunningLoads: the predicted work left of the running requests of one scheduler.

Many requests run on many ranks, and few of them move between two reports. So each is predicted when something of it was
sent or answered, which happens at every step, and not at every report.
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
        """Predict the work left of requests that have moved. requests: as they are after that."""
        for request in moved:
            self._count(self._loads.get(request.id), -1)
            if request.status is Status.RUNNING and requests.get(request.id) is request:
                load = self._loads[request.id] = self._predictor.left_of(request)
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
        """Steps left of all of them."""
        return self._steps

    @property
    def seconds(self) -> float:
        """All work left, without the constant part of steps."""
        return float(self._seconds)

    def _count(self, load: RequestLoad | None, sign: int) -> None:
        if load is not None:
            self._steps += sign * load.steps_left
            (self._seconds.add if sign > 0 else self._seconds.remove)(load.seconds)
