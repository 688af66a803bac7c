"""CacheTally: counters of the activation cache since start: hits, misses, evictions, loads. It makes no decisions."""

from __future__ import annotations

from collections.abc import Sequence

from core.cache.memory_tier import MemoryTier
from core.costs.load_report import CacheStats
from core.handles import Tier


class CacheTally:
    """Written by the cache manager that owns it. The counters are those of CacheStats."""

    def __init__(self, tiers: Sequence[MemoryTier], *, has_disk: bool) -> None:
        """tiers: those in memory, fastest first; each rank may have one. has_disk: there are files below them."""
        names: list[Tier] = list(dict.fromkeys(tier.name for tier in tiers))
        slower: list[Tier] = [*names[1:], "disk"] if has_disk else names[1:]
        self.hits: dict[str, int] = dict.fromkeys([names[0], *slower], 0)  # by tier that the pages came from
        self.misses = 0
        self.primed = 0
        self.evictions: dict[str, int] = dict.fromkeys(names, 0)  # by tier
        self.loads: dict[str, int] = dict.fromkeys(slower, 0)  # by tier that was read
        self.failed_loads = 0
        self.failed_stores = 0
        self.load_seconds = 0.0

    def stats(self, tiers: Sequence[MemoryTier]) -> CacheStats:
        """The counters, with the current content of these tiers."""
        return CacheStats(
            hits=dict(self.hits),
            misses=self.misses,
            primed=self.primed,
            evictions=dict(self.evictions),
            loads=dict(self.loads),
            failed_loads=self.failed_loads,
            failed_stores=self.failed_stores,
            entries=_by_name(tiers, [len(tier) for tier in tiers]),
            used_bytes=_by_name(tiers, [tier.used_bytes for tier in tiers]),
            budget_bytes=_by_name(tiers, [tier.budget_bytes for tier in tiers]),
            load_seconds=self.load_seconds,
        )


def _by_name(tiers: Sequence[MemoryTier], numbers: Sequence[int]) -> dict[str, int]:
    """Their sums over the ranks."""
    sums = dict.fromkeys((tier.name for tier in tiers), 0)
    for tier, number in zip(tiers, numbers, strict=True):
        sums[tier.name] += number
    return {str(name): number for name, number in sums.items()}
