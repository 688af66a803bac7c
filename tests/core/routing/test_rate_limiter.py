"""Token buckets: how many requests pass in any interval, what callers get as retry-after, and that memory stays
bounded.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.routing.rate_limiter import MINUTE, RateLimiter


def test_a_burst_then_an_even_flow() -> None:
    limiter = RateLimiter(3)
    shares = [limiter.take("a", 100.0) for _ in range(4)]
    assert [share.is_allowed for share in shares] == [True, True, True, False]
    assert [share.remaining for share in shares] == [2, 1, 0, 0]
    assert [share.reset_after for share in shares] == [20.0, 40.0, 60.0, 60.0]
    assert shares[-1].retry_after == 20.0
    assert not limiter.take("a", 119.9).is_allowed
    assert limiter.take("a", 120.0).is_allowed
    assert limiter.take("b", 120.0).is_allowed


@given(
    limit=st.integers(1, 200),
    gaps=st.lists(st.floats(0, 90), min_size=1, max_size=80),
    start=st.floats(0, 1e6),
)
def test_what_passes(limit: int, gaps: list[float], start: float) -> None:
    """In no interval more than its share passes; a caller passes exactly from its retry_after on."""
    limiter, now, passed = RateLimiter(limit), start, []
    for gap in gaps:
        now += gap
        share = limiter.take("a", now)
        assert 0 <= share.remaining <= limit
        assert 0 <= share.reset_after <= MINUTE + 1e-3
        if not share.is_allowed:
            assert 0 < share.retry_after <= MINUTE / limit + 1e-3
            assert share.remaining == 0
            early = now + share.retry_after / 2
            if share.retry_after > 1e-3:
                assert not limiter.take("a", early).is_allowed
            now += share.retry_after
            assert limiter.take("a", now).is_allowed
        passed.append(now)
    for first, begin in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= limit * (1 + (passed[last] - begin) / MINUTE) + 1e-3 * limit + 1e-3


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 30)), max_size=200))
def test_forgetting_full_buckets_changes_nothing(calls: list[tuple[int, float]]) -> None:
    """Compared with a separate limiter for each caller."""
    limiter, alone, now = RateLimiter(2), {}, 0.0
    for caller, gap in calls:
        now += gap
        share = limiter.take(str(caller), now)
        assert share == alone.setdefault(caller, RateLimiter(2)).take("it", now)
        assert len(limiter) <= 31


def test_memory_is_bounded() -> None:
    limiter = RateLimiter(1, max_callers=100)
    for caller in range(1000):
        assert limiter.take(str(caller), 0.0).is_allowed
    assert len(limiter) == 100
    assert not limiter.take("999", 0.0).is_allowed
    assert limiter.take("0", 0.0).is_allowed  # forgotten
    limiter.take("one more", 2 * MINUTE)
    assert len(limiter) == 1  # the others' buckets are full


@pytest.mark.parametrize("limit", [1, 7, 60, 1000])
def test_the_share_of_a_minute(limit: int) -> None:
    """Asked every 10 ms for two minutes: a full bucket and its refills pass."""
    limiter = RateLimiter(limit)
    passed = sum(limiter.take("a", step / 100).is_allowed for step in range(12_000))
    assert 3 * limit - 1 <= passed <= 3 * limit
