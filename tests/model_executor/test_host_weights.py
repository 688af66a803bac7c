"""Weights in host memory: a module computes as before, on a copy that is there only while it is used."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from offloading import Copies
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from core.errors import ConfigError
from model_executor import host_weights
from model_executor.host_weights import ALIGNMENT, ON_DEVICE, HostWeights, JointWeights
from model_executor.mapping import map_own

CPU = torch.device("cpu")


class Module(nn.Module):
    """Tensors of all kinds: tied, the same memory twice, in another order, expanded, empty, of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.tied = nn.Linear(6, 5)
        self.tied.weight = self.first.weight
        self.same = nn.Parameter(self.first.bias.data)
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.short = nn.Parameter(torch.randn(7).bfloat16())
        self.register_buffer("places", torch.arange(6).expand(1, -1))
        self.register_buffer("wide", torch.full((1,), 2.0).expand(5))
        self.register_buffer("empty", torch.empty(0))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [1, 3, height, 6]."""
        y = self.conv(x).sum((0, 2, 3)) + self.first(x[0, 0] + self.places).sum(0) + self.tied(x[0, 1]).sum(0)
        return y * self.wide + self.same


def tensors(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return dict(named)


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors(module).items() if tensor.numel()}


@pytest.mark.parametrize("in_inference", [False, True])
def test_a_module_is_the_same_wherever_its_weights_are(in_inference: bool) -> None:
    module, x = Module(), torch.randn(1, 3, 2, 6)
    before = {name: (id(each), each.clone(), each.stride()) for name, each in tensors(module).items()}
    expected = module(x)
    weights = HostWeights([module], CPU)
    host = addresses(module)
    for _ in range(2):
        with torch.inference_mode(in_inference), weights.on_device():
            there = addresses(module)
            assert not set(there.values()) & set(host.values())
            assert torch.equal(module(x), expected)
            for name, (number, value, stride) in before.items():
                tensor = tensors(module)[name]
                assert (id(tensor), tensor.stride(), tensor.dtype) == (number, stride, value.dtype)
                assert torch.equal(tensor, value)
            assert there["first.weight"] == there["tied.weight"]
            assert there["first.bias"] == there["same"], "the same memory is copied once"
            assert not any((address - min(there.values())) % ALIGNMENT for address in there.values())
        assert addresses(module) == host
    assert torch.equal(module(x), expected)
    assert weights.nbytes >= sum({each.data_ptr(): each.nbytes for each in module.parameters()}.values())


def test_the_copy_is_freed_after_use() -> None:
    module = Module()
    weights = HostWeights([module], CPU)
    with weights.on_device():
        copy = StorageWeakRef(module.first.weight.untyped_storage())
        assert not copy.expired()
    assert copy.expired()


def test_the_memory_before_is_freed() -> None:
    module = Module()
    before = StorageWeakRef(module.first.weight.untyped_storage())
    HostWeights([module], CPU)
    gc.collect()
    assert before.expired()


@pytest.mark.parametrize("is_held", [False, True])
def test_an_exception_leaves_the_weights_on_the_host(is_held: bool) -> None:
    module = Module()
    weights = HostWeights([module], CPU)
    host = addresses(module)

    def fail() -> None:
        with weights.held() if is_held else ON_DEVICE.held(), weights.on_device():
            assert addresses(module) != host
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert addresses(module) == host
    with weights.on_device():
        assert addresses(module) != host


def test_a_device_without_room_leaves_the_weights_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    weights = HostWeights([module], CPU)
    host = addresses(module)

    def refuse(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            weights.on_device().__enter__()
    assert addresses(module) == host
    with weights.on_device():
        assert addresses(module) != host


def test_uses_within_one_another_share_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, module = Copies(monkeypatch), Module()
    weights = HostWeights([module], CPU)
    host = addresses(module)
    with weights.on_device():
        there = addresses(module)
        with weights.on_device():
            assert addresses(module) == there
        assert addresses(module) == there, "it is still used"
    assert addresses(module) == host
    assert copies.take() == 1


def test_weights_that_are_held_come_once_and_only_if_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, module = Copies(monkeypatch), Module()
    weights = HostWeights([module], CPU)
    host = addresses(module)
    with weights.held():
        assert addresses(module) == host
    assert copies.take() == 0
    with weights.held():
        for _ in range(3):
            with weights.on_device():
                there = addresses(module)
            assert addresses(module) == there
    assert addresses(module) == host
    assert copies.take() == 1


def test_weights_of_several_modules_come_and_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, modules = Copies(monkeypatch), [Module(), Module()]
    members = [HostWeights([module], CPU) for module in modules]
    joint, host = JointWeights([*members, ON_DEVICE]), [addresses(module) for module in modules]
    assert joint.nbytes == sum(member.nbytes for member in members)
    with joint.held():
        for _ in range(2):
            with joint.on_device():
                assert all(addresses(module) != its for module, its in zip(modules, host, strict=True))
    assert [addresses(module) for module in modules] == host
    assert copies.take() == 2


# ------------------------------------------------------------------------------------------------------ on a GPU


class Runtime:
    """CUDA's functions that pin memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.pinned: dict[int, int] = {}  # address -> bytes
        self._error = error
        self.events: list[str] = []
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(host_weights, "map_own", self._map)

    def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:
        self.pinned[address] = nbytes
        return self._error

    def cudaHostUnregister(self, address: int) -> int:
        self.events.append("unpinned")
        del self.pinned[address]
        return 0

    def _map(self, nbytes: int) -> Any:
        memory = map_own(nbytes)
        weakref.finalize(memory, self.events.append, "unmapped")
        return memory


def test_memory_is_pinned_once_and_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, module = Runtime(monkeypatch), Module()
    weights = HostWeights([module], torch.device("cuda"))
    assert runtime.pinned == {min(addresses(module).values()): weights.nbytes}
    del weights, module
    gc.collect()
    assert runtime.events == ["unpinned", "unmapped"]
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Runtime(monkeypatch, error=2)
    with pytest.raises(ConfigError, match=r"^--offload host: CUDA cannot pin 0\.0 GiB of host memory \(cudaError 2\)$"):
        HostWeights([Module()], torch.device("cuda"))


@pytest.mark.gpu
def test_weights_come_to_a_gpu_and_leave_it() -> None:
    device = torch.device("cuda")
    module, x = Module().to(device), torch.randn(1, 3, 2, 6, device=device)
    with torch.inference_mode():
        expected = module(x)
        weights = HostWeights([module], device)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        for _ in range(2):
            with weights.on_device():
                assert module.first.weight.device.type == "cuda"
                result = module(x)
            assert torch.equal(result, expected)
            del result
            assert module.first.weight.device.type == "cpu"
            assert module.first.weight.is_pinned()
            assert torch.cuda.memory_allocated(device) == before
