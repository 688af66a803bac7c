"""WaitingWork: the predicted work of all waiting requests of one scheduler, in sums, since queues may be long."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.costs.exact_sum import ExactSum
from core.costs.load_report import QueueChange, Queued, RequestLoad
from core.scheduling.live_requests import LiveRequests
from core.scheduling.predictor import Predictor
from core.scheduling.request import Request, Status


@dataclass(frozen=True, slots=True)
class _Terms:
    """What one request adds to the sums."""

    load: RequestLoad
    loop: tuple[str, str]
    op_seconds: tuple[tuple[str, float], ...]


class WaitingWork:
    """A request's work is predicted once, when it is first seen here, and counts until the request begins or ends."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._terms: dict[str, _Terms] = {}  # request id -> its terms, of every waiting request
        self._seconds = ExactSum()
        self._op_seconds: defaultdict[str, ExactSum] = defaultdict(ExactSum)
        self._loop_steps: Counter[tuple[str, str]] = Counter()

    def update(self, changes: Iterable[QueueChange], requests: LiveRequests) -> None:
        """Process what has happened to the queue. requests: as they are after that."""
        for change in changes:
            if not isinstance(change, Queued):
                self._remove(change.request_id)
            elif (request := requests.get(change.request_id)) is not None and request.status is Status.WAITING:
                self._add(request, change.load)

    def __len__(self) -> int:
        return len(self._terms)

    @property
    def seconds(self) -> float:
        """All work, without the constant part of steps."""
        return float(self._seconds)

    @property
    def op_seconds(self) -> dict[str, float]:
        """The same by op."""
        return {op: float(seconds) for op, seconds in self._op_seconds.items()}

    @property
    def loop_steps(self) -> Mapping[tuple[str, str], int]:
        """(model, op of its loop) -> number of steps."""
        return self._loop_steps

    def _add(self, request: Request, load: RequestLoad) -> None:
        op_seconds = tuple(self._predictor.seconds_by_op(request))
        terms = self._terms[request.id] = _Terms(load, loop_of(request), op_seconds)
        self._seconds.add(load.seconds)
        self._loop_steps[terms.loop] += load.steps_left
        for op, seconds in op_seconds:
            self._op_seconds[op].add(seconds)

    def _remove(self, request_id: str) -> None:
        terms = self._terms.pop(request_id, None)
        if terms is None:
            return  # it was removed when it began
        self._seconds.remove(terms.load.seconds)
        self._loop_steps[terms.loop] -= terms.load.steps_left
        for op, seconds in terms.op_seconds:
            self._op_seconds[op].remove(seconds)


def loop_of(request: Request) -> tuple[str, str]:
    """(model, op of its loop), which determine the constant part of its steps."""
    return request.head.model, request.workflow.loop.op
