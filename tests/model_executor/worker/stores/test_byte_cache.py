"""A cache of bytes: what stays, and what goes first."""

from __future__ import annotations

from model_executor.worker.stores.byte_cache import ByteCache


def test_the_least_recently_used_go_first() -> None:
    cache: ByteCache[str, int] = ByteCache(10)
    for number, key in enumerate("abc"):
        cache.put(key, number, 4)
        cache.get("a")
    assert [cache.get(key) for key in "abc"] == [0, None, 2]
    assert cache.nbytes == 8


def test_what_exceeds_the_budget_by_itself_is_not_kept() -> None:
    cache: ByteCache[str, int] = ByteCache(10)
    cache.put("a", 1, 4)
    cache.put("b", 2, 11)
    assert (cache.get("a"), cache.get("b"), cache.nbytes) == (1, None, 4)


def test_a_value_replaces_the_one_with_its_key() -> None:
    cache: ByteCache[str, int] = ByteCache(10)
    cache.put("a", 1, 8)
    cache.put("a", 2, 3)
    assert (cache.get("a"), cache.nbytes) == (2, 3)
    cache.put("a", 3, 11)
    assert (cache.get("a"), cache.nbytes) == (None, 0), "the old one is not its value any more"
