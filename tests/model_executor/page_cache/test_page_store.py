"""Entries in shared memory, device memory and files, moved by a real I/O thread."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Queue

import numpy as np
import numpy.typing as npt
import pytest
import torch

from core.errors import PagesLostError
from core.handles import ArrayRef, EntryRef, Tier
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages.worker import PageCopied, PageCopy
from model_executor.page_cache import page_store
from model_executor.page_cache.page_files import PageFiles
from model_executor.page_cache.page_store import OnBlock, PageStore

NBYTES, BLOCK = 10_240, 4096
NUM_BLOCKS = 3
PATIENCE = 20.0

Bytes = npt.NDArray[np.uint8]


class GatedFiles(PageFiles):
    """A disk whose reads wait for `let_through` before they announce a block."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        super().__init__(directory, budget_bytes)
        self.let_through = threading.Semaphore(0)

    def read(self, key: str, out: Bytes, block_bytes: int, on_block: OnBlock, order: Iterable[int] = ()) -> bool:
        def announce(block: int) -> None:
            assert self.let_through.acquire(timeout=PATIENCE)
            on_block(block)

        return super().read(key, out, block_bytes, announce, order)


class Bench:
    """A store over a small page arena."""

    def __init__(self, files: PageFiles | None) -> None:
        self.arena = Arena.create(7, 1 << 20)
        self.space = ArenaAllocator(self.arena)
        self.done: Queue[PageCopied] = Queue()
        self.store = PageStore(torch.device("cpu"), self.arena, files, self.done.put)

    def host_ref(self, key: str = "a") -> EntryRef:
        return EntryRef(key, NBYTES, self.space.alloc(NBYTES))

    def start(self, key: str, source: Tier, target: Tier, host: ArrayRef | None) -> None:
        self.store.start(PageCopy(key, NBYTES, BLOCK, source, target, host))

    def copy(self, key: str, source: Tier, target: Tier, host: ArrayRef | None) -> bool:
        """Start a copy and wait for its end."""
        self.start(key, source, target, host)
        return self.next_done(key, source, target)

    def next_done(self, key: str, source: Tier, target: Tier) -> bool:
        done = self.done.get(timeout=PATIENCE)
        assert (done.key, done.source, done.target, done.nbytes) == (key, source, target, NBYTES)
        assert done.seconds >= 0
        return done.ok

    def close(self) -> None:
        self.store.close()
        self.arena.close()


@pytest.fixture
def files(tmp_path: Path) -> GatedFiles:
    return GatedFiles(tmp_path / "pages", 1 << 20)


@pytest.fixture
def bench(files: GatedFiles) -> Iterator[Bench]:
    bench = Bench(files)
    yield bench
    bench.close()


