"""Orders: what the engine sends a worker, in order. While a batch runs, plans that have come may be looked at before
their turn: other ranks may wait for what the batch makes.
"""

from __future__ import annotations

from collections import deque

from core.messages.codec import MessageDecoder
from core.messages.worker import StepPlan, ToWorker
from model_executor.worker.engine_link import EngineLink


class Orders:
    """Main thread only."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._decoder: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)
        self._come: deque[ToWorker] = deque()  # before their turn

    def next(self) -> ToWorker:
        """The next message, waited for. Raises PeerClosedError when the engine is gone, MessageError for what cannot be
        decoded."""
        return self._come.popleft() if self._come else self._decoder.decode(self._link.recv())

    def newly_come(self) -> list[StepPlan]:
        """Plans that have come since the last call, and whose turn it is not yet."""
        plans: list[StepPlan] = []
        while (payload := self._link.take()) is not None:
            self._come.append(message := self._decoder.decode(payload))
            if isinstance(message, StepPlan):
                plans.append(message)
        return plans
