"""RateLimiter: limits requests per minute and caller with token buckets."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

MINUTE = 60.0  # seconds
MAX_CALLERS = 10_000
_EPSILON = 1e-6  # seconds; times are rounded, and a caller that returns exactly after `retry_after` must pass


@dataclass(frozen=True, slots=True)
class Quota:
    """A caller's quota after one request."""

    limit: int  # requests per minute
    remaining: int  # requests that would pass now
    retry_after: float  # seconds until its next request passes; 0.0: this one passed
    reset_after: float  # seconds until all `limit` requests would pass at once

    @property
    def is_allowed(self) -> bool:
        return self.retry_after == 0.0


class RateLimiter:
    """`limit` > 0 requests per minute for each caller: a bucket holds `limit` requests and refills evenly, so a burst
    of `limit` passes, and in any time t at most limit * (1 + t / 60 s).

    A bucket is stored as the time when it is full again, and dropped at that time. Above `max_callers` the least recent
    caller is dropped, so memory stays bounded. Times are seconds of one monotonic clock.
    """

    def __init__(self, limit: int, max_callers: int = MAX_CALLERS) -> None:
        self.limit = limit
        self._max_callers = max_callers
        self._interval = MINUTE / limit  # seconds in which a bucket regains one request
        self._full_at: OrderedDict[str, float] = OrderedDict()  # caller -> time; the most recent caller is last

    def __len__(self) -> int:
        """Number of callers with a bucket."""
        return len(self._full_at)

    def take(self, caller: str, now: float) -> Quota:
        """Count one request; a refused one costs nothing."""
        full_at = max(now, self._full_at.get(caller, now))
        wait = full_at + self._interval - MINUTE - now
        if wait <= _EPSILON:
            full_at += self._interval
            wait = 0.0
        self._remember(caller, full_at, now)
        missing = full_at - now
        remaining = max(0, math.floor((MINUTE - missing + _EPSILON) / self._interval))
        return Quota(self.limit, remaining, wait, missing)

    def _remember(self, caller: str, full_at: float, now: float) -> None:
        self._full_at[caller] = full_at
        self._full_at.move_to_end(caller)
        while len(self._full_at) > self._max_callers or self._full_at[next(iter(self._full_at))] <= now:
            self._full_at.popitem(last=False)
