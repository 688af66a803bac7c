"""A module made from an image is the module that was written: same bits, same sharing, same results."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from core.config import ModelConfig
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.kernels import huge_pages
from model_executor.kernels.cpu_kernels import best_kernels
from model_executor.kernels.linear import fused_linear
from model_executor.kernels.linear_groups import group_layers
from model_executor.models.registry import make_family
from model_executor.weights import image as image_file
from model_executor.weights.image import read_image, write_image
from model_executor.worker.loading.resident import edit_once
from tools.random_checkpoints import make_flux, make_klein, make_qwen_edit, make_sd3
from tools.random_unet_checkpoints import make_sdxl

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "flux": make_flux,
    "flux2-klein": make_klein,
    "sd3": make_sd3,
    "qwen-image-edit": make_qwen_edit,
    "sdxl": make_sdxl,
}


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """What transformers knows of its classes is the same after a test as before."""
    before = dict(_CAN_RECORD_REGISTRY)
    yield
    _CAN_RECORD_REGISTRY.clear()
    dict.update(_CAN_RECORD_REGISTRY, before)


def through_images(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules as another process reads them, which has not constructed any."""
    images = {name: write_image(module) for name, module in modules.items()}
    _CAN_RECORD_REGISTRY.clear()
    read = {name: read_image(fd, image)[0] for name, (fd, image) in images.items()}
    for fd, _ in images.values():
        os.close(fd)
    return read


def through_an_image(module: nn.Module) -> nn.Module:
    return through_images({"only": module})["only"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_paints_the_same_from_images(tmp_path: Path, name: str, dtype: str) -> None:
    path = FAMILIES[name](tmp_path / name)
    checkpoint = ModelCheckpoint.open(ModelConfig(model=str(path), dtype=dtype, device="cpu"))

    def plain(parts: Iterable[str]) -> dict[str, nn.Module]:
        return {part: checkpoint.load(part) for part in parts}

    def packed(parts: Iterable[str]) -> dict[str, nn.Module]:
        modules = plain(parts)
        for part, module in modules.items():
            make_family(checkpoint).prepare(part, module)
        return through_images(modules)

    pictures = []
    for load in (plain, lambda parts: through_images(plain(parts)), packed):
        family = make_family(checkpoint)
        for part, module in load([part for group in family.components.values() for part in group]).items():
            family.put(part, family.prepare(part, module))
        torch.manual_seed(0)
        pictures.append(edit_once(family, 64, 12))
    for picture in pictures[1:]:
        assert torch.equal(picture, pictures[0])


def test_quantised_layers_travel(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    path = make_flux(tmp_path / "flux")
    config = ModelConfig(model=str(path), dtype="float32", device="cpu", quantization="torchao-int8")
    checkpoint = ModelCheckpoint.open(config)
    whole, again = checkpoint.load("transformer"), through_an_image(checkpoint.load("transformer"))
    layers, copies = (dict(module.named_modules()) for module in (whole, again))
    assert [type(layer) for layer in copies.values()] == [type(layer) for layer in layers.values()]
    for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        other = getattr(copies[owner], leaf)
        assert type(other) is type(tensor)
        plain = [each.dequantize() if hasattr(each, "dequantize") else each for each in (tensor, other)]
        assert torch.equal(*plain), name


class Odd(nn.Module):
    """Tied weights, a view, tensors that no file contains, an empty one, one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.arange(5), persistent=False)
        self.table = torch.randn(2, 3, dtype=torch.complex64)
        self.nothing = torch.empty(0, 4)
        self.last = torch.randn(2, 4, 5, 6).to(memory_format=torch.channels_last)
        self.number = torch.tensor(2.5, dtype=torch.bfloat16)
        self.same = self.table.view(2, 3)


def test_all_that_a_module_holds_is_there_again() -> None:
    odd = Odd()
    kept = {name: getattr(odd, name).clone() for name in ("steps", "table", "nothing", "last", "number")}
    weight = odd.first.weight.detach().clone()
    again = through_an_image(odd)
    assert isinstance(again, Odd)
    assert again.first.weight is again.second.weight
    assert isinstance(again.first.weight, nn.Parameter)
    assert not again.first.weight.requires_grad
    assert torch.equal(again.first.weight, weight)
    for name, tensor in kept.items():
        other = getattr(again, name)
        assert (other.dtype, other.shape, other.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert torch.equal(other, tensor), name
    assert again.same.data_ptr() == again.table.data_ptr()


def test_the_written_module_is_freed() -> None:
    module = nn.Linear(100, 100)
    fd, _ = write_image(module)
    os.close(fd)
    assert module.weight.numel() == module.bias.numel() == 0


def test_memory_is_taken_as_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for one packed denoiser, not for two."""
    kernels = best_kernels()
    if kernels is None:
        pytest.skip("no compiled kernels on this machine")
    monkeypatch.setattr(huge_pages, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "_huge_pages", pages := huge_pages.HugePages())
    allocate, write, chunks = os.posix_fallocate, image_file._write, list[Any]()
    module, sizes, held = nn.ModuleList(nn.Linear(512, 512) for _ in range(3)), list[int](), list[int]()
    for layer in module:  # the weights of each fill a chunk of memory
        group_layers([layer], fused_linear, True, kernels, owns_layers=True)
        chunks.append(pages._chunk)

    def counted(*args: Any) -> None:
        held.append(sum(chunk() is not None for chunk in chunks))
        write(*args)

    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, size: (sizes.append(size), allocate(fd, at, size)))
    monkeypatch.setattr(image_file, "_write", counted)
    fd, _ = write_image(module)
    os.close(fd)
    assert held == [3, 2, 2, 1, 1, 0], "weight and bias of each layer"
    assert max(sizes) == 1 << 20


def test_readers_share_memory_but_not_what_they_write() -> None:
    fd, image = write_image(nn.Linear(8, 8))
    (mine, _), (yours, _) = read_image(fd, image), read_image(fd, image)
    os.close(fd)
    before = yours.weight.clone()  # type: ignore[operator]
    mine.weight.zero_()  # type: ignore[operator]
    assert torch.equal(yours.weight, before)  # type: ignore[arg-type]


def test_a_mapping_ends_with_the_last_tensor() -> None:
    fd, image = write_image(nn.Linear(8, 8))
    module, memory = read_image(fd, image)
    os.close(fd)
    mapping = weakref.ref(memory)
    bias = module.bias
    del module, memory
    gc.collect()
    assert mapping() is not None
    del bias
    gc.collect()
    assert mapping() is None


def test_without_memory_writing_fails_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Cannot allocate memory"):
        write_image(nn.Linear(8, 8))
    assert len(os.listdir("/proc/self/fd")) == before
