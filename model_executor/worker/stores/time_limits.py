"""TimeLimits: watches that no run of a user's class, and no load of one, takes longer than it may.

Nothing can stop Python code that runs: the worker reports who is to blame, and its engine ends its process. Code that
holds the interpreter's lock for so long is ended by the engine's watchdog, which does not know who is to blame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from core.errors import ConfigError, RunError
from core.failure import Failure
from core.messages.worker import Item, WorkerFailed
from core.run_class import RunClass

IMPORT_SECONDS = 60.0
"""Most that the import of a class may take while the worker serves."""


class TimeLimits:
    """One per worker. report: called in a thread."""

    def __init__(self, rank: int, report: Callable[[WorkerFailed], None]) -> None:
        self._rank, self._report = rank, report

    def of(self, item: Item, config: RunClass) -> AbstractContextManager[None]:
        """Run a block for an item."""
        error = RunError.at(item.node, f"class {item.model} took longer than its {config.seconds:g} s")
        return self._limited(config.seconds, WorkerFailed(self._rank, Failure.of(error), item.request_id))

    def of_load(self, config: RunClass) -> AbstractContextManager[None]:
        """Run a block that loads a class."""
        took = f"loading took longer than its {config.load_seconds:g} s"
        error = ConfigError(f"{config.name} ({config.path}): {took}")
        return self._limited(config.load_seconds, WorkerFailed(self._rank, Failure.of(error), config.key))

    def of_import(self, config: RunClass) -> AbstractContextManager[None]:
        """Run a block that imports a class while the worker serves."""
        error = ConfigError(f"{config.name} ({config.path}): importing took longer than {IMPORT_SECONDS:g} s")
        return self._limited(IMPORT_SECONDS, WorkerFailed(self._rank, Failure.of(error), config.key))

    @contextmanager
    def _limited(self, seconds: float, failed: WorkerFailed) -> Iterator[None]:
        timer = threading.Timer(seconds, self._report, (failed,))
        timer.daemon = True  # the process may end while a block runs
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
