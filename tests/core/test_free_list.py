"""FreeList: chunks never overlap, neighbours merge, and a copy is independent of its original."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.free_list import FreeList, round_up

SIZE = 40 * 4096


def test_first_fit_takes_the_lowest_place() -> None:
    free = FreeList(1024)
    assert [free.alloc(256) for _ in range(4)] == [0, 256, 512, 768]
    free.free(256, 512)
    free.free(768, 1024)
    assert free.alloc(64) == 256
    assert free.alloc(256) == 768
    assert free.alloc(192) == 320


def test_neighbours_merge_on_both_sides() -> None:
    free = FreeList(1024)
    for _ in range(4):
        free.alloc(256)
    assert free.free(0, 256) == (0, 256)
    assert free.free(512, 768) == (512, 768)
    assert free.free(256, 512) == (0, 768)
    assert free.free(768, 1024) == (0, 1024)
    free.check_integrity([])


def test_a_chunk_can_be_given_back_in_parts() -> None:
    free = FreeList(1024)
    assert free.alloc(512) == 0
    assert free.free(128, 512) == (128, 1024)
    assert free.used_bytes == 128
    free.check_integrity([(0, 128)])


def test_a_chunk_needs_contiguous_room() -> None:
    free = FreeList(1024)
    for _ in range(4):
        free.alloc(256)
    free.free(0, 256)
    free.free(512, 768)
    assert free.alloc(512) is None
    assert free.alloc(256) == 0


@pytest.mark.parametrize(
    ("nbytes", "alignment", "extent"),
    [(1, 64, 64), (64, 64, 64), (65, 64, 128), (65535, 64, 65536), (65536, 4096, 65536), (65537, 4096, 69632)],
)
def test_large_chunks_are_whole_memory_pages(nbytes: int, alignment: int, extent: int) -> None:
    free = FreeList(SIZE)
    free.alloc(64)
    assert free.alignment(nbytes) == alignment
    assert free.extent(nbytes) == extent
    start = free.alloc(nbytes)
    assert start == alignment
    assert free.used_bytes == 64 + extent
    free.check_integrity([(0, 64), (start, start + extent)])


def test_the_kernels_page_size_counts() -> None:
    free = FreeList(4 * 1024 * 1024, memory_page=65536)
    assert free.extent(70000) == 70016
    assert free.extent(16 * 65536 + 1) == 17 * 65536


def test_a_list_of_no_bytes_has_no_room() -> None:
    free = FreeList(0)
    assert free.alloc(1) is None
    free.check_integrity([])


def test_a_copy_is_independent() -> None:
    free = FreeList(1024)
    free.alloc(256)
    other = free.copy()
    assert other.alloc(256) == 256
    other.free(0, 256)
    free.check_integrity([(0, 256)])
    other.check_integrity([(256, 512)])


@pytest.mark.parametrize("chunks", [[], [(0, 128)], [(0, 256), (256, 320)], [(64, 256)]])
def test_integrity_finds_what_is_wrong(chunks: list[tuple[int, int]]) -> None:
    free = FreeList(1024)
    free.alloc(256)
    with pytest.raises(AssertionError):
        free.check_integrity(chunks)


NBYTES = st.one_of(st.integers(1, 300), st.integers(1, 3 * 4096), st.integers(15 * 4096, 20 * 4096))


@given(st.lists(st.one_of(NBYTES, st.integers(-40, -1)), max_size=80))
def test_against_a_model(actions: list[int]) -> None:
    """A positive action allocates this many bytes, a negative one frees a live chunk. The model marks each 64 bytes."""
    free = FreeList(SIZE)
    live: list[tuple[int, int]] = []
    for action in actions:
        if action < 0 and live:
            free.free(*live.pop(-action % len(live)))
        elif action > 0:
            start = free.alloc(action)
            assert start == first_fit(live, free.extent(action), free.alignment(action))
            if start is not None:
                live.append((start, start + free.extent(action)))
        free.check_integrity(live)
        assert free.used_bytes == sum(end - start for start, end in live)
    for start, end in live:
        free.free(start, end)
    assert free.alloc(SIZE) == 0


def first_fit(live: list[tuple[int, int]], extent: int, alignment: int) -> int | None:
    """The lowest place between the live chunks."""
    candidates = sorted({0, *(round_up(end, alignment) for _, end in live)})
    for start in candidates:
        end = start + extent
        if end <= SIZE and all(end <= low or high <= start for low, high in live):
            return start
    return None
