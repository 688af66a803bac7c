"""Weights in huge pages: the copies are right, share chunks, and free them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from model_executor.device_failures import is_out_of_memory
from model_executor.kernels import huge_pages
from model_executor.kernels.huge_pages import CHUNK_BYTES, LINE, HugePages


def mapped(address: int) -> bool:
    """Whether this process has memory there."""
    ranges = (line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def test_copies_share_a_chunk() -> None:
    """Each begins at a cache line, and is contiguous."""
    pages, tensors = HugePages(), [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(4, 6).T]
    copies = [pages.put(each) for each in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.is_contiguous()
    starts = [copy.data_ptr() for copy in copies]
    assert [start - starts[0] for start in starts] == [0, LINE, 2 * LINE]
    copies[0].zero_()
    assert torch.equal(copies[1], tensors[1])


def test_what_does_not_fit_has_a_chunk_of_its_own() -> None:
    pages, large = HugePages(), torch.ones(CHUNK_BYTES + 1, dtype=torch.uint8)
    small = pages.put(torch.ones(2))
    copy = pages.put(large)
    assert torch.equal(copy, large)
    assert torch.equal(small, torch.ones(2))


def test_a_chunk_is_freed_with_its_last_tensor() -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system has no /proc")
    pages = HugePages()
    first, second = pages.put(torch.ones(2)), pages.put(torch.ones(2))
    middle = first.data_ptr() + CHUNK_BYTES // 2
    del first
    gc.collect()
    assert mapped(middle)
    assert torch.equal(second, torch.ones(2))
    del second
    gc.collect()
    assert not mapped(middle)
    assert torch.equal(pages.put(torch.ones(3)), torch.ones(3))


def test_no_memory_is_told_as_an_allocator_of_tensors_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as an OSError, which no loader takes for that."""
    monkeypatch.setattr(huge_pages, "CHUNK_BYTES", 1 << 60)
    with pytest.raises(MemoryError) as raised:
        HugePages().put(torch.ones(2))
    assert is_out_of_memory(raised.value)
