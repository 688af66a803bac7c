"""How many bodies are read at once: no more than the queue could take, as each may fill 200 MB of disk. A full queue
takes as many as would make room if what is read were of a higher class.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import OverloadedError
from engine.client.async_engine import AsyncEngine
from entrypoints.openai.errors import NoDiskError


class UploadSlots:
    """The places of the engine's queue that are free, lent to requests whose bodies are still being read."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._num_taken = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold one place; raises OverloadedError where there is none, before anything is read."""
        engine = self._engine
        if engine.num_admitted + self._num_taken >= engine.config.max_queue + engine.num_displaceable:
            self._engine.metrics.observe_rejected("queue_full")
            raise OverloadedError("The queue is full.", retry_after=self._engine.retry_after())
        self._num_taken += 1
        try:
            yield
        except NoDiskError:
            self._engine.metrics.observe_rejected("no_disk")
            raise
        finally:
            self._num_taken -= 1
