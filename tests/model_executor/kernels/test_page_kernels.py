"""Reading pages with compiled kernels, with AVX2 or AVX-512. Skipped if they cannot be compiled."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.page_scheme import PageLayout
from model_executor.cpu import cpu_features
from model_executor.kernels import cpu_kernels as module
from model_executor.kernels.compiled_library import compiled_library
from model_executor.kernels.cpu_kernels import Kernels, PageKernels, best_kernels, best_page_kernels
from model_executor.kernels.linear import plain_linear
from model_executor.kernels.operators import Operators
from model_executor.page_cache.pages import PageEntry, Pages

HEADS = 3


@pytest.fixture
def kernels() -> PageKernels:
    found = best_page_kernels()
    if found is None:
        pytest.skip("no compiled kernels on this machine")
    return found


def test_the_kernels_are_those_of_the_instruction_set(kernels: PageKernels) -> None:
    has_all = torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert isinstance(kernels, Kernels) == has_all
    assert best_kernels() is (kernels if has_all else None)
    assert Operators(plain_linear, None, kernels).digest == f"plain {kernels.digest}"


def test_machines_without_either_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert module._compiled.__wrapped__() is None


@pytest.mark.parametrize("width", [1, 7, 8, 16, 24, 64, 67, 128])
@pytest.mark.parametrize("tokens", [1, 2, 13, 64])
def test_interpolation_rounds_once_less(kernels: PageKernels, tokens: int, width: int) -> None:
    assert_interpolates(kernels, tokens, width)


def test_a_cpu_with_a_part_of_avx512_has_the_kernels_of_avx2(kernels: PageKernels, tmp_path: Path) -> None:
    """As PyTorch, which calls it AVX2."""
    source, compiler = Path(module.__file__).with_suffix(".c"), shutil.which("cc") or ""
    flags = (*module._FLAGS, "-mno-avx512bw")
    with compiled_library(source, compiler, flags, cpu_features(), tmp_path / "kernels") as library:
        assert_interpolates(PageKernels(ctypes.CDLL(str(library.path)), library.digest), 13, 67)


def assert_interpolates(kernels: PageKernels, tokens: int, width: int) -> None:
    """One of the products is added without being rounded first: with AVX2 the far one, as PyTorch does. Written to a
    part of a larger buffer, of which nothing else changes."""
    torch.manual_seed(tokens * width)
    near, far = (torch.randint(-127, 128, (2, HEADS, tokens, width), dtype=torch.int8) for _ in range(2))
    near_scale, far_scale = torch.rand(2, HEADS, tokens, 1), torch.rand(2, HEADS, tokens, 1)
    room = torch.full((2, HEADS, tokens + 4, width), 7.0)
    kernels.interpolate(near, near_scale, far, far_scale, room[:, :, 4:])
    parts = [(near_scale, near), (far_scale, far)]
    (scale, values), rounded = parts if isinstance(kernels, Kernels) else parts[::-1]
    exact = scale.double() * values.double() + (rounded[0] * rounded[1]).double()
    assert torch.equal(room[:, :, 4:], exact.float())
    assert (room[:, :, :4] == 7.0).all()


def entry(layout: PageLayout, tokens: int, seed: int) -> Tensor:
    made = torch.zeros(layout.entry_bytes(tokens), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for block in range(layout.num_blocks):
        shape = (2, layout.num_heads, tokens, layout.head_dim)
        PageEntry(made, layout, tokens).write(block, torch.randn(shape, generator=generator))
    return made


@pytest.mark.parametrize("heads", [None, (1, 3)], ids=["all heads", "some heads"])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 64), (13, 24), (50, 128)])
def test_pages_are_read_as_pytorch_reads_them(
    kernels: PageKernels, tokens: int, head_dim: int, into: torch.dtype, heads: tuple[int, int] | None
) -> None:
    """Also into bfloat16 and for some heads. With AVX-512 but for rounding."""
    layout = PageLayout(num_blocks=2, num_heads=HEADS, head_dim=head_dim, dtype="int8")
    pages = Pages(layout, tokens, entry(layout, tokens, 0), entry(layout, tokens, 1), 0.3, heads=heads)
    number = HEADS if heads is None else heads[1] - heads[0]
    ours, theirs = (torch.full((2, number, tokens + 4, head_dim), 7.0, dtype=into) for _ in range(2))
    pages.open(kernels).read(1, ours[:, :, 4:])
    pages.open().read(1, theirs[:, :, 4:])
    tolerance = 1e-6 if into == torch.float32 else 2**-8
    if not isinstance(kernels, Kernels):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-6)
    assert ours[:, :, 4:].float().std() > 0.5
