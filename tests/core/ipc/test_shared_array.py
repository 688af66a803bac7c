"""Arenas: handles are checked, freed memory returns to the kernel, and the allocator behaves like a simple model."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import ipc_children
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import OutOfMemoryError
from core.handles import ArrayRef
from core.ipc.process import spawn
from core.ipc.shared_array import Arena, ArenaAllocator, carve

PAGE = mmap.PAGESIZE


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(7, 8 * 1024**3)
    yield arena
    arena.close()


def memory_taken(arena: Arena) -> int:
    """Bytes that the arena's file holds now."""
    return os.fstat(arena.fd).st_blocks * 512


def test_a_view_writes_through_and_reads_zeros_first(arena: Arena) -> None:
    ref = ArrayRef(7, 4096, (2, 3), "int16")
    assert not arena.view(ref).any()
    arena.view(ref)[1, 2] = -5
    assert arena.view(ref)[1, 2] == -5
    assert arena.view(ref).dtype == np.int16


def test_an_attached_arena_shares_memory(arena: Arena) -> None:
    other = Arena.attach(7, os.dup(arena.fd))
    ref = ArrayRef(7, arena.size - 8, (1,), "float64")
    arena.view(ref)[:] = 2.5
    assert other.size == arena.size
    assert other.view(ref)[0] == 2.5
    other.close()


async def test_a_child_computes_in_place(arena: Arena) -> None:
    ref = ArrayRef(7, 128, (3, 5), "float32")
    arena.view(ref)[...] = np.arange(15).reshape(3, 5)
    child = spawn(f"{ipc_children.__name__}:fill_array", b"128", [arena.fd], "filler")
    assert await child.wait() == 0
    assert np.array_equal(arena.view(ref), np.arange(15).reshape(3, 5) * 2)


@pytest.mark.parametrize(
    "ref",
    [
        ArrayRef(8, 0, (1,), "uint8"),
        ArrayRef(7, -8, (1,), "uint8"),
        ArrayRef(7, 8 * 1024**3, (1,), "uint8"),
        ArrayRef(7, 8 * 1024**3 - 4, (2,), "float32"),
        ArrayRef(7, 0, (2**62, 4), "uint8"),
        ArrayRef(7, 0, (-1,), "uint8"),
        ArrayRef(7, 0, (-2, -2), "uint8"),
        ArrayRef(7, 2, (1,), "float32"),
        ArrayRef(7, 0, (1,), "object"),
        ArrayRef(7, 0, (1,), ">f4"),
        ArrayRef(7, 0, (1,), "f4"),
        ArrayRef(7, 0, (1,), "nonsense"),
        ArrayRef(7, 0, (1,), ""),
        ArrayRef(7, 0, (1,), "i4,f4"),
    ],
)
def test_a_wrong_handle_is_refused(arena: Arena, ref: ArrayRef) -> None:
    with pytest.raises(ValueError, match=r"arena|shape|aligned|dtype"):
        arena.view(ref)


def test_a_view_outlives_the_arena(arena: Arena) -> None:
    view = arena.view(ArrayRef(7, 0, (PAGE,), "uint8"))
    arena.close()
    view[:] = 9
    assert view.sum() == 9 * PAGE
    with pytest.raises(ValueError, match="closed"):
        arena.view(ArrayRef(7, 0, (1,), "uint8"))


def test_an_empty_arena_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        Arena.create(1, 0)


def test_memory_is_taken_when_touched_and_given_back_when_freed(arena: Arena) -> None:
    allocator = ArenaAllocator(arena)
    assert memory_taken(arena) == 0
    large = allocator.alloc(4 * 1024 * 1024 + 1)
    assert memory_taken(arena) == 0
    arena.view(large)[:] = 1
    assert memory_taken(arena) == 4 * 1024 * 1024 + PAGE
    allocator.free(large)
    assert memory_taken(arena) == 0


def test_neighbours_on_a_shared_page_keep_their_bytes(arena: Arena) -> None:
    allocator = ArenaAllocator(arena)
    refs = [allocator.alloc(PAGE - 64) for _ in range(6)]
    for value, ref in enumerate(refs, start=1):
        arena.view(ref)[:] = value
    for ref in refs[1::2]:
        allocator.free(ref)
    for value, ref in list(enumerate(refs, start=1))[::2]:
        assert (arena.view(ref) == value).all()
    for ref in refs[::2]:
        allocator.free(ref)
    assert memory_taken(arena) == 0  # small ones as well, once nothing is left on their pages


def test_alignment(arena: Arena) -> None:
    allocator = ArenaAllocator(arena)
    assert [allocator.alloc(size).offset % 64 for size in (1, 63, 64, 65, 1000)] == [0] * 5
    assert allocator.alloc(1024 * 1024).offset % PAGE == 0


