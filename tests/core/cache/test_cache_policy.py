"""ActivationCacheManager against an independent model, with arbitrary sequences of requests, priming, copies, failures
and drops.

The model knows nothing of the manager's internals. It carries out the manager's orders on simulated memory and a
simulated disk, and checks that nothing overwrites a live entry, that readers find their own entry's bytes, that pinned
entries stay, that ranks can read what the manager says, and that budgets hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from core.cache.activation_cache_manager import ActivationCacheManager, TierBudget
from core.cache.entry import EntryState, WantedEntry
from core.handles import ArrayRef, Tier
from core.messages.worker import PageCopied, PageCopy
from core.page_scheme import latents_key, template_of

ARENA = 5
SIZES = {"a": 700, "b": 1300, "c": 1300, "d": 2600, "e": 4000}
"""template -> bytes of each of its three entries."""
HOST_BYTES = 9000
DEVICE_BYTES = 8000


@dataclass
class Reserved:
    """What one request reserved."""

    wants: list[WantedEntry]


@dataclass
class Model:
    """The workers' memory and disk."""

    pins: Counter[str] = field(default_factory=Counter)
    device: dict[tuple[int, str], bool] = field(default_factory=dict)  # (rank, key) -> whether its bytes are right
    host: dict[ArrayRef, str] = field(default_factory=dict)  # region -> the key whose bytes are in it
    disk: set[str] = field(default_factory=set)
    in_flight: list[PageCopy] = field(default_factory=list)
    failed: set[tuple[int, str]] = field(default_factory=set)  # (rank, key) of failed loads that the rank remembers


