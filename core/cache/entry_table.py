"""EntryTable: the entries of the activation cache, and their places on the tiers in memory.

It gives entries places, evicts them, and removes those that have no place left. Which entries are wanted, and what is
copied between tiers, is decided by its owner, the ActivationCacheManager.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from core.cache.entry import Entry, EntryState, WantedEntry
from core.cache.memory_tier import MemoryTier
from core.cache.orders import PendingOrders
from core.cache.tally import CacheTally
from core.cache.template_index import TemplateIndex
from core.costs.load_report import ResidentPages
from core.handles import ArrayRef, Tier
from core.page_scheme import latents_key

USES_TO_PROVE = 2
"""Uses that make an entry proven. Others are not copied to slower tiers, and are evicted first."""


class EntryTable:
    """Entries by key. An entry has places on its compute tier and, if that is a device, on the host tier below it."""

    def __init__(
        self,
        host: MemoryTier,
        devices: Mapping[int, MemoryTier],
        tally: CacheTally,
        orders: PendingOrders,
        *,
        page_arena_id: int,
        keep_all: bool,
    ) -> None:
        """devices: rank -> its device tier. keep_all: keep entries after use while there is room; else only those that
        are registered.
        """
        self.host = host
        self.devices = dict(devices)
        self.tiers = (*self.devices.values(), host)
        self.templates = TemplateIndex()
        self.registered: set[str] = set()  # keys
        self.entries: dict[str, Entry] = {}  # key -> entry with a place on any tier
        self._tally = tally
        self._orders = orders
        self._page_arena_id = page_arena_id
        self._keep_all = keep_all

    def put_below(self, want: WantedEntry, spared: Iterable[str]) -> bool:
        """Place an entry on the host tier below a device; False if there is no room."""
        evicted = self.host.put({want.key: want.nbytes}, set(spared))
        if evicted is None:
            return False
        self.evict(self.host, evicted)
        return True

    def place(self, wants: Sequence[WantedEntry], absent: Sequence[WantedEntry], rank: int) -> list[WantedEntry] | None:
        """Give all absent ones of these wanted entries places on their compute tiers, or none. Returns those placed,
        which may be more; None if there is no room. rank: where their users run.
        """
        wanted, placed = {want.key for want in wants}, list[tuple[MemoryTier, Sequence[WantedEntry]]]()
        all_by_tier = self._by_tier(wants, rank)
        for tier, missing in self._by_tier(absent, rank).items():
            here = self._put(tier, missing, all_by_tier[tier], wanted)
            if here is None:
                for other, given in placed:
                    for want in given:
                        other.remove(want.key)
                return None
            placed.append((tier, here))
        return [want for _, given in placed for want in given]

    def _put(
        self, tier: MemoryTier, absent: Sequence[WantedEntry], wants: Sequence[WantedEntry], spared: set[str]
    ) -> Sequence[WantedEntry] | None:
        """Place the absent ones of the wanted entries of one tier; returns those placed, None if there is no room."""
        evicted = tier.put(_sizes(absent), spared)
        if evicted is None:
            # Only wanted entries that are scattered may be in the way; waiting would not help.
            if tier.is_held or not tier.fits_empty(_sizes(wants)):
                return None
            self.evict(tier, tier.clear())
            absent, evicted = wants, tier.put(_sizes(wants), ())
            assert evicted is not None
        self.evict(tier, evicted)
        return absent

    def settle(self, want: WantedEntry, rank: int) -> Entry:
        """The entry, which has got a place on its compute tier and had none; added if it is new."""
        entry, compute = self.entries.get(want.key), self._compute_tier(want, rank)
        if entry is not None:
            entry.compute, entry.rank = compute, rank
            return entry
        entry = self.entries[want.key] = Entry(want, compute, rank)
        self.judge(entry)
        self.templates.add(want.key)
        return entry

    def _compute_tier(self, want: WantedEntry, rank: int) -> MemoryTier:
        """Where an entry is used whose users run on this rank, which has a device tier if any has."""
        return self.devices[rank] if self.devices and not want.is_shared else self.host

    def _by_tier(self, wants: Iterable[WantedEntry], rank: int) -> dict[MemoryTier, list[WantedEntry]]:
        """Entries by their compute tier."""
        tiers: dict[MemoryTier, list[WantedEntry]] = {}
        for want in wants:
            tiers.setdefault(self._compute_tier(want, rank), []).append(want)
        return tiers

    def home(self, template_key: str, preferred: int) -> int:
        """The rank on which a template's pages are used: where they are on a device, else the preferred one, or if that
        has no device tier and others do, the first of these.
        """
        if not self.devices:
            return preferred
        for key in self.templates.keys_of(template_key) if len(self.devices) > 1 else ():
            entry = self.entries[key]
            if self.is_on_device(entry) and entry.ref is not None:
                return entry.rank
        return preferred if preferred in self.devices else min(self.devices)

    def evict(self, tier: MemoryTier, keys: Iterable[str]) -> None:
        """Note that these entries have lost their place on a tier to others."""
        for key in keys:
            self._tally.evictions[tier.name] += 1
            self._remove_from(tier, self.entries[key])

    def lose_device(self, rank: int) -> None:
        """Note that the pages on a rank's device are gone, and copies to and from it have ended: entries lose their
        place there, or are EMPTY if they are pinned. Those that are LOADING are on their way to host memory still.
        """
        device = self.devices.get(rank)
        for key in list(device or ()):
            entry = self.entries[key]
            if entry.state is EntryState.LOADING:
                continue
            if not entry.pins:
                entry.compute.remove(key)
                self._remove_from(entry.compute, entry)
            elif entry.state is EntryState.READY:
                entry.state = EntryState.EMPTY
                self.templates.note_moved(key)

    def release_unused(self, entry: Entry) -> None:
        """Make an entry evictable on the tiers where it is unused, or remove it from them if it is not kept."""
        if entry.copy is not None:
            return
        key = entry.want.key
        if self.is_below(entry):
            if entry.is_kept or entry.pins:
                self.host.let_go(key, entry.is_proven)
            else:
                self.host.remove(key)
                self._remove_from(self.host, entry)
        if entry.pins or entry.ref is None:
            return
        if entry.is_kept and entry.state is EntryState.READY:
            entry.compute.let_go(key, entry.is_proven)
        else:
            entry.compute.remove(key)
            self._remove_from(entry.compute, entry)

    def _remove_from(self, tier: MemoryTier, entry: Entry) -> None:
        """Note that an entry has no place on `tier` any more."""
        key = entry.want.key
        self.templates.note_moved(key)
        if tier is entry.compute:
            entry.state, entry.ref = EntryState.ABSENT, None
            if tier.name == "device":
                self._orders.forget(key, entry.rank)
        else:
            entry.has_sunk = False
        if key not in entry.compute and key not in self.host:
            del self.entries[key]
            self.templates.remove(key)

    def judge(self, entry: Entry) -> None:
        """Update whether an entry is kept after use, and whether it is proven."""
        is_registered = entry.want.key in self.registered
        entry.is_kept = not entry.is_doomed and (self._keep_all or is_registered)
        entry.is_proven = is_registered or entry.uses >= USES_TO_PROVE

    def host_ref(self, entry: Entry) -> ArrayRef:
        """Its place in the page arena."""
        offset = self.host.offset(entry.want.key)
        return ArrayRef(self._page_arena_id, offset, (entry.want.nbytes,), "uint8")

    def is_on_device(self, entry: Entry) -> bool:
        """Whether an entry's compute tier is a device."""
        return entry.compute is not self.host

    def is_below(self, entry: Entry) -> bool:
        """Whether an entry is on the host tier, below its compute tier."""
        return entry.compute is not self.host and entry.want.key in self.host

    def tier_of(self, key: str) -> Tier | None:
        """The tier of an entry's pages, while LOADING the one that they come from ("disk" if they exist); None: no tier
        in memory.
        """
        entry = self.entries.get(key)
        if entry is None or entry.state is EntryState.EMPTY:
            return None
        if entry.state is EntryState.LOADING:
            return entry.source
        return entry.compute.name if entry.state is EntryState.READY else "host"

    def resident_pages(self, template_key: str) -> ResidentPages:
        """Number of a template's keyframes whose pages are on the compute tier, and on the host tier alone."""
        latents = latents_key(template_key)
        keys = [key for key in self.templates.keys_of(template_key) if key != latents]
        num_ready = sum(self.entries[key].state is EntryState.READY for key in keys)
        num_below = sum(self.tier_of(key) == "host" and self.entries[key].state is not EntryState.READY for key in keys)
        return ResidentPages(template_key, num_ready, num_below)

    def check_integrity(self) -> None:
        """Raise AssertionError unless budgets are kept and pins, places, states and copies agree."""
        for tier in self.tiers:
            tier.check_integrity()
            assert set(tier) <= set(self.entries), "a place without an entry"
        self.templates.check_integrity(self.entries)
        for key, entry in self.entries.items():
            self._check_entry(key, entry)

    def _check_entry(self, key: str, entry: Entry) -> None:
        is_below = self.is_below(entry)
        assert (key in entry.compute) == (entry.ref is not None) == (entry.state is not EntryState.ABSENT), key
        assert key in entry.compute or is_below, f"{key} is nowhere"
        assert all(key not in tier for tier in self.devices.values() if tier is not entry.compute), f"{key} is twice"
        assert not self.is_on_device(entry) or self.devices[entry.rank] is entry.compute, f"{key} is on another rank"
        assert entry.pins >= 0
        assert entry.pins == 0 or entry.ref is not None, f"{key} is pinned without a place"
        assert entry.state is not EntryState.EMPTY or entry.pins or entry.copy, f"{key} is EMPTY and has no user"
        assert (entry.state is EntryState.LOADING) <= (entry.copy is not None), f"{key} waits for no copy"
        may_go = not entry.pins and entry.copy is None
        assert entry.compute.is_idle(key) == (may_go and entry.ref is not None), f"{key}: pins and LRU differ"
        if self.is_on_device(entry):
            assert self.host.is_idle(key) == (is_below and entry.copy is None), f"{key}: copy and LRU differ"
        assert not (may_go and not entry.is_kept), f"{key} should be gone"
        if entry.ref is not None and entry.ref.host is not None:
            assert entry.ref.host.offset == entry.compute.offset(key), f"{key} has moved"
        if entry.copy is not None and entry.copy.host is not None:
            assert entry.copy.host.offset == self.host.offset(key), f"{key} moved while copied"


def _sizes(wants: Iterable[WantedEntry]) -> dict[str, int]:
    """Key -> bytes."""
    return {want.key: want.nbytes for want in wants}
