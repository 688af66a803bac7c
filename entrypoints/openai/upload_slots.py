"""How many bodies are read at once: no more than the queue could take, as each may fill 200 MB of disk. A full queue
takes as many as would make room for what is read. Places are shared fairly between owners, as those in the queue are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from engine.client.upload_place import UploadPlace
from engine.observability.metrics import Metrics
from entrypoints.openai.errors import NoDiskError


class UploadSlots:
    """The places of the engine's queue that are free, lent to requests whose bodies are still being read."""

    def __init__(self, check_upload: Callable[[str, Collection[UploadPlace]], None], metrics: Metrics) -> None:
        """check_upload: as `AsyncEngine.check_upload`."""
        self._check_upload = check_upload
        self._metrics = metrics
        self._taken: set[UploadPlace] = set()

    @asynccontextmanager
    async def take(self, owner: str) -> AsyncIterator[None]:
        """Hold one place. Raises OverloadedError where there is none, before anything is read, and while it is read
        where an owner with fewer places takes it.
        """
        self._check_upload(owner, [place for place in self._taken if not place.refusal])
        place = UploadPlace(owner)
        try:
            async with place.reading:
                self._taken.add(place)
                yield
        except NoDiskError:
            self._metrics.observe_rejected("no_disk")
            raise
        finally:
            self._taken.discard(place)
        if place.refusal and place.reading.cancelled_caught:
            raise place.refusal
