"""ActivationCacheManager: decides which cached activations are kept on which tier, and which are evicted.

It never touches a page: it knows keys and byte counts, and issues orders (`take_orders`) that workers carry out. An
entry is a template's pages at one keyframe, or its clean latents.

              reserve: on no tier          fill
    ABSENT ---------------------> EMPTY ---------> READY         states on the compute tier, the fastest one, where an
       |                            ^                ^           entry must be to be used
       | reserve: on a slower tier  | not ok         | ok
       `-----------------------> LOADING ------------`           a copy is in flight

Entries that were used twice, or registered, are copied to the slower tiers in the background, one tier after another,
so eviction never waits for a copy. An entry has at most one copy in flight, and keeps its places until it is over.

Each rank may have a device tier of its own. All entries of a template that are on devices are on one, where its steps
run. The host tier is one for all ranks: each reads there what is READY. What is LOADING can be read, block by block, by
the rank that copies it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from core.cache.entry import Entry, EntryState, WantedEntry
from core.cache.entry_table import USES_TO_PROVE, EntryTable
from core.cache.memory_tier import MemoryTier
from core.cache.orders import PendingOrders
from core.cache.tally import CacheTally
from core.config import CacheConfig
from core.costs.load_report import CacheStats, ResidentPages
from core.handles import PAGE_ARENA, EntryRef, Tier
from core.messages.worker import PageCopied, PageCopy
from core.page_scheme import unpatched
from core.scheduling.node_cache import CacheOrders

LoadWins = Callable[[Tier, int], bool]
"""(tier, bytes) -> whether loading from that tier is predicted to be faster than priming."""

_READY = EntryState.READY  # reading a global is 10 times faster than reading an enum's member (Python 3.11)


@dataclass(frozen=True, slots=True)
class TierBudget:
    """The size limit of a tier in memory."""

    tier: Tier  # "device" or "host"
    nbytes: int
    rank: int = 0  # of a device


class ActivationCacheManager:
    """Reference counts, tiers, LRU order and statistics of all entries; owned by one scheduler."""

    def __init__(
        self,
        budgets: Sequence[TierBudget],
        *,
        has_disk: bool,
        page_arena_id: int,
        keep_all: bool,
        num_ranks: int = 1,
    ) -> None:
        """budgets: the device tiers of some ranks, if any, and the host tier. has_disk: there are files below the host
        tier. page_arena_id: the arena that is the host tier. keep_all: keep unregistered entries after use, too.
        """
        names, devices = [budget.tier for budget in budgets], budgets[:-1]
        if names != [*["device"] * len(devices), "host"]:
            raise ValueError(f"tiers must be host, or devices and host, not {names}")
        tiers = [MemoryTier(budget.tier, budget.nbytes) for budget in budgets]
        self._has_disk = has_disk
        self._num_ranks = num_ranks
        self._orders = PendingOrders(has_disk=has_disk)
        self._tally = CacheTally(tiers, has_disk=has_disk)
        by_rank = {budget.rank: tier for budget, tier in zip(devices, tiers[:-1], strict=True)}
        self._table = EntryTable(
            tiers[-1], by_rank, self._tally, self._orders, page_arena_id=page_arena_id, keep_all=keep_all
        )

    @classmethod
    def of(cls, config: CacheConfig, device_bytes: Sequence[int]) -> ActivationCacheManager:
        """The cache with these settings. device_bytes: by rank, bytes of device memory; 0: none."""
        devices = [TierBudget("device", nbytes, rank) for rank, nbytes in enumerate(device_bytes) if nbytes]
        return cls(
            [*devices, TierBudget("host", config.host_bytes)],
            has_disk=config.disk_bytes > 0,
            page_arena_id=PAGE_ARENA,
            keep_all=config.admission == "always",
            num_ranks=len(device_bytes),
        )

    # ------------------------------------------------------------------------------------------------- use

    def home(self, template_key: str, preferred: int) -> int:
        """See `EntryTable.home`."""
        return self._table.home(template_key, preferred)

    def reserve(self, wants: Sequence[WantedEntry], load_wins: LoadWins, rank: int = 0) -> bool:
        """Pin all these entries and place absent ones on their compute tier; False, with nothing pinned, if the pinned
        entries leave no room. rank: the `home` of their template.

        An absent entry becomes LOADING if a slower tier may have it and `load_wins` prefers loading, else EMPTY: the
        caller must have it filled. A disk may always have it, since other engines write there, too. Counts as one use
        of each entry; must be followed by one `release` of each.
        """
        entries = self._table.entries
        absent = [want for want in wants if (e := entries.get(want.key)) is None or e.ref is None]
        if absent and not self._put(wants, absent, load_wins, rank):
            return False
        for want in wants:
            entry = entries[want.key]
            if not entry.pins:
                entry.compute.hold(want.key)
            entry.pins += 1
            entry.uses += 1
            if entry.uses == USES_TO_PROVE:
                self._table.judge(entry)
            if entry.state is _READY:
                self._tally.hits[entry.compute.name] += 1
                if not entry.has_sunk:
                    self._sink(entry)
            elif entry.state is EntryState.LOADING:
                entry.num_waiting += 1
            else:
                self._tally.misses += 1
        return True

    def fill(self, key: str) -> None:
        """Note that an EMPTY entry has been primed; ValueError if it is not EMPTY."""
        entry = self._table.entries.get(key)
        if entry is None or entry.state is not EntryState.EMPTY:
            raise ValueError(f"entry {key} is {self.state(key).value}, not empty")
        entry.state = EntryState.READY
        self._table.templates.note_moved(key)
        self._tally.primed += 1
        self._sink(entry)

    def release(self, keys: Iterable[str]) -> None:
        """Unpin reserved entries; no worker may read or write them for this reservation any more. ValueError for one
        that is not pinned.
        """
        for key in keys:
            entry = self._table.entries.get(key)
            if entry is None or not entry.pins:
                raise ValueError(f"entry {key} is not pinned")
            entry.pins -= 1
            if not entry.pins:
                self._table.release_unused(entry)

    def state(self, key: str) -> EntryState:
        entry = self._table.entries.get(key)
        return EntryState.ABSENT if entry is None else entry.state

    def ref(self, key: str) -> EntryRef:
        """An entry's place on the compute tier; valid while it is pinned. KeyError if it has none."""
        ref = self._table.entries[key].ref
        if ref is None:
            raise KeyError(key)
        return ref

    def is_readable(self, key: str, ranks: tuple[int, ...], *, may_load: bool = False) -> bool:
        """Whether these ranks can read an entry: what is READY on a device its rank alone. may_load: or wait for its
        blocks, which the rank that copies it up can.
        """
        entry = self._table.entries.get(key)
        if entry is None:
            return False
        if entry.state is _READY:
            return not self._table.is_on_device(entry) or ranks == (entry.rank,)
        copy = entry.copy if may_load and entry.state is EntryState.LOADING else None
        return copy is not None and _is_load(copy) and ranks == (copy.rank,)

    def writer(self, key: str) -> int | None:
        """The one rank that can fill a pinned entry, which is on its device; None: any."""
        entry = self._table.entries[key]
        return entry.rank if self._table.is_on_device(entry) else None

    def tier_of(self, key: str) -> Tier | None:
        """See `EntryTable.tier_of`."""
        return self._table.tier_of(key)

    # ------------------------------------------------------------------------------------------------- templates

    def register(self, keys: Iterable[str]) -> None:
        """Keep these entries, existing or future, as if used twice: they are copied down at once, and stay after use
        also without keep_all.
        """
        for key in keys:
            self._table.registered.add(key)
            entry = self._table.entries.get(key)
            if entry is not None:
                entry.is_doomed = False
                self._table.judge(entry)
                self._sink(entry)

    def drop(self, template_key: str) -> None:
        """Drop a template with all patch sets: its entries in memory, now or once unpinned, and its files. Entries of
        it that are not there yet are no longer registered. template_key: the one without patches."""
        registered = self._table.registered
        self._orders.delete(template_key)
        registered.difference_update([key for key in registered if unpatched(key) == template_key])
        for key in self._table.templates.keys_of_all(template_key):
            entry = self._table.entries[key]
            if entry.copy is not None and "disk" in (entry.copy.source, entry.copy.target):
                entry.is_file_doomed = True  # the copy may be yet to write it: deleted when the copy is over
            entry.is_doomed, entry.was_on_disk, entry.has_sunk = True, False, False
            self._table.judge(entry)
            self._table.release_unused(entry)

    def take_resident_pages(self) -> tuple[ResidentPages, ...]:
        """The resident pages of each template whose pages have come or gone since the last call."""
        return tuple(map(self._table.resident_pages, self._table.templates.take_moved()))

    # ------------------------------------------------------------------------------------------------- orders

    def take_orders(self) -> CacheOrders:
        """Orders issued since the last call."""
        return self._orders.take()

    def finish_copy(self, done: PageCopied) -> None:
        """Process the end of a copy. A failed load leaves its entry EMPTY. A failed copy down is not repeated, except
        that one to disk is tried again at the entry's next use: there may be room by then. ValueError for a copy that
        was not ordered.
        """
        entry = self._table.entries.get(done.key)
        copy = None if entry is None else entry.copy
        if entry is None or copy is None or _ends(copy) != (done.source, done.target, done.rank):
            raise ValueError(f"no copy of entry {done.key} from {done.source} to {done.target} was ordered")
        entry.copy = None
        if _is_load(copy):
            self._finish_load(entry, copy, done)
        else:
            self._finish_sinking(entry, copy, done.ok)
        if entry.is_file_doomed:
            entry.is_file_doomed = entry.was_on_disk = entry.has_sunk = False
            self._orders.delete(done.key)
        if entry.state is EntryState.LOADING and entry.pins:
            self._load(entry)
        elif done.ok or _is_load(copy):
            self._sink(entry)
        self._table.release_unused(entry)

    def lose_rank(self, rank: int) -> None:
        """Note that a rank has died: its copies fail, and what was on its device is gone, or EMPTY while pinned."""
        self._orders.lose(rank)
        self._fail_copies([rank])
        self._table.lose_device(rank)

    def join_rank(self, rank: int) -> None:
        """Note that a rank that had died was restarted."""
        self._orders.down.remove(rank)

    def lose_all(self) -> None:
        """Fail all copies in flight, because the workers are gone."""
        self._orders.copies.clear()
        self._fail_copies(range(self._num_ranks))

    def _fail_copies(self, ranks: Collection[int]) -> None:
        for copy in [entry.copy for entry in self._table.entries.values()]:
            if copy is not None and copy.rank in ranks:
                self.finish_copy(PageCopied(copy.rank, copy.key, copy.nbytes, copy.source, copy.target, False, 0.0))

    # ------------------------------------------------------------------------------------------------- content

    def stats(self) -> CacheStats:
        return self._tally.stats(self._table.tiers)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the table agrees with itself and orders with the copies in flight."""
        self._table.check_integrity()
        in_flight = [entry.copy for entry in self._table.entries.values() if entry.copy is not None]
        assert all(copy in in_flight for copy in self._orders.copies), "an order for a copy that is not in flight"

    # ------------------------------------------------------------------------------------------------- making places

    def _put(self, wants: Sequence[WantedEntry], absent: Sequence[WantedEntry], load_wins: LoadWins, rank: int) -> bool:
        """Place the absent entries on their compute tiers; False, with none placed, if there is no room."""
        placed = self._table.place(wants, absent, rank)
        if placed is None:
            return False
        wanted = {want.key for want in wants}
        for want in {want.key: want for want in placed}.values():
            self._begin(want, rank, wanted, load_wins)
        return True

    def _begin(self, want: WantedEntry, rank: int, wanted: set[str], load_wins: LoadWins) -> None:
        """Decide where the pages of a newly placed entry come from."""
        entry = self._table.settle(want, rank)
        host = None if self._table.is_on_device(entry) else self._table.host_ref(entry)
        entry.ref = EntryRef(want.key, want.nbytes, host)
        entry.source = self._choose_source(entry, wanted, load_wins)
        entry.state = EntryState.EMPTY if entry.source is None else EntryState.LOADING
        self._table.templates.note_moved(want.key)
        if entry.source is not None and entry.copy is None:
            self._load(entry)

    def _choose_source(self, entry: Entry, wanted: set[str], load_wins: LoadWins) -> Tier | None:
        """The tier to load an absent entry from; None: it has to be primed."""
        want = entry.want
        if self._table.is_below(entry):
            return "host" if load_wins("host", want.nbytes) else None
        if not self._has_disk or not load_wins("disk", want.nbytes):
            return None
        return "disk" if not self._table.is_on_device(entry) or self._table.put_below(want, wanted) else None

    # ------------------------------------------------------------------------------------------------- copies

    def _load(self, entry: Entry) -> None:
        """Start the next copy that brings an entry up; from disk to device it takes two, by way of the host tier."""
        if entry.source == "host":
            self._start(entry, "host", "device")
        else:
            self._start(entry, "disk", "host")

    def _finish_load(self, entry: Entry, copy: PageCopy, done: PageCopied) -> None:
        self._tally.load_seconds += done.seconds
        self._table.templates.note_moved(done.key)
        if not done.ok:
            self._fail_load(entry, copy)
            return
        self._tally.loads[copy.source] += 1
        if copy.source == "disk":
            entry.was_on_disk = True
        if copy.target != entry.compute.name:
            self._tally.hits["disk"] += entry.num_waiting
            entry.num_waiting = 0
            entry.source = "host"
            return
        assert entry.source is not None
        self._tally.hits[entry.source] += entry.num_waiting
        entry.num_waiting = 0
        entry.state = EntryState.READY

    def _fail_load(self, entry: Entry, copy: PageCopy) -> None:
        self._tally.failed_loads += 1
        self._tally.misses += entry.num_waiting
        entry.num_waiting = 0
        entry.state = EntryState.EMPTY
        if self._table.is_on_device(entry) and copy.target == "host":
            self._table.host.remove(entry.want.key)
        if self._num_ranks > 1:  # else it would expect the failure of later loads, or of what another rank has filled
            self._orders.forget(entry.want.key, copy.rank)

    def _sink(self, entry: Entry) -> None:
        """Copy a proven entry one tier down, unless it is being copied already."""
        if entry.has_sunk or entry.copy is not None or not (entry.is_proven and entry.is_kept):
            return
        is_below = self._table.is_below(entry)
        if self._table.is_on_device(entry) and not is_below:
            if entry.state is EntryState.READY and self._table.put_below(entry.want, ()):
                self._start(entry, "device", "host")
        elif not self._has_disk or entry.was_on_disk:
            entry.has_sunk = True
        elif is_below or entry.state is EntryState.READY:
            self._start(entry, "host", "disk")

    def _finish_sinking(self, entry: Entry, copy: PageCopy, ok: bool) -> None:
        if not ok:
            self._tally.failed_stores += 1
        if copy.target == "disk":
            entry.was_on_disk = ok
        elif not ok:
            self._table.host.remove(entry.want.key)
            entry.has_sunk = True

    def _start(self, entry: Entry, source: Tier, target: Tier) -> None:
        """Order a copy; its entry keeps its places on all tiers until it is over."""
        want, host, rank = entry.want, self._table.host_ref(entry), entry.rank
        if "device" not in (source, target) and rank in self._orders.down:
            rank = next((other for other in range(self._num_ranks) if other not in self._orders.down), rank)
        entry.copy = PageCopy(want.key, want.nbytes, want.block_bytes, source, target, host, rank)
        self._orders.copy(entry.copy)
        entry.compute.hold(want.key)
        self._table.host.hold(want.key)


def _ends(copy: PageCopy) -> tuple[Tier, Tier, int]:
    """What names a copy besides its key."""
    return copy.source, copy.target, copy.rank


def _is_load(copy: PageCopy) -> bool:
    return copy.source == "disk" or copy.target == "device"
