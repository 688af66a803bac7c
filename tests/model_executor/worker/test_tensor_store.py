from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from core.handles import ArrayRef, TensorKey, TensorRef
from core.ipc.shared_array import Arena, ArenaAllocator, carve
from model_executor.worker.tensor_store import TensorStore

KEY = TensorKey("r1", "image_encode", "latents")


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(7, 1 << 20)
    yield arena
    arena.close()


def store(arena: Arena, rank: int = 0) -> TensorStore:
    return TensorStore(rank, torch.device("cpu"), arena)


def handle(arena: Arena, *shape: int) -> ArrayRef:
    return carve(ArenaAllocator(arena).alloc(1 << 16), 0, shape, "float32")


def test_put_replaces_and_describes(arena: Arena) -> None:
    tensors = store(arena)
    tensors.put(KEY, torch.zeros(2, 3))
    ref = tensors.put(KEY, torch.ones(4, dtype=torch.bfloat16))
    assert ref == TensorRef(KEY, 0, (4,), "bfloat16")
    assert torch.equal(tensors.get(KEY), torch.ones(4, dtype=torch.bfloat16))
    assert len(tensors) == 1


def test_unknown_key_raises(arena: Arena) -> None:
    with pytest.raises(KeyError, match=r"rank 0 holds no tensor image_encode\.latents of r1"):
        store(arena).get(KEY)


def test_free_of_one_tensor_and_of_a_request(arena: Arena) -> None:
    tensors = store(arena)
    keys = [KEY, TensorKey("r1", "text_encode", "prompt_embeds"), TensorKey("r2", "image_encode", "latents")]
    for key in keys:
        tensors.put(key, torch.zeros(1))
    tensors.free(keys[0])
    assert len(tensors) == 2
    tensors.free(TensorKey("r1", "", ""))
    assert len(tensors) == 1
    assert tensors.get(keys[2]).shape == (1,)
    tensors.free(TensorKey("never seen", "", ""))  # all ranks get the message, also those without the tensor
    tensors.free(keys[0])
    tensors.free(keys[2])
    assert len(tensors) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moved_tensor_is_bit_exact(arena: Arena, dtype: torch.dtype) -> None:
    """Including special values: subnormals, the largest, negative zero, infinities."""
    limits = torch.finfo(dtype)
    odd = torch.tensor([0.0, -0.0, limits.tiny, limits.tiny / 2, limits.max, -limits.max, float("inf")])
    tensor = torch.cat([torch.randn(57), odd]).to(dtype).reshape(8, 8)
    here, there = store(arena, 0), store(arena, 1)
    here.put(KEY, tensor)
    exported = here.export(TensorRef(KEY, 0, handle=handle(arena, 8, 8)))
    assert (exported.shape, exported.dtype) == ((8, 8), str(dtype).removeprefix("torch."))
    moved = there.resolve(exported).to(dtype)
    assert torch.equal(moved.view(torch.uint8), tensor.view(torch.uint8))


def test_resolve_takes_local_tensors_from_the_store(arena: Arena) -> None:
    tensors = store(arena, 1)
    tensors.put(KEY, torch.ones(2))
    assert torch.equal(tensors.resolve(TensorRef(KEY, 1)), torch.ones(2))
    with pytest.raises(KeyError, match="lies on rank 0, not exported"):
        tensors.resolve(TensorRef(KEY, 0))


def test_resolved_tensor_does_not_change_with_the_arena(arena: Arena) -> None:
    """Its region in shared memory may be overwritten while the tensor is in use."""
    here, there = store(arena, 0), store(arena, 1)
    here.put(KEY, torch.ones(3))
    ref = here.export(TensorRef(KEY, 0, handle=handle(arena, 3)))
    moved = there.resolve(ref)
    here.put(KEY, torch.zeros(3))
    here.export(ref)
    assert torch.equal(moved, torch.ones(3))


def test_export_needs_a_place_of_the_right_shape(arena: Arena) -> None:
    tensors = store(arena)
    tensors.put(KEY, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\(2, 3\) does not fit a handle \(6,\)"):
        tensors.export(TensorRef(KEY, 0, handle=handle(arena, 6)))
    with pytest.raises(ValueError, match="nowhere to export to"):
        tensors.export(TensorRef(KEY, 0))
