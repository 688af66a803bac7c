"""TimeLimits: watches that no run of a user's class takes longer than it may.

Nothing can stop Python code that runs: the worker reports who is to blame, and its engine ends its process. Code that
holds the interpreter's lock for so long is ended by the engine's watchdog, which does not know who is to blame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core.errors import RunError
from core.failure import Failure
from core.messages.worker import Item, WorkerFailed


class TimeLimits:
    """One per worker. report: called in a thread."""

    def __init__(self, rank: int, report: Callable[[WorkerFailed], None]) -> None:
        self._rank, self._report = rank, report

    @contextmanager
    def of(self, item: Item, seconds: float) -> Iterator[None]:
        """Run a block for an item that may take this long."""
        timer = threading.Timer(seconds, self._end, (item, seconds))
        timer.daemon = True  # the process may end while a block runs
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self, item: Item, seconds: float) -> None:
        error = RunError.at(item.node, f"class {item.model} took longer than its {seconds:g} s")
        self._report(WorkerFailed(self._rank, Failure.of(error), item.request_id))
