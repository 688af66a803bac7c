from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

from core.handles import ArrayRef, TensorKey, TensorRef
from core.ipc.shared_array import Arena, ArenaAllocator, carve
from model_executor.worker.stores.tensor_store import MissingValueError, TensorStore

KEY = TensorKey("r1", "image_encode", "latents")
SAMPLER = TensorKey("r1", "denoise", "sampler", 1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(7, 1 << 20)
    yield arena
    arena.close()


def store(arena: Arena, rank: int = 0) -> TensorStore:
    return TensorStore(rank, torch.device("cpu"), arena)


def handle(arena: Arena, nbytes: int) -> ArrayRef:
    return carve(ArenaAllocator(arena).alloc(1 << 16), 0, (nbytes,), "uint8")


def test_put_replaces_and_describes(arena: Arena) -> None:
    tensors = store(arena)
    tensors.put(KEY, torch.zeros(2, 3))
    ref = tensors.put(KEY, torch.ones(4, dtype=torch.bfloat16))
    assert ref == TensorRef(KEY, 0, (4,), "bfloat16", 8)
    assert torch.equal(tensors.get(KEY), torch.ones(4, dtype=torch.bfloat16))
    assert len(tensors) == 1


def test_unknown_key_raises(arena: Arena) -> None:
    with pytest.raises(KeyError, match=r"rank 0 holds no tensor image_encode\.latents version 0 of r1"):
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


def test_versions_and_series_are_kept_apart(arena: Arena) -> None:
    tensors = store(arena)
    later = TensorKey(KEY.request_id, KEY.node, KEY.name, 1)
    tensors.put(KEY, torch.zeros(1))
    tensors.put(later, torch.ones(1))
    ref = tensors.put_series(TensorKey("r1", "denoise", "sampler", 1), (torch.zeros(2), torch.ones(3)))
    assert (ref.shape, ref.dtype, ref.parts) == ((2,), "series", (("float32", (2,), True), ("float32", (3,), True)))
    assert tensors.get(KEY) == 0
    assert tensors.get(later) == 1
    tensors.free(KEY)
    assert tensors.get(later) == 1
    assert [len(tensor) for tensor in tensors.get_series(ref.key)] == [2, 3]
    assert tensors.get_series(TensorKey("r1", "denoise", "sampler")) == ()
    assert len(tensors) == 3
    tensors.free(TensorKey("r1", "", ""))
    assert len(tensors) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_moved_tensor_is_bit_exact(arena: Arena, dtype: torch.dtype) -> None:
    """Any dtype and any shape, special values too: subnormals, the largest, negative zero, infinities."""
    tensor = torch.arange(64).reshape(8, 8).to(dtype)
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        odd = torch.tensor([0.0, -0.0, limits.tiny, limits.tiny / 2, limits.max, -limits.max, float("inf")])
        tensor = torch.cat([torch.randn(57), odd]).to(dtype).reshape(8, 8)
    here, there = store(arena, 0), store(arena, 1)
    ref = here.put(KEY, tensor.T)  # not contiguous
    exported = here.export(replace(ref, handle=handle(arena, tensor.nbytes)))
    moved = there.resolve(exported)
    assert (moved.shape, moved.dtype) == (tensor.T.shape, dtype)
    assert torch.equal(moved.contiguous().view(torch.uint8), tensor.T.contiguous().view(torch.uint8))


def test_a_scalar_moves(arena: Arena) -> None:
    here, there = store(arena, 0), store(arena, 1)
    ref = here.put(KEY, torch.tensor(2.5))
    moved = there.resolve(here.export(replace(ref, handle=handle(arena, 4))))
    assert (moved.shape, moved.item()) == ((), 2.5)


def test_a_series_of_any_tensors_moves(arena: Arena) -> None:
    """As samplers keep them: tensors not set yet, scalars, a generator's state."""
    here, there = store(arena, 0), store(arena, 1)
    noise = torch.Generator().manual_seed(7).get_state()
    state = (torch.empty(0), torch.randn(3, 5).T, torch.tensor(2.5, dtype=torch.bfloat16), noise)
    ref = here.put_series(SAMPLER, state)
    moved = there.resolve_series(here.export(replace(ref, handle=handle(arena, ref.nbytes))))
    assert [(tensor.dtype, tensor.shape) for tensor in moved] == [(tensor.dtype, tensor.shape) for tensor in state]
    assert all(torch.equal(one, other) for one, other in zip(moved, state, strict=True))
    assert torch.equal(torch.Generator().set_state(moved[-1]).get_state(), noise)
    assert there.resolve_series(TensorRef(SAMPLER, 0)) == ()


def test_what_a_series_has_in_host_memory_stays_there(arena: Arena) -> None:
    """A generator's state is of no use elsewhere; the tensors beside it belong on the device that computes."""
    here, there = store(arena, 0), TensorStore(1, torch.device("meta"), arena)
    ref = here.put_series(SAMPLER, (torch.ones(3), torch.arange(7).byte()))
    on_device = (("float32", (3,), False), ref.parts[1])
    exported = here.export(replace(ref, handle=handle(arena, ref.nbytes), parts=on_device))
    assert [tensor.device.type for tensor in there.resolve_series(exported)] == ["meta", "cpu"]


def test_a_gpus_tensor_in_host_memory_stays_there_on_other_ranks(arena: Arena) -> None:
    """Steps read it on the host, such as the lengths of prompts: from the device they would wait for it."""
    here, there = (TensorStore(rank, torch.device("meta"), arena) for rank in range(2))
    ref = here.put(KEY, torch.arange(3))
    exported = here.export(replace(ref, handle=handle(arena, ref.nbytes)))
    assert there.resolve(exported).tolist() == [0, 1, 2]
    there.put_bytes(exported, arena.view(exported.handle))  # type: ignore[arg-type]
    assert there.get(KEY).tolist() == [0, 1, 2]
    assert not here.put(KEY, torch.empty(3, device="meta")).stays_on_host


def test_resolve_takes_local_tensors_from_the_store(arena: Arena) -> None:
    """Also if the reference is of another rank: a batch on several ranks has the same inputs on all of them."""
    tensors = store(arena, 1)
    tensors.put(KEY, torch.ones(2))
    assert torch.equal(tensors.resolve(TensorRef(KEY, 0)), torch.ones(2))
    with pytest.raises(MissingValueError, match="rank 2 holds no tensor"):
        store(arena, 2).resolve(TensorRef(KEY, 0))


def test_resolved_tensor_does_not_change_with_the_arena(arena: Arena) -> None:
    """Its place in shared memory may be overwritten while the tensor is in use."""
    here, there = store(arena, 0), store(arena, 1)
    ref = here.export(replace(here.put(KEY, torch.ones(3)), handle=handle(arena, 12)))
    moved = there.resolve(ref)
    here.put(KEY, torch.zeros(3))
    here.export(ref)
    assert torch.equal(moved, torch.ones(3))


def test_export_needs_a_large_enough_place(arena: Arena) -> None:
    tensors = store(arena)
    ref = tensors.put(KEY, torch.ones(2, 3))
    with pytest.raises(ValueError, match="24 bytes does not fit 23"):
        tensors.export(replace(ref, handle=handle(arena, 23)))
    with pytest.raises(ValueError, match="nowhere to export to"):
        tensors.export(ref)
    with pytest.raises(MissingValueError, match="holds no tensor"):
        tensors.export(TensorRef(SAMPLER, 0, handle=handle(arena, 4)))


def test_what_a_node_keeps_goes_with_it_or_with_the_request(arena: Arena) -> None:
    tensors = store(arena)
    tensors.kept("r1", "denoise")["table"] = torch.ones(2)
    tensors.kept("r1", "controlnet")["embedded"] = None
    tensors.kept("r2", "denoise")["table"] = torch.zeros(2)
    assert torch.equal(tensors.kept("r1", "denoise")["table"], torch.ones(2))
    assert len(tensors) == 3
    tensors.put(KEY, torch.zeros(1))
    tensors.free(KEY)
    assert len(tensors) == 3
    tensors.drop_kept("r1", "denoise")
    tensors.drop_kept("r1", "denoise")  # a step that is tried again drops it again
    assert tensors.kept("r1", "denoise") == {}
    assert len(tensors) == 2
    tensors.free(TensorKey("r1", "", ""))
    assert len(tensors) == 1
    tensors.drop_kept("r2", "denoise")
    assert len(tensors) == 0
