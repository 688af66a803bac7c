"""EntryTable: the entries of the activation cache, and their places on the tiers in memory.

It gives entries places, evicts them, and removes those that have no place left. Which entries are wanted, and what is
copied between tiers, is decided by its owner, the ActivationCacheManager.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.cache.entry import Entry, EntryState, Want
from core.cache.memory_tier import MemoryTier
from core.cache.orders import PendingOrders
from core.cache.tally import CacheTally
from core.cache.template_index import TemplateIndex
from core.costs.load_report import Residency
from core.handles import ArrayRef, Tier
from core.page_scheme import latents_key

USES_TO_PROVE = 2
"""Uses that make an entry proven. Others are not copied to slower tiers, and are evicted first."""


class EntryTable:
    """Entries by key. tiers: those in memory, fastest first: models compute on the first one."""

    def __init__(
        self,
        tiers: Sequence[MemoryTier],
        tally: CacheTally,
        orders: PendingOrders,
        *,
        page_arena_id: int,
        keep_all: bool,
    ) -> None:
        """keep_all: keep entries after use while there is room; else only those that are registered."""
        self.tiers = tuple(tiers)
        self.compute = tiers[0]
        self.below = tiers[1] if len(tiers) > 1 else None  # the host tier, where models do not compute on it
        self.templates = TemplateIndex()
        self.registered: set[str] = set()  # keys
        self.entries: dict[str, Entry] = {}  # key -> entry with a place on any tier
        self._tally = tally
        self._orders = orders
        self._page_arena_id = page_arena_id
        self._keep_all = keep_all

    def put_below(self, want: Want, spared: Iterable[str]) -> bool:
        """Place an entry on the host tier below the compute tier; False if there is no room."""
        assert self.below is not None
        evicted = self.below.put({want.key: want.nbytes}, set(spared))
        if evicted is None:
            return False
        self.evict(self.below, evicted)
        return True

    def new(self, want: Want) -> Entry:
        """Add an entry that has no place yet."""
        entry = self.entries[want.key] = Entry(want)
        self.judge(entry)
        self.templates.add(want.key)
        return entry

    def evict(self, tier: MemoryTier, keys: Iterable[str]) -> None:
        """Note that these entries have lost their place on a tier to others."""
        for key in keys:
            self._tally.evictions[tier.name] += 1
            self._remove_from(tier, self.entries[key])

    def release_unused(self, entry: Entry) -> None:
        """Make an entry evictable on the tiers where it is unused, or remove it from them if it is not kept."""
        if entry.copy is not None:
            return
        key = entry.want.key
        if self.below is not None and key in self.below:
            if entry.is_kept or entry.pins:
                self.below.let_go(key, entry.is_proven)
            else:
                self.below.remove(key)
                self._remove_from(self.below, entry)
        if entry.pins or entry.ref is None:
            return
        if entry.is_kept and entry.state is EntryState.READY:
            self.compute.let_go(key, entry.is_proven)
        else:
            self.compute.remove(key)
            self._remove_from(self.compute, entry)

    def _remove_from(self, tier: MemoryTier, entry: Entry) -> None:
        """Note that an entry has no place on `tier` any more."""
        key = entry.want.key
        self.templates.note_moved(key)
        if tier is self.compute:
            entry.state, entry.ref = EntryState.ABSENT, None
            if tier.name == "device":
                self._orders.forget(key)
        else:
            entry.has_sunk = False
        if not any(key in tier for tier in self.tiers):
            del self.entries[key]
            self.templates.remove(key)

    def judge(self, entry: Entry) -> None:
        """Update whether an entry is kept after use, and whether it is proven."""
        is_registered = entry.want.key in self.registered
        entry.is_kept = not entry.is_doomed and (self._keep_all or is_registered)
        entry.is_proven = is_registered or entry.uses >= USES_TO_PROVE

    def host_ref(self, entry: Entry) -> ArrayRef:
        """Its place in the page arena."""
        offset = self.host_tier.offset(entry.want.key)
        return ArrayRef(self._page_arena_id, offset, (entry.want.nbytes,), "uint8")

    def is_below(self, key: str) -> bool:
        """Whether an entry is on the host tier while the device is the compute tier."""
        return self.below is not None and key in self.below

    @property
    def host_tier(self) -> MemoryTier:
        return self.below or self.compute

    def tier_of(self, key: str) -> Tier | None:
        """The tier of an entry's pages, while LOADING the one that they come from ("disk" if they exist); None: no tier
        in memory.
        """
        entry = self.entries.get(key)
        if entry is None or entry.state is EntryState.EMPTY:
            return None
        if entry.state is EntryState.LOADING:
            return entry.source
        return self.compute.name if entry.state is EntryState.READY else "host"

    def residency(self, template_key: str) -> Residency:
        """Number of a template's keyframes whose pages are on the compute tier, and on the host tier alone."""
        latents = latents_key(template_key)
        keys = [key for key in self.templates.keys_of(template_key) if key != latents]
        num_ready = sum(self.entries[key].state is EntryState.READY for key in keys)
        num_below = sum(self.tier_of(key) == "host" and self.entries[key].state is not EntryState.READY for key in keys)
        return Residency(template_key, num_ready, num_below)

    def check_integrity(self) -> None:
        """Raise AssertionError unless budgets are kept and pins, places, states and copies agree."""
        for tier in self.tiers:
            tier.check_integrity()
            assert set(tier) <= set(self.entries), "a place without an entry"
        self.templates.check_integrity(self.entries)
        for key, entry in self.entries.items():
            self._check_entry(key, entry)

    def _check_entry(self, key: str, entry: Entry) -> None:
        is_below = self.is_below(key)
        assert (key in self.compute) == (entry.ref is not None) == (entry.state is not EntryState.ABSENT), key
        assert key in self.compute or is_below, f"{key} is nowhere"
        assert entry.pins >= 0
        assert entry.pins == 0 or entry.ref is not None, f"{key} is pinned without a place"
        assert entry.state is not EntryState.EMPTY or entry.pins or entry.copy, f"{key} is EMPTY and has no user"
        assert (entry.state is EntryState.LOADING) <= (entry.copy is not None), f"{key} waits for no copy"
        may_go = not entry.pins and entry.copy is None
        assert self.compute.is_idle(key) == (may_go and entry.ref is not None), f"{key}: pins and LRU differ"
        if self.below is not None:
            assert self.below.is_idle(key) == (is_below and entry.copy is None), f"{key}: copy and LRU differ"
        assert not (may_go and not entry.is_kept), f"{key} should be gone"
        if entry.ref is not None and entry.ref.host is not None:
            assert entry.ref.host.offset == self.compute.offset(key), f"{key} has moved"
        if entry.copy is not None and entry.copy.host is not None:
            assert entry.copy.host.offset == self.host_tier.offset(key), f"{key} moved while copied"
