"""EngineQueue: a router's copy of one engine's queue of edits, kept from the changes in the engine's reports.

The engine orders its queue with a FairQueue. The same changes in the same sequence keep a second FairQueue equal to it,
so both have the same order without any report of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from core.costs.exact_sum import ExactSum
from core.costs.load_report import Begun, Ended, Left, LoadReport, QueueChange, Queued, RequestLoad
from core.scheduling.fair_queue import Claim, FairQueue


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
        self._waiting_seconds = ExactSum()  # that the waiting edits add to a step
        self._running_seconds = 0.0  # that the running edits add to a step
        self._num_loads = 0
        self._loads: Sequence[RequestLoad] | None = ()  # None: to be listed again

    def update(self, report: LoadReport) -> None:
        """Apply an engine's next report. Changes of unknown edits are ignored: a report may have been unreadable."""
        if report.is_first or not report.num_running + report.num_waiting:
            self.clear()
        for change in report.queue:
            self._apply(change)
        for request_id, held in self._begun.items():
            held.load = report.running.get(request_id)
        running = [held.load for held in self._begun.values() if held.load is not None]
        self._running_seconds = sum(load.step_seconds for load in running)
        self._num_loads = len(running) + self._num_waiting.total()
        self._loads = None

    def __len__(self) -> int:
        """Number of loads."""
        return self._num_loads

    @property
    def step_seconds(self) -> float:
        """The seconds that all edits would add to a step, if it had all of them."""
        return self._running_seconds + float(self._waiting_seconds)

    def loads(self) -> Sequence[RequestLoad]:
        """The remaining work of all edits that have not ended, in the engine's order."""
        if self._loads is None:
            self._loads = [held.load for held in self._queue.in_order() if held.load is not None]
        return self._loads

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
                case Left():
                    self._remove(claim, change.request_id)

    def _add(self, change: Queued) -> None:
        load = change.load
        urgency = change.due, load.arrival, change.request_id
        claim = Claim(_Held(load), load.owner, load.priority, urgency, load.seconds)
        self._claims[change.request_id] = claim
        self._queue.add(claim)
        self._num_waiting[load.owner, load.priority] += 1
        self._waiting_seconds.add(load.step_seconds)

    def _begin(self, claim: Claim[_Held], change: Begun) -> None:
        self._stop_waiting(claim)
        claim.seconds = change.seconds
        self._queue.begin(claim)
        self._begun[change.request_id] = claim.item

    def _remove(self, claim: Claim[_Held], request_id: str) -> None:
        if self._begun.pop(request_id, None) is None:
            self._stop_waiting(claim)
        self._queue.remove(claim)
        del self._claims[request_id]

    def _stop_waiting(self, claim: Claim[_Held]) -> None:
        load, claim.item.load = claim.item.load, None
        if load is None:
            return  # it had ended
        self._waiting_seconds.remove(load.step_seconds)
        kind = load.owner, load.priority
        self._num_waiting[kind] -= 1
        if not self._num_waiting[kind]:
            del self._num_waiting[kind]