class AnyOrder(RuleBasedStateMachine):
    """The rules common to all combinations of tiers, which are subclasses."""

    budgets: tuple[TierBudget, ...]
    num_ranks: int
    has_disk: bool
    keep_all: bool

    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.new_manager()
        # With several ranks the first entry of a template is read by all of them.
        self.wants = {
            name: [WantedEntry(f"{name}-{i}", nbytes, 64, i == 0 and self.num_ranks > 1) for i in range(3)]
            for name, nbytes in SIZES.items()
        }
        self.model = Model()
        self.down: set[int] = set()  # ranks that have died
        self.registered: set[str] = set()
        self.reported: dict[str, tuple[int, int]] = {}  # template -> (ready, below) as last reported

    def new_manager(self) -> ActivationCacheManager:
        return ActivationCacheManager(
            self.budgets,
            has_disk=self.has_disk,
            page_arena_id=ARENA,
            keep_all=self.keep_all,
            num_ranks=self.num_ranks,
        )

    @property
    def on_device(self) -> bool:
        return self.budgets[0].tier == "device"

    # ------------------------------------------------------------------------------------------------- rules

    @rule(
        target=reservations,
        template=st.sampled_from(sorted(SIZES)),
        part=st.sets(st.integers(0, 2), min_size=1),
        winners=st.sets(st.sampled_from(["host", "disk"])),
        preferred=st.integers(0, 2),
    )
    def reserve(self, template: str, part: set[int], winners: set[Tier], preferred: int) -> Reserved:
        wants = [self.wants[template][number] for number in sorted(part)]
        rank = self.manager.home(template, preferred % self.num_ranks)
        before = {want.key: self.manager.state(want.key) for want in wants}
        if not self.manager.reserve(wants, lambda tier, _: tier in winners, rank):
            assert {want.key: self.manager.state(want.key) for want in wants} == before
            is_busy = sum(self.model.pins.values()) or self.model.in_flight or self.down
            assert is_busy or not self.new_manager().reserve(wants, lambda tier, _: False, rank), "there was room"
            return Reserved([])
        self.model.pins.update(want.key for want in wants)
        self.carry_out_orders()
        for want in wants:
            state = self.manager.state(want.key)
            if before[want.key] is EntryState.ABSENT and state is EntryState.LOADING:
                assert self.manager.tier_of(want.key) in winners
            if before[want.key] is not EntryState.ABSENT and self.model.pins[want.key] > 1:
                assert state is before[want.key]
        return Reserved(wants)

    @precondition(lambda self: self.empty())
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.empty()))
        writer, up = self.manager.writer(key), sorted({*range(self.num_ranks)} - self.down)
        writers = [rank for rank in up if writer in (None, rank)]
        if writers:
            self.write(key, data.draw(st.sampled_from(writers)))
            self.manager.fill(key)

    @rule(reserved=consumes(reservations))
    def release(self, reserved: Reserved) -> None:
        keys = [want.key for want in reserved.wants]
        self.model.pins.subtract(keys)
        self.manager.release(keys)

    @precondition(lambda self: self.model.in_flight)
    @rule(data=st.data(), ok=st.booleans())
    def finish_a_copy(self, data: st.DataObject, ok: bool) -> None:
        copy = data.draw(st.sampled_from(self.model.in_flight))
        self.model.in_flight.remove(copy)
        done = self.copied(copy, ok)
        self.manager.finish_copy(done)

    @rule(template=st.sampled_from(sorted(SIZES)))
    def register(self, template: str) -> None:
        keys = [want.key for want in self.wants[template]]
        self.registered.update(keys)
        self.manager.register(keys)

    @rule(template=st.sampled_from(sorted(SIZES)))
    def drop(self, template: str) -> None:
        keys = [want.key for want in self.wants[template]]
        self.registered.difference_update(keys)
        self.manager.drop(template)
        self.carry_out_orders()
        for key in keys:
            if not self.model.pins[key] and not self.copies_of(key):
                assert self.manager.state(key) is EntryState.ABSENT
                assert self.manager.tier_of(key) is None
            if not self.copies_of(key):
                assert key not in self.model.disk

    @precondition(lambda self: self.model.in_flight)
    @rule()
    def lose_the_workers(self) -> None:
        self.model.in_flight.clear()
        self.manager.lose_all()

    @precondition(lambda self: len(self.down) < self.num_ranks)
    @rule(data=st.data())
    def lose_a_rank(self, data: st.DataObject) -> None:
        model, rank = self.model, data.draw(st.sampled_from(sorted({*range(self.num_ranks)} - self.down)))
        self.carry_out_orders()
        model.in_flight = [copy for copy in model.in_flight if copy.rank != rank]
        model.device = {place: is_full for place, is_full in model.device.items() if place[0] != rank}
        model.failed = {place for place in model.failed if place[0] != rank}
        self.down.add(rank)
        self.manager.lose_rank(rank)

    @precondition(lambda self: self.down)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.down)))
        self.down.remove(rank)
        self.manager.join_rank(rank)

    # ------------------------------------------------------------------------------------------------- the workers

    def empty(self) -> list[str]:
        """Pinned entries that have to be primed."""
        pinned = sorted(key for key, pins in self.model.pins.items() if pins)
        return [key for key in pinned if self.manager.state(key) is EntryState.EMPTY]

    def carry_out_orders(self) -> None:
        orders = self.manager.take_orders()
        for gone in orders.forget:
            self.model.device.pop((gone.rank, gone.key), None)
            self.model.failed.discard((gone.rank, gone.key))
        for key in orders.delete:
            assert self.has_disk
            self.model.disk -= {file for file in self.model.disk if key in (file, template_of(file))}
        for copy in orders.copies:
            assert not self.copies_of(copy.key), "two copies of one entry at a time"
            assert copy.rank not in self.down, "an order to a rank that has died"
            self.model.in_flight.append(copy)
            if copy.source == "host":
                assert copy.host is not None
                assert self.model.host.get(copy.host) == copy.key, "a copy reads another's bytes"
            if copy.source == "device":
                assert self.model.device[copy.rank, copy.key]
            if copy.target == "host":
                self.scribble(copy.key, copy.host)

    def copied(self, copy: PageCopy, ok: bool) -> PageCopied:
        """Carry out a copy; it fails if the disk does not have the file."""
        ok = ok and (copy.source != "disk" or copy.key in self.model.disk)
        if copy.source == "host":
            assert copy.host is not None
            assert self.model.host.get(copy.host) == copy.key, "its bytes changed under a copy"
        if ok:
            match copy.target:
                case "disk":
                    self.model.disk.add(copy.key)
                case "host":
                    assert copy.host is not None
                    self.model.host[copy.host] = copy.key
                case "device":
                    self.model.device[copy.rank, copy.key] = True
        elif copy.source == "disk":
            self.model.disk.discard(copy.key)
        if not ok and copy.target != "disk" and copy.source != "device":
            self.model.failed.add((copy.rank, copy.key))
        return PageCopied(copy.rank, copy.key, copy.nbytes, copy.source, copy.target, ok, 0.25)

    def copies_of(self, key: str) -> list[PageCopy]:
        """In flight, or ordered from a rank that has died."""
        return [copy for copy in [*self.model.in_flight, *self.manager._orders.copies] if copy.key == key]

    def write(self, key: str, rank: int) -> None:
        """A rank primes an entry."""
        ref = self.manager.ref(key)
        self.model.failed.discard((rank, key))
        if ref.host is None:
            self.model.device[rank, key] = True
        else:
            self.scribble(key, ref.host)
            self.model.host[ref.host] = key

    def scribble(self, key: str, region: ArrayRef | None) -> None:
        """Write to an entry's region of the arena: it must not overlap a copy in flight; its former content is lost."""
        assert region is not None
        assert region.arena == ARENA
        assert region.offset >= 0
        assert region.offset + region.size <= HOST_BYTES
        for copy in self.model.in_flight:
            assert copy.key == key or copy.host is None or not overlaps(copy.host, region), "a copy was overwritten"
        self.model.host = {ref: owner for ref, owner in self.model.host.items() if not overlaps(ref, region)}

    # ------------------------------------------------------------------------------------------------- always

    @invariant()
    def all_agree(self) -> None:
        self.carry_out_orders()
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert all(stats.used_bytes[tier] <= stats.budget_bytes[tier] for tier in stats.used_bytes)
        for key, pins in self.model.pins.items():
            if pins:
                self.a_pinned_entry_is_there(key)
        self.budgets_are_kept()
        self.resident_pages_are_reported()

    def resident_pages_are_reported(self) -> None:
        """The sum of all reports of resident pages is the current content."""
        self.reported |= {
            each.template: (each.num_ready, each.num_below) for each in self.manager.take_resident_pages()
        }
        for template, wants in self.wants.items():
            keys = [want.key for want in wants if want.key != latents_key(template)]
            states = {key: self.manager.state(key) for key in keys}
            ready = sum(state is EntryState.READY for state in states.values())
            below = sum(states[key] is not EntryState.READY and self.manager.tier_of(key) == "host" for key in keys)
            assert self.reported.get(template, (0, 0)) == (ready, below)

    def a_pinned_entry_is_there(self, key: str) -> None:
        state = self.manager.state(key)
        assert state is not EntryState.ABSENT
        ref = self.manager.ref(key)
        is_shared = key.endswith("-0") and self.num_ranks > 1
        assert (ref.key, ref.nbytes, ref.host is None) == (key, SIZES[key[0]], self.on_device and not is_shared)
        readers = {rank for rank in range(self.num_ranks) if self.manager.is_readable(key, (rank,))}
        assert bool(readers) == (state is EntryState.READY)
        if readers and ref.host is None:
            assert readers == {rank for rank, held in self.model.device if held == key}, "on one rank's device"
        elif readers:
            assert readers == set(range(self.num_ranks)), "host memory is for every rank"
            assert self.model.host[ref.host] == key
        assert not any((rank, key) in self.model.failed for rank in readers), "a reader would wait for a failed load"
        if state is EntryState.LOADING:
            self.a_load_can_be_waited_for_by_its_rank(key)

    def a_load_can_be_waited_for_by_its_rank(self, key: str) -> None:
        (copy,) = self.copies_of(key)
        is_load = copy.source == "disk" or copy.target == "device"
        waiting = [rank for rank in range(self.num_ranks) if self.manager.is_readable(key, (rank,), may_load=True)]
        assert waiting == ([copy.rank] if is_load else [])

    def budgets_are_kept(self) -> None:
        """Counted from the workers' memory and orders, not by the manager's own count."""
        pinned = [key for key, pins in self.model.pins.items() if pins]
        for budget in self.budgets[:-1]:
            here = {key for rank, key in self.model.device if rank == budget.rank}
            here |= {key for key in pinned if self.manager.writer(key) == budget.rank}
            assert sum(SIZES[key[0]] for key in here) <= budget.nbytes
        if not self.on_device or self.num_ranks > 1:
            regions = sorted(
                (ref.offset, ref.size) for key in pinned if (ref := self.manager.ref(key).host) is not None
            )
            assert self.on_device or len(regions) == len(pinned)
            ends = [0, *(offset + size for offset, size in regions)]
            assert all(end <= offset for end, (offset, _) in zip(ends, regions, strict=False)), "pinned entries overlap"
            assert ends[-1] <= HOST_BYTES

    def teardown(self) -> None:
        """At the end only entries that are to be kept are left."""
        for rank in self.down:
            self.manager.join_rank(rank)
        self.down.clear()
        self.carry_out_orders()
        while self.model.in_flight:
            self.manager.finish_copy(self.copied(self.model.in_flight.pop(), True))
            self.carry_out_orders()
        pinned, self.model.pins = list(self.model.pins.elements()), Counter()
        self.manager.release(pinned)
        self.all_agree()
        for key in [want.key for wants in self.wants.values() for want in wants]:
            assert self.manager.state(key) in (EntryState.ABSENT, EntryState.READY)
            if not self.keep_all and key not in self.registered:
                assert self.manager.tier_of(key) is None


