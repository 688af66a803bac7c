"""Limits how many request bodies are read at once to the places of the queue that are free or could be displaced, as
each may take 200 MB of disk. Slots are shared fairly between owners, as the places in the queue are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from engine.client.sessions.upload_place import UploadPlace
from engine.observability.metrics import Metrics
from entrypoints.openai.answer.errors import NoDiskError


class UploadSlots:
    """Counts the requests whose bodies are being read, each of which takes a slot."""

    def __init__(self, check_upload: Callable[[str, Collection[UploadPlace]], None], metrics: Metrics) -> None:
        """check_upload: `AsyncEngine.check_upload`, which gets the owner and the slots taken."""
        self._check_upload = check_upload
        self._metrics = metrics
        self._taken: set[UploadPlace] = set()

    @asynccontextmanager
    async def take(self, owner: str) -> AsyncIterator[None]:
        """Take a slot for the duration of the context. Raises OverloadedError if none is free, and inside the context
        if an owner with fewer places takes the slot.
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