def content(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, [NBYTES], dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def open_gate(files: GatedFiles, blocks: int = NUM_BLOCKS) -> None:
    files.let_through.release(blocks)


# ------------------------------------------------------------------------------------------------------------- in place


def test_an_entry_in_host_memory_is_read_on_the_device_that_computes(bench: Bench) -> None:
    """Clean latents, of several ranks. A CPU reads them in place."""
    ref = bench.host_ref()
    bench.store.create(ref).fill_(3)
    assert bench.store.on_device(ref).data_ptr() == bench.store.entry(ref).data_ptr()
    elsewhere = PageStore(torch.device("meta"), bench.arena, None, bench.done.put)
    try:
        assert elsewhere.on_device(ref).device.type == "meta"
    finally:
        elsewhere.close()


def test_host_entries_are_views_of_shared_memory(bench: Bench) -> None:
    ref = bench.host_ref()
    assert ref.host is not None
    bench.store.create(ref).copy_(content())
    assert np.array_equal(bench.arena.view(ref.host), content().numpy())
    assert torch.equal(bench.store.entry(ref), content())
    bench.arena.view(ref.host)[5] += 1
    assert bench.store.entry(ref)[5] == (content()[5] + 1)


def test_device_entries_are_kept_by_key_until_forgotten(bench: Bench) -> None:
    ref = EntryRef("a", NBYTES, None)
    bench.store.create(ref).copy_(content())
    assert torch.equal(bench.store.entry(ref), content())
    bench.store.forget(["a", "never there"])
    with pytest.raises(KeyError, match="holds no pages a"):
        bench.store.entry(ref)


# --------------------------------------------------------------------------------------------------------------- copies


def test_a_forgotten_entrys_memory_is_free_though_no_other_copy_comes(bench: Bench) -> None:
    host = bench.host_ref()
    bench.store.create(host).copy_(content())
    assert bench.copy("a", "host", "device", host.host)
    memory = weakref.ref(bench.store.entry(EntryRef("a", NBYTES, None)))
    bench.store.forget(["a"])
    ends = time.monotonic() + PATIENCE
    while memory() is not None and time.monotonic() < ends:  # the thread tells of a copy before it has let go of it
        gc.collect()
        time.sleep(0.01)
    assert memory() is None


def test_an_entry_goes_down_to_disk_and_up_to_the_device(bench: Bench, files: GatedFiles) -> None:
    device = EntryRef("a", NBYTES, None)
    bench.store.create(device).copy_(content())
    host = bench.host_ref()
    assert bench.copy("a", "device", "host", host.host)
    assert torch.equal(bench.store.entry(host), content())
    assert bench.copy("a", "host", "disk", host.host)
    bench.store.forget(["a"])
    bench.store.entry(host).zero_()
    open_gate(files)
    bench.start("a", "disk", "host", host.host)
    bench.start("a", "host", "device", host.host)
    for block in range(NUM_BLOCKS):
        bench.store.wait_block("a", block)
        span = slice(block * BLOCK, (block + 1) * BLOCK)
        assert torch.equal(bench.store.entry(device)[span], content()[span])
    assert bench.next_done("a", "disk", "host")
    assert bench.next_done("a", "host", "device")


def test_copies_are_done_in_order(bench: Bench) -> None:
    """The copy down writes what the copy before it brought up."""
    host = bench.host_ref()
    for seed in range(8):
        bench.store.create(EntryRef(f"{seed}", NBYTES, None)).copy_(content(seed))
        bench.start(f"{seed}", "device", "host", host.host)
        bench.start(f"{seed}", "host", "disk", host.host)
    for seed in range(8):
        assert bench.next_done(f"{seed}", "device", "host")
        assert bench.next_done(f"{seed}", "host", "disk")
    for seed in range(8):
        open_gate(bench.store._files)  # type: ignore[arg-type]
        assert bench.copy(f"{seed}", "disk", "host", host.host)
        assert torch.equal(bench.store.entry(host), content(seed))


def test_computing_may_start_before_the_load_has_ended(bench: Bench, files: GatedFiles) -> None:
    host = bench.host_ref()
    bench.store.create(host).copy_(content())
    assert bench.copy("a", "host", "disk", host.host)
    bench.store.entry(host).zero_()
    bench.start("a", "disk", "host", host.host)
    open_gate(files, 1)
    bench.store.wait_block("a", 0)
    assert torch.equal(bench.store.entry(host)[:BLOCK], content()[:BLOCK])
    waiter = threading.Thread(target=bench.store.wait_block, args=("a", 1))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    assert bench.done.empty()
    open_gate(files, 1)
    waiter.join(PATIENCE)
    assert not waiter.is_alive()
    open_gate(files, 1)
    assert bench.next_done("a", "disk", "host")
    bench.store.wait_block("a", 2)


def test_a_load_continues_at_the_given_block_and_loads_all(bench: Bench, files: GatedFiles) -> None:
    host = bench.host_ref()
    assert files.write("a", content().numpy(), BLOCK)
    bench.store.entry(host).zero_()
    bench.start("a", "disk", "host", host.host)
    open_gate(files, 1)
    bench.store.wait_block("a", 0)
    bench.store.put_last("a", range(2))  # may come when block 1 is being read
    open_gate(files, 2)
    bench.store.wait_block("a", 2)
    assert torch.equal(bench.store.entry(host)[2 * BLOCK :], content()[2 * BLOCK :])
    assert bench.next_done("a", "disk", "host")
    assert torch.equal(bench.store.entry(host), content())
    bench.store.put_last("a", range(1))


def test_a_load_begins_at_the_given_block(bench: Bench, files: GatedFiles) -> None:
    """The load before it keeps the thread busy until its first block is set."""
    hosts = [bench.host_ref(key) for key in "ab"]
    for key, ref in zip("ab", hosts, strict=True):
        assert files.write(key, content().numpy(), BLOCK)
        bench.start(key, "disk", "host", ref.host)
    bench.store.put_last("b", range(2))
    open_gate(files, NUM_BLOCKS + 1)
    bench.store.wait_block("b", 2)
    (load,) = bench.store._loads["b"]
    assert load.arrived == {2}
    open_gate(files, 2)
    assert bench.next_done("a", "disk", "host")
    assert bench.next_done("b", "disk", "host")


def test_nothing_under_way_is_nothing_to_wait_for(bench: Bench) -> None:
    bench.store.wait_block("a", 0)


def test_forgetting_while_a_copy_waits_does_not_hurt_it(bench: Bench) -> None:
    host = bench.host_ref()
    bench.store.create(EntryRef("a", NBYTES, None)).copy_(content())
    bench.start("a", "device", "host", host.host)
    bench.store.forget(["a"])
    assert bench.next_done("a", "device", "host")
    assert torch.equal(bench.store.entry(host), content())


def test_deletes_follow_the_copies_before_them(bench: Bench, files: GatedFiles) -> None:
    host = bench.host_ref()
    bench.start("a", "host", "disk", host.host)
    bench.store.delete(["a"])
    bench.start("b", "host", "disk", host.host)
    assert bench.next_done("a", "host", "disk")
    assert bench.next_done("b", "host", "disk")
    assert len(list(files.directory.glob("*.page"))) == 1
    open_gate(files)
    assert not bench.copy("a", "disk", "host", host.host)


def test_a_templates_key_deletes_all_its_files(bench: Bench, files: GatedFiles) -> None:
    host = bench.host_ref()
    for key in ("t-latents", "t-0x1.0p+0", "tt-latents"):
        assert bench.copy(key, "host", "disk", host.host)
    bench.store.delete(["t"])
    open_gate(files)
    found = [bench.copy(key, "disk", "host", host.host) for key in ("t-latents", "t-0x1.0p+0", "tt-latents")]
    assert found == [False, False, True]


# ------------------------------------------------------------------------------------------------------------- failures


def test_a_missing_file_fails_the_load_and_its_waiters(bench: Bench) -> None:
    host = bench.host_ref()
    assert not bench.copy("a", "disk", "host", host.host)
    with pytest.raises(PagesLostError):
        bench.store.wait_block("a", 0)
    bench.store.create(host).copy_(content())  # computed again
    bench.store.wait_block("a", 0)


def test_a_file_damaged_late_gives_its_first_blocks_and_then_fails(bench: Bench, files: GatedFiles) -> None:
    host = bench.host_ref()
    bench.store.create(host).copy_(content())
    assert bench.copy("a", "host", "disk", host.host)
    (path,) = files.directory.glob("*.page")
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    open_gate(files)
    assert not bench.copy("a", "disk", "host", host.host)
    for block in (0, 1):
        bench.store.wait_block("a", block)
    with pytest.raises(PagesLostError):
        bench.store.wait_block("a", 2)


def test_copies_after_a_failed_load_fail_too(bench: Bench) -> None:
    host = bench.host_ref()
    bench.start("a", "disk", "host", host.host)
    bench.start("a", "host", "device", host.host)
    with pytest.raises(PagesLostError):
        bench.store.wait_block("a", 0)
    assert not bench.next_done("a", "disk", "host")
    assert not bench.next_done("a", "host", "device")


@pytest.mark.parametrize("target", ["device", "disk"])
def test_an_entry_that_did_not_load_is_not_copied_further(bench: Bench, target: Tier) -> None:
    host = bench.host_ref()
    assert not bench.copy("a", "disk", "host", host.host)
    assert not bench.copy("a", "host", target, host.host)
    bench.store.create(host).copy_(content())
    assert bench.copy("a", "host", target, host.host)


def test_a_device_that_had_no_room_may_have_some_later(bench: Bench) -> None:
    host = bench.host_ref()
    bench.store.start(PageCopy("a", 1 << 60, BLOCK, "host", "device", host.host))
    assert not bench.done.get(timeout=PATIENCE).ok
    with pytest.raises(PagesLostError):
        bench.store.entry(EntryRef("a", NBYTES, None))
    assert bench.copy("a", "host", "device", host.host)
    bench.store.wait_block("a", 0)


def test_a_repeated_load_replaces_the_failed_one(bench: Bench, files: GatedFiles) -> None:
    host = bench.host_ref()
    assert not bench.copy("a", "disk", "host", host.host)
    bench.store.entry(host).copy_(content())
    assert files.write("a", content().numpy(), BLOCK)
    open_gate(files)
    assert bench.copy("a", "disk", "host", host.host)
    bench.store.wait_block("a", 2)


def test_failed_loads_of_forgotten_entries_are_forgotten(bench: Bench) -> None:
    host = bench.host_ref()
    assert not bench.copy("a", "disk", "host", host.host)
    assert bench.store.is_loading("a")
    bench.store.forget(["a"])
    assert not bench.store.is_loading("a")


def test_only_the_latest_failed_loads_are_remembered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_store, "MAX_FAILED_LOADS", 2)
    host = bench.host_ref()
    for key in "abac":
        assert not bench.copy(key, "disk", "host", host.host)
    assert [bench.store.is_loading(key) for key in "abc"] == [True, False, True]


