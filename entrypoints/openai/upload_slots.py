"""Limits how many request bodies are read at once to the free places of the queue, as each may take 200 MB of disk.
Queued requests that one of a higher priority class would displace count as free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.observability.metrics import Metrics
from entrypoints.openai.errors import NoDiskError


class UploadSlots:
    """Counts the requests whose bodies are being read, each of which takes a slot."""

    def __init__(self, check_upload: Callable[[int], None], metrics: Metrics) -> None:
        """check_upload: `AsyncEngine.check_upload`, which gets the number of slots taken and raises OverloadedError."""
        self._check_upload = check_upload
        self._metrics = metrics
        self._num_taken = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Take a slot for the duration of the context. Raises OverloadedError if none is free."""
        self._check_upload(self._num_taken)
        self._num_taken += 1
        try:
            yield
        except NoDiskError:
            self._metrics.observe_rejected("no_disk")
            raise
        finally:
            self._num_taken -= 1
