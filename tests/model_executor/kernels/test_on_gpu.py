"""Tests that need a GPU: `TRITON_INTERPRET=0 python -m pytest -m gpu`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from queue import Queue

import numpy as np
import pytest
import torch

from core.handles import EntryRef
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages.worker import PageCopied, PageCopy
from model_executor.kernels.gpu_attention import Attend, attend_alike, attend_each, has_flash, varlen_attend
from model_executor.kernels.gpu_operators import TritonOperators, gpu_operators
from model_executor.kernels.linear import gpu_linear, plain_linear
from model_executor.kernels.ragged import spans
from model_executor.page_cache.page_store import PageStore

pytestmark = pytest.mark.gpu

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.cuda.set_device(0)


def device() -> torch.device:
    return torch.device("cuda", 0)


def test_triton_works_here() -> None:
    assert os.environ["TRITON_INTERPRET"] == "0", "its kernels are not compiled otherwise"
    assert isinstance(gpu_operators(device()), TritonOperators)


@pytest.mark.parametrize("attend", [varlen_attend, attend_alike])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([1], [70]),
        ([33, 5, 500], [1000, 64, 777]),
        ([300, 20], [300, 20]),
        ([130, 200], [640, 640]),
        ([256] * 2, [512] * 2),
    ],
)
def test_attention_of_a_batch(
    attend: Attend, dtype: torch.dtype, head_dim: int, queries: Sequence[int], keys: Sequence[int]
) -> None:
    """Against each request alone, in float32; keys and values are interleaved, as in a pass."""
    query = torch.randn(sum(queries), 3, 4, head_dim, dtype=dtype, device=device())[:, 0]
    joint = torch.randn(sum(keys), 2, 4, head_dim, dtype=dtype, device=device())
    assert has_flash(query, head_dim)
    where = spans(queries), spans(keys)
    out = attend(query, joint[:, 0], joint[:, 1], *where)
    exact = attend_each(query.float(), joint[:, 0].float(), joint[:, 1].float(), *where)
    torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 77, 1331])
def test_activation_within_a_product(dtype: torch.dtype, rows: int) -> None:
    layer = torch.nn.Linear(256, 1024, dtype=dtype, device=device())
    x = torch.randn(rows, 256, dtype=dtype, device=device())
    exact = plain_linear(layer.float(), x.float(), gelu=True)
    out = gpu_linear(layer.to(dtype), x, gelu=True)
    torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=1e-2)


def test_pages_load_during_a_computation_and_are_read_after_their_events() -> None:
    """And are copied down again after the computation that writes them."""
    block, num_blocks = 1 << 22, 8
    nbytes = block * num_blocks
    arena, done = Arena.create(7, 4 * nbytes), Queue[PageCopied]()
    store = PageStore(device(), arena, None, done.put)
    host = ArenaAllocator(arena).alloc(nbytes)
    content = torch.randint(0, 256, [nbytes], dtype=torch.uint8)
    torch.from_numpy(arena.view(host)).copy_(content)
    busy = torch.randn(8192, 8192, device=device())
    store.start(PageCopy("a", nbytes, block, "host", "device", host))
    read = []
    for number in range(num_blocks):
        busy = busy @ busy
        store.wait_block("a", number)
        read.append(store.entry(EntryRef("a", nbytes, None))[number * block : (number + 1) * block].clone())
    assert done.get(timeout=PATIENCE).ok
    assert torch.equal(torch.cat(read).cpu(), content)
    for _ in range(20):
        busy = busy @ busy
    store.entry(EntryRef("a", nbytes, None)).bitwise_not_()  # behind all that
    store.start(PageCopy("a", nbytes, block, "device", "host", host))
    assert done.get(timeout=PATIENCE).ok
    assert np.array_equal(arena.view(host), ~content.numpy())
    store.close()
    arena.close()


def test_a_load_into_memory_that_was_just_freed_waits_for_those_who_still_read_it() -> None:
    nbytes = 1 << 26
    arena, done = Arena.create(7, 4 * nbytes), Queue[PageCopied]()
    store, space = PageStore(device(), arena, None, done.put), ArenaAllocator(arena)
    hosts = {key: space.alloc(nbytes) for key in "ab"}
    for number, host in enumerate(hosts.values()):
        torch.from_numpy(arena.view(host)).fill_(number)
    store.start(PageCopy("a", nbytes, nbytes, "host", "device", hosts["a"]))
    assert done.get(timeout=PATIENCE).ok
    busy, entry = torch.randn(8192, 8192, device=device()), EntryRef("a", nbytes, None)
    address = store.entry(entry).data_ptr()
    for _ in range(20):
        busy = busy @ busy
    read = store.entry(entry).float()  # behind all that; of another size
    store.forget(["a"])
    store.start(PageCopy("b", nbytes, nbytes, "host", "device", hosts["b"]))
    assert store.entry(EntryRef("b", nbytes, None)).data_ptr() == address, "nothing was put to the test"
    assert done.get(timeout=PATIENCE).ok
    assert not read.any()
    assert store.entry(EntryRef("b", nbytes, None)).eq(1).all()
    store.close()
    arena.close()


def test_two_entries_of_a_step_arrive_in_turns_ahead_of_the_kernels_that_read_them() -> None:
    """The host queues all kernels while copies are under way, and does not wait for one."""
    block, num_blocks = 1 << 24, 12
    nbytes = block * num_blocks
    arena, done = Arena.create(7, 4 * nbytes), Queue[PageCopied]()
    store, space = PageStore(device(), arena, None, done.put), ArenaAllocator(arena)
    contents = {key: torch.randint(0, 256, [nbytes], dtype=torch.uint8) for key in ("other", "near", "far")}
    hosts = {key: space.alloc(nbytes) for key in contents}
    for key, content in contents.items():
        torch.from_numpy(arena.view(hosts[key])).copy_(content)
    loads = {}
    for key, host in hosts.items():
        store.start(PageCopy(key, nbytes, block, "host", "device", host))
        loads[key] = store._loads[key][0]
    store.put_last("near", {0})
    store.put_last("far", {0})
    read: dict[str, list[torch.Tensor]] = {"near": [], "far": []}
    for number in [*range(1, num_blocks), 0]:
        for key, blocks in read.items():
            store.wait_block(key, number)
            blocks.append(store.entry(EntryRef(key, nbytes, None))[number * block : (number + 1) * block].clone())
    assert all(done.get(timeout=PATIENCE).ok for _ in contents)
    for key, blocks in read.items():
        assert torch.equal(torch.cat([blocks[-1], *blocks[:-1]]).cpu(), contents[key])
    assert torch.equal(store.entry(EntryRef("other", nbytes, None)).cpu(), contents["other"])
    assert list(loads["near"].events) == list(loads["far"].events) == [*range(1, num_blocks), 0]
    store.close()
    arena.close()