def test_impossible_copies_are_reported_and_the_thread_goes_on(bench: Bench) -> None:
    host = bench.host_ref()
    assert not bench.copy("a", "device", "host", host.host)  # nothing there
    assert not bench.copy("a", "disk", "device", None)  # not by way of the host
    assert not bench.copy("a", "host", "disk", ArrayRef(99, 0, (NBYTES,), "uint8"))  # another arena
    bench.store.create(host).copy_(content())
    assert bench.copy("a", "host", "disk", host.host)


def test_a_device_without_room_is_not_ok(bench: Bench) -> None:
    host = bench.host_ref()
    huge = 1 << 60
    bench.store.start(PageCopy("a", huge, BLOCK, "host", "device", host.host))
    assert not bench.done.get(timeout=PATIENCE).ok
    with pytest.raises(PagesLostError):
        bench.store.wait_block("a", 0)


def test_without_a_disk_tier_files_are_misses() -> None:
    bench = Bench(None)
    host = bench.host_ref()
    assert not bench.copy("a", "host", "disk", host.host)
    assert not bench.copy("a", "disk", "host", host.host)
    bench.store.delete(["a"])
    bench.close()


def test_closing_wakes_waiters_and_ends_the_thread(files: GatedFiles) -> None:
    bench = Bench(files)
    host = bench.host_ref()
    assert files.write("a", content().numpy(), BLOCK)
    bench.start("a", "disk", "host", host.host)
    bench.start("b", "disk", "host", host.host)
    lost = list[type]()

    def wait() -> None:
        try:
            bench.store.wait_block("b", 0)
        except PagesLostError as error:
            lost.append(type(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    open_gate(files)
    bench.store.close()
    waiter.join(PATIENCE)
    assert lost == [PagesLostError]
    assert not bench.store._thread.is_alive()
    bench.store.close()
    bench.arena.close()
