"""Restarts: whether a process that died is started again, after which wait, and how long the start may take. Pure:
times are arguments.
"""

from __future__ import annotations

from core.back_off import doubled

MAX_RESTARTS = 4
"""Restarts in a row before a process is given up."""

FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 1.0, 30.0
"""Wait before the second restart in a row, doubled for each further one, and its upper bound. The first restart is
immediate, as most deaths are single ones."""

RESTART_PATIENCE, MIN_RESTART_SECONDS = 10.0, 600.0
"""Time limit of a restart: this multiple of the first start's time, but at least MIN_RESTART_SECONDS. The files are
downloaded by then, so the limit of the first start, which may be hours, would only keep requests waiting."""


class Restarts:
    """The restarts of one process."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._up_since: float | None = None  # when its last start was done; None: it is not
        self._worked: float = 0.0  # when it did work last

    def note_up(self, now: float) -> None:
        """Note that the process serves."""
        self._up_since = self._worked = now

    def note_work(self, now: float) -> None:
        """Note that it has done work."""
        self._worked = now

    def has_proven(self, proven_seconds: float) -> bool:
        """Whether it has done work for this long since its last start. If it has and dies now, what it runs is not
        blamed. To be called before `may_restart`, which forgets that start.
        """
        return self._up_since is not None and self._worked - self._up_since >= proven_seconds

    @property
    def is_spent(self) -> bool:
        """Whether it has been started MAX_RESTARTS times in a row."""
        return self.in_a_row >= MAX_RESTARTS

    def may_restart(self, now: float, proven_seconds: float) -> bool:
        """Whether to start it again after a death: not if it keeps dying, as it would again. proven_seconds: after it
        has served for this long, it starts again with 0 restarts in a row.
        """
        if self._up_since is not None and now - self._up_since >= proven_seconds:
            self.in_a_row = 0
        self._up_since = None
        return not self.is_spent

    def next_wait(self) -> float:
        """Note that it is started again; the seconds to wait before. Backs off: it may have died for lack of memory or
        a device, which may become available.
        """
        self.in_a_row += 1
        return wait_before(self.in_a_row - 1)


def wait_before(num_restarts: int) -> float:
    """Seconds to wait before the next restart after `num_restarts` in a row: 0, 1, 2, 4, ..."""
    return doubled(FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS, num_restarts) if num_restarts else 0.0


def restart_limit(first_start_seconds: float, start_seconds: float) -> float:
    """Time limit of a restart. start_seconds: that of the first start."""
    return min(start_seconds, max(MIN_RESTART_SECONDS, RESTART_PATIENCE * first_start_seconds))
