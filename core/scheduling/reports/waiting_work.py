"""WaitingWork: the predicted work of all waiting requests of one scheduler, as sums, because queues may be long."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.costs.cost_model import CostKey
from core.costs.exact_sum import ExactSum
from core.costs.load_report import QueueChange, Queued, RequestLoad
from core.scheduling.reports.predictor import Predictor
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request, Status


@dataclass(slots=True)
class _Terms:
    """The terms that one request adds to the sums."""

    request: Request
    load: RequestLoad
    steps: tuple[tuple[CostKey, int], ...]  # (key in the cost model, their number)
    op_seconds: tuple[tuple[str, float], ...] = ()  # empty until the sums by op are read


class WaitingWork:
    """A request's work is predicted once and counts until the request begins or ends."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._terms: dict[str, _Terms] = {}  # request id -> its terms, of every waiting request
        self._num_steps = 0
        self._not_by_op: dict[str, _Terms] = {}  # request id -> its terms, if they are not in the sums by op yet
        self._seconds = ExactSum()
        self._op_seconds: defaultdict[str, ExactSum] = defaultdict(ExactSum)
        self._steps: Counter[CostKey] = Counter()

    def update(self, changes: Iterable[QueueChange], requests: LiveRequests) -> None:
        """Process changes of the queue. requests: the live requests after them."""
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
    def num_steps(self) -> int:
        """Remaining steps of all waiting requests, without what works for these."""
        return self._num_steps

    @property
    def steps(self) -> Mapping[CostKey, int]:
        """Key in the cost model -> number of steps."""
        return self._steps

    def op_seconds(self) -> dict[str, float]:
        """Op -> its part of `seconds`. The cost grows with the number of requests that have arrived since the last call
        and still wait.
        """
        for terms in self._not_by_op.values():
            terms.op_seconds = tuple(self._predictor.seconds_by_op(terms.request))
            for op, seconds in terms.op_seconds:
                self._op_seconds[op].add(seconds)
        self._not_by_op.clear()
        return {op: float(seconds) for op, seconds in self._op_seconds.items()}

    def _add(self, request: Request, load: RequestLoad) -> None:
        terms = _Terms(request, load, tuple(self._predictor.steps_left(request)))
        self._terms[request.id] = self._not_by_op[request.id] = terms
        self._seconds.add(load.seconds)
        self._num_steps += load.steps_left
        for key, number in terms.steps:
            self._steps[key] += number

    def _remove(self, request_id: str) -> None:
        terms = self._terms.pop(request_id, None)
        if terms is None:
            return  # the request was removed when it began
        self._not_by_op.pop(request_id, None)
        self._seconds.remove(terms.load.seconds)
        self._num_steps -= terms.load.steps_left
        for key, number in terms.steps:
            self._steps[key] -= number
        for op, seconds in terms.op_seconds:
            self._op_seconds[op].remove(seconds)
