"""TimeLimits: watches that no run of a user's class, and no load of one, takes longer than it may.

Nothing can stop Python code that runs: the worker reports who is to blame, and its engine ends its process. Code that
holds the interpreter's lock for so long is ended by the engine's watchdog, which does not know who is to blame.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count

from core.errors import ConfigError, RunError
from core.failure import Failure
from core.messages.worker import Item, WorkerFailed
from core.run_class import RunClass

IMPORT_SECONDS = 60.0
"""Most that the import of a class may take while the worker serves."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """Of a block that runs."""

    deadline: float  # monotonic seconds
    failed: WorkerFailed


class TimeLimits:
    """One per worker. report: called in a thread.

    One thread watches all blocks: to start one for each block, as `threading.Timer` does, took up to a millisecond,
    more than all else that a node of a small class takes. The thread is woken only for a deadline that is earlier than
    the one that it waits for. The end of a block does not wake it.
    """

    def __init__(self, rank: int, report: Callable[[WorkerFailed], None]) -> None:
        self._rank, self._report = rank, report
        self._ids = count()
        self._watcher: threading.Thread | None = None  # from the first block on
        # What follows changes under the lock of `_changed`.
        self._changed = threading.Condition()
        self._limits: dict[int, _Limit] = {}  # of the blocks that run, by id
        self._wakes_at = math.inf  # monotonic seconds: what the watcher waits for

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
        limit, limit_id = _Limit(time.monotonic() + seconds, failed), next(self._ids)
        with self._changed:
            self._limits[limit_id] = limit
            if self._watcher is None:
                # A daemon, since the process may end while a block runs.
                self._watcher = threading.Thread(target=self._watch, name="time-limits", daemon=True)
                self._watcher.start()
            elif limit.deadline < self._wakes_at:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._limits.pop(limit_id, None)

    def _watch(self) -> None:
        while True:
            for limit in self._take_passed():
                self._report(limit.failed)

    def _take_passed(self) -> list[_Limit]:
        """Limits that have passed, which are watched no more. Waits for the next one if there are none."""
        with self._changed:
            now = time.monotonic()
            passed = [each for each, limit in self._limits.items() if limit.deadline <= now]
            if not passed:
                self._wakes_at = min((limit.deadline for limit in self._limits.values()), default=math.inf)
                self._changed.wait(None if self._wakes_at == math.inf else self._wakes_at - now)
            return [self._limits.pop(each) for each in passed]
