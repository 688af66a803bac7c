"""EngineQueue: a router's copy of one engine's queue of edits, kept from the changes in the engine's reports.

The engine orders its queue with a FairQueue. The same changes in the same sequence keep a second FairQueue equal to it,
so both have the same order without any report of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from core.costs.exact_sum import ExactSum
from core.costs.load_report import Begun, Dequeued, Ended, LoadReport, QueueChange, Queued, RequestLoad
from core.scheduling.requests.fair_queue import Claim, FairQueue


class QueueRest(NamedTuple):
    """The edits at the end of a long queue, which are not looked at one by one. Sums over them."""

    steps: int
    seconds: float  # all of their work, without the constant part of their steps

    @classmethod
    def of(cls, loads: Sequence[RequestLoad]) -> QueueRest:
        return cls(*_sums(loads))


@dataclass(slots=True)
class _Held:
    """An edit in the queue."""

    load: RequestLoad | None  # None: it has ended, but has not left the queue yet


class EngineQueue:
    """Empty until the first report, and again after `clear`."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all edits."""
        self._queue: FairQueue[_Held] = FairQueue()
        self._claims: dict[str, Claim[_Held]] = {}  # request id -> its claim
        self._begun: dict[str, _Held] = {}  # those of them that have begun
        self._num_waiting: Counter[tuple[str, int]] = Counter()  # (owner, priority) -> waiting edits; no zeros
        # Of the waiting edits: steps, what they add to a step, and all of their work.
        self._steps, self._step_seconds, self._seconds = 0, ExactSum(), ExactSum()
        self._running: list[RequestLoad] = []
        self._loads: Sequence[RequestLoad] | None = ()  # None: to be listed again

    def update(self, report: LoadReport) -> None:
        """Apply an engine's next report. Changes of unknown edits are ignored."""
        if report.is_first or not report.num_running + report.num_waiting:
            self.clear()
        for change in report.queue:
            self._apply(change)
        for request_id, held in self._begun.items():
            held.load = report.running.get(request_id)
        self._running = [held.load for held in self._begun.values() if held.load is not None]
        self._loads = None

    def __len__(self) -> int:
        """Number of loads."""
        return len(self._running) + self._num_waiting.total()

    @property
    def step_seconds(self) -> float:
        """The seconds that all edits would add to a step, if it had all of them."""
        return sum(load.step_seconds for load in self._running) + float(self._step_seconds)

    def loads(self) -> Sequence[RequestLoad]:
        """The remaining work of all edits that have not ended, in the engine's order."""
        if self._loads is None:
            self._loads = [held.load for held in self._queue.in_order() if held.load is not None]
        return self._loads

    def split(self, number: int) -> tuple[Sequence[RequestLoad], QueueRest | None]:
        """The first of `loads`, this many, and the rest of the queue; None if there is no rest. Costs by the number."""
        if len(self) <= number:
            return self.loads(), None
        in_order = (held.load for held in self._queue.in_order() if held.load is not None)
        first = list(islice(in_order, number))
        (running_steps, running_seconds), (first_steps, first_seconds) = _sums(self._running), _sums(first)
        steps = self._steps + running_steps - first_steps
        return first, QueueRest(steps, float(self._seconds) + running_seconds - first_seconds)

    def may_be_overtaken(self, owner: str, priority: int) -> bool:
        """Whether a new edit of this owner and class could go before any waiting one, see `staying_ahead`."""
        return any(other != owner or lower > priority for other, lower in self._num_waiting)

    # ------------------------------------------------------------------------------------------------- inside

    def _apply(self, change: QueueChange) -> None:
        if isinstance(change, Queued):
            self._add(change)
        elif (claim := self._claims.get(change.request_id)) is not None:
            match change:
                case Begun():
                    self._begin(claim, change)
                case Ended():
                    self._stop_waiting(claim)
                case Dequeued():
                    self._remove(claim, change)

    def _add(self, change: Queued) -> None:
        load = change.load
        urgency = change.due, load.arrival, change.request_id
        claim = Claim(_Held(load), load.owner, load.priority, urgency, load.seconds)
        self._claims[change.request_id] = claim
        self._queue.add(claim)
        self._num_waiting[load.owner, load.priority] += 1
        self._steps += load.steps_left
        self._step_seconds.add(load.step_seconds)
        self._seconds.add(load.seconds)

    def _begin(self, claim: Claim[_Held], change: Begun) -> None:
        self._stop_waiting(claim)
        claim.seconds = change.seconds
        self._queue.begin(claim)
        self._begun[change.request_id] = claim.item

    def _remove(self, claim: Claim[_Held], change: Dequeued) -> None:
        if self._begun.pop(change.request_id, None) is None:
            self._stop_waiting(claim)
        self._queue.remove(claim, change.charged_seconds)
        del self._claims[change.request_id]

    def _stop_waiting(self, claim: Claim[_Held]) -> None:
        load, claim.item.load = claim.item.load, None
        if load is None:
            return  # it had ended
        self._steps -= load.steps_left
        self._step_seconds.remove(load.step_seconds)
        self._seconds.remove(load.seconds)
        kind = load.owner, load.priority
        self._num_waiting[kind] -= 1
        if not self._num_waiting[kind]:
            del self._num_waiting[kind]


def _sums(loads: Sequence[RequestLoad]) -> tuple[int, float]:
    """(steps, seconds) of these, as in QueueRest."""
    return sum(load.steps_left for load in loads), sum(load.seconds for load in loads)
