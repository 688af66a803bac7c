"""How many bodies are read at once: no more than the queue could take, as each may fill 200 MB of disk. A full queue
takes as many as would make room if what is read were of a higher class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.observability.metrics import Metrics
from entrypoints.openai.errors import NoDiskError


class UploadSlots:
    """The places of the engine's queue that are free, lent to requests whose bodies are still being read."""

    def __init__(self, check_upload: Callable[[int], None], metrics: Metrics) -> None:
        """check_upload: as `AsyncEngine.check_upload`."""
        self._check_upload = check_upload
        self._metrics = metrics
        self._num_taken = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold one place; raises OverloadedError where there is none, before anything is read."""
        self._check_upload(self._num_taken)
        self._num_taken += 1
        try:
            yield
        except NoDiskError:
            self._metrics.observe_rejected("no_disk")
            raise
        finally:
            self._num_taken -= 1
