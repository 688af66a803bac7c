"""RateLimiter: requests per minute and caller, as token buckets."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

MINUTE = 60.0  # seconds
MAX_CALLERS = 10_000
_EPSILON = 1e-6  # seconds; times are rounded, and a caller that comes exactly when it was told to must pass


@dataclass(frozen=True, slots=True)
class Share:
    """What a caller has after one request. retry_after: seconds until its next request passes, 0.0 where this one did.
    remaining: requests that would pass now. reset_after: seconds until all `limit` would.
    """

    limit: int
    remaining: int
    retry_after: float
    reset_after: float

    @property
    def is_allowed(self) -> bool:
        return self.retry_after == 0.0


class RateLimiter:
    """`limit` > 0 requests per minute for each caller: a bucket holds so many and fills evenly, so a burst of `limit`
    passes, and in any time t at most limit * (1 + t / 60 s).

    A bucket is kept as the time when it is full again, and dropped once it is. Of more than `max_callers` at once the
    one that was heard of longest ago is forgotten, so memory stays bounded. Times are seconds of one clock that never
    goes back.
    """

    def __init__(self, limit: int, max_callers: int = MAX_CALLERS) -> None:
        self.limit = limit
        self._max_callers = max_callers
        self._interval = MINUTE / limit  # seconds that one request takes to be filled in again
        self._full_at: OrderedDict[str, float] = OrderedDict()  # caller -> time; the last one heard of comes last

    def __len__(self) -> int:
        """Callers that are remembered."""
        return len(self._full_at)

    def take(self, caller: str, now: float) -> Share:
        """Count one request; a refused one costs nothing."""
        full_at = max(now, self._full_at.get(caller, now))
        wait = full_at + self._interval - MINUTE - now
        if wait <= _EPSILON:
            full_at += self._interval
            wait = 0.0
        self._remember(caller, full_at, now)
        missing = full_at - now
        remaining = max(0, math.floor((MINUTE - missing + _EPSILON) / self._interval))
        return Share(self.limit, remaining, wait, missing)

    def _remember(self, caller: str, full_at: float, now: float) -> None:
        self._full_at[caller] = full_at
        self._full_at.move_to_end(caller)
        while len(self._full_at) > self._max_callers or self._full_at[next(iter(self._full_at))] <= now:
            self._full_at.popitem(last=False)