def overlaps(one: ArrayRef, other: ArrayRef) -> bool:
    return one.offset < other.offset + other.size and other.offset < one.offset + one.size


HOST = (TierBudget("host", HOST_BYTES),)
DEVICE = (TierBudget("device", DEVICE_BYTES), TierBudget("host", HOST_BYTES))
DEVICES = (TierBudget("device", DEVICE_BYTES), TierBudget("device", 5000, 2), TierBudget("host", HOST_BYTES))


@pytest.mark.parametrize("keep_all", [True, False], ids=["always", "manual"])
@pytest.mark.parametrize("has_disk", [True, False], ids=["disk", "no-disk"])
@pytest.mark.parametrize(
    ("budgets", "num_ranks"),
    [(HOST, 1), (DEVICE, 1), (HOST, 2), (DEVICE, 2), (DEVICES, 3)],
    ids=["host", "device", "host-of-two-ranks", "device-of-one-of-two-ranks", "devices-of-two-of-three-ranks"],
)
def test_any_order(budgets: tuple[TierBudget, ...], num_ranks: int, has_disk: bool, keep_all: bool) -> None:
    members = {"budgets": budgets, "num_ranks": num_ranks, "has_disk": has_disk, "keep_all": keep_all}
    case = type("Case", (AnyOrder,), members).TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
    case().runTest()