def test_free_takes_only_what_alloc_gave(arena: Arena) -> None:
    allocator = ArenaAllocator(arena)
    ref = allocator.alloc(256)
    for wrong in (
        carve(ref, 0, (16,), "uint8"),
        ArrayRef(8, ref.offset, (256,), "uint8"),
        carve(ref, 64, (8,), "uint8"),
    ):
        with pytest.raises(ValueError, match="not allocated"):
            allocator.free(wrong)
    allocator.free(ref)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(ref)
    allocator.check_integrity()


def test_a_full_arena_raises_and_recovers() -> None:
    arena = Arena.create(1, 16 * PAGE)
    allocator = ArenaAllocator(arena)
    ref = allocator.alloc(16 * PAGE)
    with pytest.raises(OutOfMemoryError, match="no room"):
        allocator.alloc(1)
    allocator.free(ref)
    assert allocator.alloc(16 * PAGE) == ref
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="cannot allocate"):
            allocator.alloc(wrong)
    arena.close()


SIZES = st.one_of(st.integers(1, 300), st.integers(1, 3 * PAGE), st.integers(15 * PAGE, 20 * PAGE))


@given(st.lists(st.one_of(SIZES, st.integers(-40, -1)), max_size=60))
def test_allocator_against_a_model(actions: list[int]) -> None:
    """A positive action allocates that many bytes, a negative one frees a live chunk. The model: a dict of live chunks.

    Chunks never overlap, keep their content, and a page takes memory only if it is part of a live chunk.
    """
    arena = Arena.create(3, 64 * PAGE)
    allocator = ArenaAllocator(arena)
    live: dict[int, tuple[ArrayRef, int]] = {}  # serial number -> (handle, the byte it is filled with)
    for serial, action in enumerate(actions):
        if action < 0 and live:
            allocator.free(live.pop(sorted(live)[-action % len(live)])[0])
        elif action > 0:
            try:
                ref = allocator.alloc(action)
            except OutOfMemoryError:
                assert longest_gap([ref for ref, _ in live.values()], arena.size) < action + 2 * PAGE + 64
                continue
            assert ref.shape == (action,)
            arena.view(ref)[:] = serial + 1
            live[serial] = ref, serial + 1
        allocator.check_integrity()
        assert all((arena.view(ref) == value).all() for ref, value in live.values())
        assert memory_taken(arena) == PAGE * len(pages_of([ref for ref, _ in live.values()]))
        assert sum(ref.size for ref, _ in live.values()) <= allocator.used_bytes
    for ref, _ in live.values():
        allocator.free(ref)
    allocator.check_integrity()
    assert allocator.used_bytes == 0
    arena.close()


def pages_of(refs: list[ArrayRef]) -> set[int]:
    return {page for ref in refs for page in range(ref.offset // PAGE, (ref.offset + ref.size - 1) // PAGE + 1)}


def longest_gap(refs: list[ArrayRef], size: int) -> int:
    position, longest = 0, 0
    for ref in sorted(refs, key=lambda ref: ref.offset):
        longest = max(longest, ref.offset - position)
        position = ref.offset + ref.size
    return max(longest, size - position)


def test_carve_cuts_inside_a_region(arena: Arena) -> None:
    region = ArrayRef(7, 640, (100,), "uint8")
    part = carve(region, 20, (4, 5), "float32")
    assert part == ArrayRef(7, 660, (4, 5), "float32")
    arena.view(part)[...] = 1.5
    assert (arena.view(region)[20:].view(np.float32) == 1.5).all()
    assert carve(region, 100, (0,), "uint8").size == 0


@pytest.mark.parametrize(
    ("offset", "shape", "dtype"),
    [(0, (26,), "float32"), (4, (25,), "float32"), (2, (1,), "float32"), (-4, (1,), "float32"), (0, (1,), "object")],
)
def test_carve_refuses_wrong_offsets_shapes_and_dtypes(offset: int, shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(ValueError, match=r"does not fit|aligned|dtype"):
        carve(ArrayRef(7, 640, (100,), "uint8"), offset, shape, dtype)


@pytest.mark.parametrize(("size", "kept"), [(100, 1), (100, 100), (40 * PAGE, 1), (40 * PAGE, 3 * PAGE + 1)])
def test_a_trimmed_chunk_keeps_its_head_and_gives_the_rest_back(size: int, kept: int) -> None:
    arena = Arena.create(7, 64 * PAGE)
    allocator = ArenaAllocator(arena)
    ref = allocator.alloc(size)
    arena.view(ref)[:] = 5
    before = allocator.used_bytes
    shorter = allocator.trim(ref, kept)
    assert (shorter.offset, shorter.shape) == (ref.offset, (kept,))
    assert (arena.view(shorter) == 5).all()
    assert allocator.used_bytes <= before
    allocator.check_integrity()
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(ref) if shorter != ref else allocator.trim(ref, size + 1)
    allocator.free(shorter)
    allocator.check_integrity()
    assert allocator.used_bytes == 0
    arena.close()
