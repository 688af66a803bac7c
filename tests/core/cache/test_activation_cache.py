"""ActivationCacheManager, one property per test; test_cache_policy.py tests it with arbitrary sequences of events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from core.cache.activation_cache_manager import ActivationCacheManager, TierBudget
from core.cache.entry import EntryState, WantedEntry
from core.handles import ArrayRef, EntryRef, Tier
from core.messages.worker import PageCopied, PageCopy, PageForget
from core.page_scheme import template_of
from core.scheduling.node_cache import CacheOrders

ARENA = 9


@dataclass
class Cache:
    """A manager, with a worker that carries out its orders on request. Entries are 640 bytes by default."""

    manager: ActivationCacheManager
    disk: set[str] = field(default_factory=set)
    in_flight: list[PageCopy] = field(default_factory=list)

    def reserve(self, *keys: str, nbytes: int = 640, loads: bool = True) -> bool:
        return self.manager.reserve([WantedEntry(key, nbytes, 64) for key in keys], lambda tier, size: loads)

    def prime(self, *keys: str, nbytes: int = 640) -> None:
        """Reserve and fill; the load from disk fails."""
        assert self.reserve(*keys, nbytes=nbytes)
        self.carry_out()
        for key in keys:
            self.manager.fill(key)

    def use(self, *keys: str, nbytes: int = 640) -> None:
        """One edit from reservation to release, with all copies that it causes."""
        assert self.reserve(*keys, nbytes=nbytes)
        self.carry_out()
        for key in keys:
            if self.manager.state(key) is EntryState.EMPTY:
                self.manager.fill(key)
        self.manager.release(keys)
        self.carry_out()

    def carry_out(self) -> list[tuple[str, Tier, Tier]]:
        """Carry out all orders and those that follow from them; returns the copies begun: (key, source, target)."""
        copies: list[tuple[str, Tier, Tier]] = []
        while (orders := self.take()) or self.in_flight:
            if orders is not None:
                self.disk -= {key for key in self.disk if {key, template_of(key)} & set(orders.delete)}
                copies += [(copy.key, copy.source, copy.target) for copy in orders.copies]
            while self.in_flight:
                self.finish(self.in_flight[0])
        return copies

    def take(self) -> CacheOrders | None:
        """The orders that a worker gets; None if there are none."""
        orders = self.manager.take_orders()
        self.in_flight += orders.copies
        return orders if orders.copies or orders.forget or orders.delete else None

    def finish(self, copy: PageCopy, ok: bool = True) -> None:
        self.in_flight.remove(copy)
        ok = ok and (copy.source != "disk" or copy.key in self.disk)
        if ok and copy.target == "disk":
            self.disk.add(copy.key)
        self.manager.finish_copy(PageCopied(0, copy.key, copy.nbytes, copy.source, copy.target, ok, 0.5))

    def states(self, *keys: str) -> list[str]:
        return [self.manager.state(key).value for key in keys]


@pytest.fixture
def caches() -> Iterator[list[Cache]]:
    """Makes caches, and checks their integrity at the end of the test."""
    made: list[Cache] = []
    yield made
    for cache in made:
        cache.manager.check_integrity()


class Maker:
    def __init__(self, caches: list[Cache]) -> None:
        self._caches = caches

    def __call__(self, *budgets: tuple[Tier, int], disk: bool = False, keep_all: bool = True) -> Cache:
        """budgets: (tier, size in entries of 640 bytes)."""
        sizes = [TierBudget(tier, number * 640) for tier, number in budgets]
        cache = Cache(ActivationCacheManager(sizes, has_disk=disk, page_arena_id=ARENA, keep_all=keep_all))
        self._caches.append(cache)
        return cache


@pytest.fixture
def make(caches: list[Cache]) -> Maker:
    return Maker(caches)


# ----------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("tiers", [[], ["device"], ["host", "device"], ["disk"], ["host", "disk"]])
def test_tiers_are_the_host_or_device_and_host(tiers: list[Tier]) -> None:
    with pytest.raises(ValueError, match="tiers must be"):
        ActivationCacheManager([TierBudget(t, 1) for t in tiers], has_disk=False, page_arena_id=0, keep_all=True)


def test_absent_entries_get_a_place_in_the_page_arena_to_fill(make: Maker) -> None:
    cache = make(("host", 2))
    assert cache.states("a", "b") == ["absent", "absent"]
    assert cache.reserve("a", "b")
    assert cache.states("a", "b") == ["empty", "empty"]
    assert cache.manager.ref("a") == EntryRef("a", 640, ArrayRef(ARENA, 0, (640,), "uint8"))
    assert cache.manager.ref("b") == EntryRef("b", 640, ArrayRef(ARENA, 640, (640,), "uint8"))
    cache.manager.fill("b")
    assert cache.states("a", "b") == ["empty", "ready"]
    assert cache.take() is None


def test_entries_in_device_memory_have_no_place_in_the_arena(make: Maker) -> None:
    cache = make(("device", 1), ("host", 0))
    cache.prime("a")
    assert cache.manager.ref("a") == EntryRef("a", 640, None)


def test_an_entry_without_a_place_has_no_ref(make: Maker) -> None:
    cache = make(("device", 1), ("host", 4))
    with pytest.raises(KeyError):
        cache.manager.ref("a")
    cache.use("a")
    cache.use("a")
    cache.use("b")
    assert (cache.manager.state("a"), cache.manager.tier_of("a")) == (EntryState.ABSENT, "host")
    with pytest.raises(KeyError):
        cache.manager.ref("a")


def test_entries_are_reserved_all_together_or_not_at_all(make: Maker) -> None:
    cache = make(("host", 3))
    cache.use("old")
    cache.prime("pinned")
    assert not cache.reserve("a", "b", "c")
    assert cache.states("a", "b", "c", "old", "pinned") == ["absent"] * 3 + ["ready"] * 2
    assert cache.manager.stats().evictions == {"host": 0}
    cache.manager.release(["pinned"])
    assert cache.reserve("a", "b", "c")


def test_entries_that_can_never_fit_are_refused(make: Maker) -> None:
    cache = make(("host", 3))
    wants = [WantedEntry(key, 640, 64) for key in "abcd"]
    assert not cache.manager.reserve(wants, lambda tier, nbytes: False)
    assert cache.manager.reserve(wants[:3], lambda tier, nbytes: False)


def test_one_key_reserved_twice_has_one_place_and_two_pins(make: Maker) -> None:
    cache = make(("host", 1))
    assert cache.reserve("a", "a")
    cache.manager.fill("a")
    cache.manager.release(["a"])
    assert not cache.reserve("b")
    cache.manager.release(["a"])
    assert cache.reserve("b")


@pytest.mark.parametrize("tiers", [[("host", 1)], [("device", 1), ("host", 1)]])
def test_one_key_reserved_twice_is_loaded_once(make: Maker, tiers: list[tuple[Tier, int]]) -> None:
    cache = make(*tiers, disk=True)
    cache.disk = {"a"}
    assert cache.reserve("a", "a")
    assert cache.manager.tier_of("a") == "disk"
    assert cache.carry_out()[0] == ("a", "disk", "host")
    assert cache.states("a") == ["ready"]
    assert cache.manager.stats().hits["disk"] == 2


# ----------------------------------------------------------------------------------------------------- pins and LRU


def test_the_least_recently_used_goes_first(make: Maker) -> None:
    cache = make(("host", 3))
    for key in "abc":
        cache.use(key)
    cache.use("d")
    assert cache.states(*"abcd") == ["absent", "ready", "ready", "ready"]
    cache.use("e")
    assert cache.states(*"bcde") == ["absent", "ready", "ready", "ready"]
    assert cache.manager.stats().evictions == {"host": 2}


def test_an_entry_counts_as_used_when_it_is_released(make: Maker) -> None:
    cache = make(("host", 2))
    cache.prime("a")
    cache.use("b")
    cache.manager.release(["a"])
    cache.use("c")
    assert cache.states(*"abc") == ["ready", "absent", "ready"]


def test_entries_used_twice_are_evicted_after_those_used_once(make: Maker) -> None:
    cache = make(("host", 3))
    cache.use("again")
    cache.use("again")
    for key in "abcd":
        cache.use(key)
    assert cache.states("again", *"abcd") == ["ready", "absent", "absent", "ready", "ready"]


def test_entries_used_twice_are_evicted_when_nothing_else_is_left(make: Maker) -> None:
    cache = make(("host", 3))
    for key in "aabb":
        cache.use(key)
    cache.use("c", "d", "e")
    assert cache.states(*"abcde") == ["absent", "absent", "ready", "ready", "ready"]


def test_entries_used_often_but_long_ago_are_evicted(make: Maker) -> None:
    """Four fifths of five places are for proven entries; a fifth proven entry makes the oldest one ordinary."""
    cache = make(("host", 5))
    for key in "abcde":
        cache.use(key)
        cache.use(key)
    cache.use("new")
    assert cache.states(*"abcde", "new") == ["absent", *["ready"] * 5]


def test_a_pinned_entry_stays_until_its_last_pin_is_gone(make: Maker) -> None:
    cache = make(("host", 1))
    cache.prime("a")
    assert cache.reserve("a")
    cache.manager.release(["a"])
    assert not cache.reserve("b")
    cache.manager.release(["a"])
    assert cache.reserve("b")
    assert cache.states("a", "b") == ["absent", "empty"]


def test_an_empty_entry_without_pins_is_gone(make: Maker) -> None:
    cache = make(("host", 1))
    assert cache.reserve("a")
    assert cache.reserve("a")
    cache.manager.release(["a"])
    assert cache.states("a") == ["empty"]
    cache.manager.release(["a"])
    assert cache.states("a") == ["absent"]
    assert cache.manager.stats().used_bytes == {"host": 0}


def test_only_pinned_entries_can_be_released(make: Maker) -> None:
    cache = make(("host", 1))
    with pytest.raises(ValueError, match="not pinned"):
        cache.manager.release(["a"])
    cache.use("a")
    with pytest.raises(ValueError, match="not pinned"):
        cache.manager.release(["a"])


def test_only_empty_entries_can_be_filled(make: Maker) -> None:
    cache = make(("host", 1))
    with pytest.raises(ValueError, match="absent"):
        cache.manager.fill("a")
    cache.prime("a")
    with pytest.raises(ValueError, match="ready"):
        cache.manager.fill("a")


# ----------------------------------------------------------------------------------------------------- fragmentation


def test_scattered_free_room_is_joined_by_evicting_more(make: Maker) -> None:
    """Half of the places are free, but no two adjacent ones: pinned entries stay, one more idle entry is evicted."""
    cache = make(("host", 6))
    for key in "abcdef":
        cache.prime(key)
    for key in ("a", "c", "e"):
        cache.manager.release([key])
    assert not cache.reserve("large", nbytes=1280)  # three are idle, no two of them side by side
    assert cache.states(*"abcdef") == ["ready"] * 6
    cache.manager.release(["d"])
    assert cache.reserve("large", nbytes=1280)
    assert cache.manager.ref("large").host == ArrayRef(ARENA, 1280, (1280,), "uint8")


def test_entries_whose_eviction_would_not_help_stay(make: Maker) -> None:
    cache = make(("host", 6))
    for key in "abcdef":
        cache.prime(key)
    for key in ("a", "c", "e", "d"):
        cache.manager.release([key])
    assert cache.reserve("large", nbytes=1280)  # a, c and e went first; with d, c makes room enough
    assert cache.states(*"abcdef") == ["ready", "ready", "absent", "absent", "ready", "ready"]
    assert cache.manager.stats().evictions == {"host": 2}


def test_wanted_entries_in_the_way_are_moved_rather_than_waited_for(make: Maker) -> None:
    """The entry in the middle is wanted, too; with nothing pinned, no release would ever help."""
    cache = make(("host", 5))
    cache.prime("a", "b", "middle", "c", "d")
    cache.manager.release(["a", "b", "middle", "c", "d"])
    wants = [WantedEntry("middle", 640, 64), WantedEntry("large", 4 * 640, 64)]
    assert cache.manager.reserve(wants, lambda tier, nbytes: False)
    assert cache.states("middle", "large") == ["empty", "empty"]


def test_wanted_entries_are_not_moved_while_waiting_can_help(make: Maker) -> None:
    cache = make(("host", 5))
    cache.prime("a", "b", "middle", "c", "d")
    cache.manager.release(["b", "middle", "c", "d"])
    wants = [WantedEntry("middle", 640, 64), WantedEntry("large", 3 * 640, 64)]
    assert not cache.manager.reserve(wants, lambda tier, nbytes: False)
    assert cache.states("a", "b", "middle", "c", "d") == ["ready"] * 5


# ----------------------------------------------------------------------------------------------------- disk


def test_the_first_miss_asks_the_disk(make: Maker) -> None:
    cache = make(("host", 2), disk=True)
    cache.disk = {"a"}
    assert cache.reserve("a", "b")
    assert cache.states("a", "b") == ["loading", "loading"]
    assert (cache.manager.tier_of("a"), cache.manager.tier_of("b")) == ("disk", "disk")
    assert cache.carry_out() == [("a", "disk", "host"), ("b", "disk", "host")]
    assert cache.states("a", "b") == ["ready", "empty"]
    stats = cache.manager.stats()
    assert (stats.hits, stats.misses) == ({"host": 0, "disk": 1}, 1)
    assert (stats.loads, stats.failed_loads, stats.load_seconds) == ({"disk": 1}, 1, 1.0)


def test_a_copy_says_where_and_how(make: Maker) -> None:
    cache = make(("host", 2), disk=True)
    assert cache.reserve("a")
    place = ArrayRef(ARENA, 0, (640,), "uint8")
    assert cache.take() == CacheOrders((PageCopy("a", 640, 64, "disk", "host", place),), (), ())
    assert cache.take() is None


def test_pages_that_load_slower_than_priming_are_not_loaded(make: Maker) -> None:
    cache = make(("host", 2), disk=True)
    assert cache.manager.reserve([WantedEntry("a", 640, 64)], lambda tier, nbytes: (tier, nbytes) != ("disk", 640))
    assert cache.states("a") == ["empty"]
    assert cache.take() is None


def test_the_disk_is_asked_again_once_an_entry_has_left_memory(make: Maker) -> None:
    """Another engine may have written the file meanwhile."""
    cache = make(("host", 1), disk=True)
    cache.use("a")
    cache.use("b")
    cache.disk.add("a")
    assert cache.reserve("a")
    assert cache.carry_out() == [("a", "disk", "host")]
    assert cache.states("a") == ["ready"]


def test_a_second_request_for_a_loading_entry_waits_with_the_first(make: Maker) -> None:
    cache = make(("host", 1), disk=True)
    cache.disk = {"a"}
    assert cache.reserve("a")
    assert cache.reserve("a")
    assert cache.carry_out() == [("a", "disk", "host")]
    assert cache.manager.stats().hits == {"host": 0, "disk": 2}


def test_an_entry_used_twice_goes_to_disk_in_the_background(make: Maker) -> None:
    cache = make(("host", 2), disk=True)
    cache.use("a")
    assert cache.disk == set()
    assert cache.reserve("a")
    assert cache.carry_out() == [("a", "host", "disk")]
    assert cache.states("a") == ["ready"]
    cache.use("a")
    assert cache.carry_out() == []


def test_an_entry_loaded_from_disk_is_not_written_again(make: Maker) -> None:
    cache = make(("host", 1), disk=True)
    cache.disk = {"a"}
    for _ in range(3):
        assert cache.reserve("a")
        assert cache.carry_out() in ([], [("a", "disk", "host")])
        cache.manager.release(["a"])


def test_a_disk_that_refused_is_asked_again_with_the_next_use(make: Maker) -> None:
    cache = make(("host", 1), disk=True)
    cache.use("a")
    assert cache.reserve("a")
    cache.take()
    cache.finish(cache.in_flight[0], ok=False)
    cache.take()
    assert cache.in_flight == []
    assert cache.manager.stats().failed_stores == 1
    cache.manager.release(["a"])
    assert cache.states("a") == ["ready"]
    cache.use("a")
    assert cache.disk == {"a"}
    assert cache.manager.stats().failed_stores == 1


def test_a_place_is_not_reused_while_a_copy_reads_it(make: Maker) -> None:
    cache = make(("host", 1), disk=True)
    cache.use("a")
    assert cache.reserve("a")
    cache.take()
    cache.manager.release(["a"])
    assert not cache.reserve("b")
    cache.finish(cache.in_flight[0])
    assert cache.reserve("b")


def test_a_place_is_not_reused_while_a_load_writes_it(make: Maker) -> None:
    cache = make(("host", 1), disk=True)
    cache.disk = {"a"}
    assert cache.reserve("a")
    cache.take()
    cache.manager.release(["a"])
    assert not cache.reserve("b")
    cache.finish(cache.in_flight[0])
    assert cache.states("a") == ["ready"]
    assert cache.reserve("b")


def test_an_abandoned_load_that_fails_leaves_nothing(make: Maker) -> None:
    cache = make(("host", 1), disk=True)
    assert cache.reserve("a")
    cache.take()
    cache.manager.release(["a"])
    cache.finish(cache.in_flight[0], ok=False)
    assert cache.states("a") == ["absent"]
    assert cache.manager.stats().used_bytes == {"host": 0}


def test_the_end_of_a_copy_that_was_not_ordered_is_refused(make: Maker) -> None:
    cache = make(("host", 1), disk=True)
    assert cache.reserve("a")
    for key, source, target in [("b", "disk", "host"), ("a", "host", "disk")]:
        with pytest.raises(ValueError, match="was ordered"):
            cache.manager.finish_copy(PageCopied(0, key, 640, source, target, True, 0.0))  # type: ignore[arg-type]


def test_copies_die_with_the_workers(make: Maker) -> None:
    cache = make(("host", 3), disk=True)
    cache.use("a")
    assert cache.reserve("a", "b")
    cache.manager.lose_all()
    assert cache.states("a", "b") == ["ready", "empty"]
    assert cache.take() is None
    cache.manager.release(["a", "b"])
    assert cache.reserve("x", "y", "z")


# ----------------------------------------------------------------------------------------------------- device


def test_device_entries_used_twice_are_copied_down_tier_by_tier(make: Maker) -> None:
    cache = make(("device", 1), ("host", 1), disk=True)
    cache.use("a")
    assert cache.reserve("a")
    assert cache.carry_out() == [("a", "device", "host"), ("a", "host", "disk")]
    assert cache.manager.stats().entries == {"device": 1, "host": 1}


def test_a_copy_to_the_host_that_fails_gives_its_place_back(make: Maker) -> None:
    cache = make(("device", 1), ("host", 1), disk=True)
    cache.use("a")
    assert cache.reserve("a")
    cache.take()
    cache.finish(cache.in_flight[0], ok=False)
    assert cache.take() is None
    assert cache.states("a") == ["ready"]
    assert cache.manager.stats().used_bytes == {"device": 640, "host": 0}


def test_eviction_from_the_device_copies_nothing(make: Maker) -> None:
    cache = make(("device", 1), ("host", 2))
    cache.use("a")
    cache.use("a")
    assert cache.reserve("b")
    orders = cache.take()
    assert orders == CacheOrders((), (PageForget("a"),), ())
    assert cache.manager.tier_of("a") == "host"


def test_device_entries_used_once_are_just_dropped(make: Maker) -> None:
    cache = make(("device", 1), ("host", 2))
    cache.use("a")
    cache.use("b")
    assert cache.manager.tier_of("a") is None
    assert cache.manager.stats().used_bytes == {"device": 640, "host": 0}


def test_an_entry_comes_back_from_the_host(make: Maker) -> None:
    cache = make(("device", 1), ("host", 2))
    cache.use("a")
    cache.use("a")
    cache.use("b")
    assert cache.reserve("a")
    assert (cache.states("a"), cache.manager.tier_of("a")) == (["loading"], "host")
    assert cache.carry_out() == [("a", "host", "device")]
    assert cache.states("a") == ["ready"]
    assert cache.manager.stats().hits == {"device": 1, "host": 1}


def test_priming_may_beat_the_host(make: Maker) -> None:
    cache = make(("device", 1), ("host", 2))
    cache.use("a")
    cache.use("a")
    cache.use("b")
    assert cache.reserve("a", loads=False)
    assert cache.states("a") == ["empty"]
    cache.manager.fill("a")
    assert cache.carry_out() == []  # the host has it still


def test_from_disk_to_device_in_two_hops(make: Maker) -> None:
    cache = make(("device", 1), ("host", 1), disk=True)
    cache.disk = {"a"}
    assert cache.reserve("a")
    cache.take()
    assert [(copy.source, copy.target) for copy in cache.in_flight] == [("disk", "host")]
    cache.finish(cache.in_flight[0])
    assert cache.states("a") == ["loading"]
    assert cache.carry_out() == [("a", "host", "device")]
    assert cache.states("a") == ["ready"]
    stats = cache.manager.stats()
    assert (stats.hits, stats.loads) == ({"device": 0, "host": 0, "disk": 1}, {"host": 1, "disk": 1})


def test_a_first_hop_that_fails_gives_the_host_place_back(make: Maker) -> None:
    cache = make(("device", 1), ("host", 1), disk=True)
    assert cache.reserve("a")
    cache.carry_out()
    assert cache.states("a") == ["empty"]
    assert cache.manager.stats().used_bytes == {"device": 640, "host": 0}


def test_a_load_abandoned_between_two_hops_stays_on_the_host(make: Maker) -> None:
    cache = make(("device", 1), ("host", 1), disk=True)
    cache.disk = {"a"}
    assert cache.reserve("a")
    cache.take()
    cache.manager.release(["a"])
    cache.finish(cache.in_flight[0])
    assert cache.take() == CacheOrders((), (PageForget("a"),), ())
    assert cache.manager.tier_of("a") == "host"
    assert cache.reserve("b")


def test_an_entry_on_disk_is_primed_if_the_host_has_no_room_to_pass_it_on(make: Maker) -> None:
    cache = make(("device", 2), ("host", 1), disk=True)
    cache.disk = {"a", "b"}
    assert cache.reserve("a", "b")
    assert cache.states("a", "b") == ["loading", "empty"]


def test_a_load_from_disk_does_not_evict_other_entries_that_are_wanted(make: Maker) -> None:
    cache = make(("device", 2), ("host", 1), disk=True)
    cache.use("a")
    cache.use("a")
    assert cache.reserve("x", "y", loads=False)
    cache.manager.release(["x", "y"])
    assert cache.manager.tier_of("a") == "host"
    cache.disk = {"b"}
    assert cache.reserve("b", "a")
    assert cache.states("a", "b") == ["loading", "empty"]


def test_entries_that_the_host_tier_evicted_are_copied_down_again(make: Maker) -> None:
    cache = make(("device", 2), ("host", 1))
    for key in ("a", "a", "b", "b"):
        cache.use(key)
    assert cache.manager.stats().evictions == {"device": 0, "host": 1}
    assert cache.reserve("a")
    assert cache.carry_out() == [("a", "device", "host")]


def test_an_entry_dropped_while_copied_down_is_freed_after_the_copy(make: Maker) -> None:
    cache = make(("device", 1), ("host", 2), disk=True)
    cache.prime("a")
    cache.manager.register(["a"])
    cache.take()
    cache.finish(cache.in_flight[0])
    cache.manager.release(["a"])
    cache.take()
    assert [(copy.source, copy.target) for copy in cache.in_flight] == [("host", "disk")]
    cache.manager.drop("a")
    assert cache.manager.tier_of("a") == "device"
    cache.carry_out()
    assert cache.manager.tier_of("a") is None
    assert cache.disk == set()


# ----------------------------------------------------------------------------------------------------- templates


def test_admission_manual_keeps_only_registered_templates(make: Maker) -> None:
    cache = make(("host", 4), keep_all=False)
    cache.manager.register(["kept"])
    cache.use("kept", "other")
    assert cache.states("kept", "other") == ["ready", "absent"]


def test_admission_manual_never_drops_entries_in_use(make: Maker) -> None:
    cache = make(("host", 4), keep_all=False)
    cache.prime("a")
    assert cache.states("a") == ["ready"]
    cache.manager.release(["a"])
    assert cache.states("a") == ["absent"]


def test_admission_manual_puts_nothing_unregistered_on_disk(make: Maker) -> None:
    cache = make(("host", 4), disk=True, keep_all=False)
    cache.prime("a")
    assert cache.reserve("a")
    assert cache.reserve("a")
    assert cache.carry_out() == []


def test_registered_entries_are_evicted_too_when_room_is_needed(make: Maker) -> None:
    cache = make(("host", 1), keep_all=False)
    cache.manager.register(["a"])
    cache.use("a")
    assert cache.reserve("b")


@pytest.mark.parametrize("keep_all", [True, False])
def test_registered_entries_are_copied_down_at_once(make: Maker, keep_all: bool) -> None:
    cache = make(("device", 2), ("host", 2), disk=True, keep_all=keep_all)
    cache.prime("a")
    cache.manager.register(["a"])
    assert cache.carry_out() == [("a", "device", "host"), ("a", "host", "disk")]
    cache.manager.register(["b"])
    cache.prime("b")
    assert cache.carry_out() == [("b", "device", "host"), ("b", "host", "disk")]


def test_a_dropped_template_leaves_every_tier(make: Maker) -> None:
    cache = make(("device", 2), ("host", 2), disk=True)
    cache.use("t-1", "t-2")
    cache.use("t-1", "t-2")
    assert cache.disk == {"t-1", "t-2"}
    cache.manager.drop("t")
    orders = cache.take()
    assert orders is not None
    assert orders == CacheOrders((), (PageForget("t-1"), PageForget("t-2")), ("t",))
    stats = cache.manager.stats()
    assert stats.used_bytes == {"device": 0, "host": 0}


def test_a_dropped_template_in_use_goes_with_its_last_pin(make: Maker) -> None:
    cache = make(("host", 2))
    cache.prime("t-1")
    cache.manager.drop("t")
    assert cache.states("t-1") == ["ready"]
    cache.manager.release(["t-1"])
    assert cache.states("t-1") == ["absent"]
    assert cache.take() is None  # no disk, no files


def test_an_entry_dropped_while_it_is_primed_is_not_kept(make: Maker) -> None:
    cache = make(("host", 2), disk=True)
    assert cache.reserve("t-1", loads=False)
    assert cache.reserve("t-1")
    cache.manager.drop("t")
    cache.manager.fill("t-1")
    cache.manager.release(["t-1", "t-1"])
    assert cache.states("t-1") == ["absent"]
    assert cache.carry_out() == []


def test_a_file_being_written_is_deleted_afterwards(make: Maker) -> None:
    cache = make(("host", 2), disk=True)
    cache.use("t-1")
    assert cache.reserve("t-1")
    cache.take()
    cache.manager.release(["t-1"])
    cache.manager.drop("t")
    assert cache.take() == CacheOrders((), (), ("t",))
    cache.finish(cache.in_flight[0])
    assert cache.take() == CacheOrders((), (), ("t-1",))
    assert cache.states("t-1") == ["absent"]


def test_a_file_being_read_is_deleted_afterwards_and_written_again_if_registered_again(make: Maker) -> None:
    cache = make(("host", 2), disk=True)
    cache.disk = {"t-1"}
    assert cache.reserve("t-1")
    cache.take()
    cache.manager.drop("t")
    cache.manager.register(["t-1"])
    cache.finish(cache.in_flight[0])
    assert cache.states("t-1") == ["ready"]
    orders = cache.take()
    assert orders is not None
    assert orders.delete == ("t", "t-1")
    assert [(copy.source, copy.target) for copy in orders.copies] == [("host", "disk")]


def test_a_deleted_file_is_written_again_if_registered_again(make: Maker) -> None:
    cache = make(("host", 2), disk=True)
    cache.prime("t-1")
    cache.manager.register(["t-1"])
    assert cache.carry_out() == [("t-1", "host", "disk")]
    cache.manager.drop("t")
    cache.manager.register(["t-1"])
    assert cache.carry_out() == [("t-1", "host", "disk")]
    assert cache.disk == {"t-1"}
    cache.manager.release(["t-1"])
    assert cache.states("t-1") == ["ready"]


def test_files_that_memory_no_longer_names_are_deleted_with_their_template(make: Maker) -> None:
    """Keyframes of an earlier process, or of edits with other steps."""
    cache = make(("host", 2), disk=True)
    cache.disk = {"t-0x1.8p-1", "tt-0x1.8p-1"}
    cache.manager.drop("t")
    cache.carry_out()
    assert cache.disk == {"tt-0x1.8p-1"}


def test_a_template_is_dropped_with_all_patch_sets(make: Maker) -> None:
    """Also their files, and what is registered and not there yet."""
    cache = make(("host", 8), disk=True, keep_all=False)
    keys = ("t-1", "t+a-1", "t+b-latents", "u+a-1")
    cache.manager.register([*keys, "t+c-1"])
    cache.use(*keys)
    assert cache.disk == set(keys)
    cache.manager.drop("t")
    orders = cache.take()
    assert orders is not None
    assert orders.delete == ("t",)
    assert cache.states(*keys) == ["absent", "absent", "absent", "ready"]
    cache.use("t+c-1")
    assert cache.states("t+c-1") == ["absent"]


def test_only_the_named_template_is_dropped(make: Maker) -> None:
    cache = make(("host", 3))
    cache.use("t-0x1.0p-1", "t-latents", "tt-latents")
    cache.manager.drop("t")
    assert cache.states("t-0x1.0p-1", "t-latents", "tt-latents") == ["absent", "absent", "ready"]


# ----------------------------------------------------------------------------------------------------- statistics


def test_statistics(make: Maker) -> None:
    cache = make(("host", 2))
    cache.use("a")
    cache.use("a")
    cache.use("b")
    cache.use("c")
    stats = cache.manager.stats()
    assert (stats.hits, stats.misses, stats.primed, stats.evictions) == ({"host": 1}, 3, 3, {"host": 1})
    assert (stats.entries, stats.used_bytes, stats.budget_bytes) == ({"host": 2}, {"host": 1280}, {"host": 1280})
    assert (stats.loads, stats.failed_loads, stats.load_seconds) == ({}, 0, 0.0)


def test_finding_an_entry_that_is_being_primed_counts_as_a_miss(make: Maker) -> None:
    cache = make(("host", 2))
    assert cache.reserve("a")
    assert cache.reserve("a")
    assert cache.manager.tier_of("a") is None
    assert cache.manager.stats().misses == 2


def test_the_tier_that_an_entry_lies_on(make: Maker) -> None:
    cache = make(("device", 2), ("host", 3), disk=True)
    cache.use("a", "b")
    cache.use("a", "b")
    cache.use("c")
    assert [cache.manager.tier_of(key) for key in ("a", "b", "c", "missing")] == ["host", "device", "device", None]
