"""A UNet's GPU kernels against PyTorch's layers: interpreted on a CPU; on a GPU compiled, with `TRITON_INTERPRET=0`.
Whole UNets: `models/test_unet_fused.py`.

Tolerances are those of `test_triton_kernels.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.page_scheme import PageDtype, PageLayout
from model_executor.kernels import gpu_operators
from model_executor.kernels.unet_operators import AddedToMap, Fresh, OpenPages, Outside, UnetOperators, channels_first
from model_executor.page_cache.pages import PageEntry, Pages

pytest.importorskip("triton")  # interpreted: see conftest.py

KERNELS = {"find_places", "norm_and_gather", "add_and_norm", "geglu", "group_moments", "normalise_groups", "add_biased"}
KERNELS |= {"cut_twice_as_large", "fill"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    """The device of the tests' tensors."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@pytest.fixture(scope="module")
def operators() -> UnetOperators:
    from model_executor.kernels import unet_kernels

    return UnetOperators(unet_kernels)


def assert_near(actual: Tensor, exact: Tensor, steps: int = 1) -> None:
    """steps: roundings to the dtype."""
    tolerance = steps * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), exact.double(), rtol=tolerance, atol=tolerance)


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """For an H200, without one: the compiler may refuse what the interpreter accepts."""
    program = Path(__file__).with_name("compile_unet_kernels.py")
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program), "90"], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == KERNELS


def norm_of(make: Any, dtype: torch.dtype) -> Any:
    """A norm with weights that are not 1 and 0."""
    for weight in make.parameters():
        nn.init.normal_(weight)
    return make.to(dtype).requires_grad_(False)


# ------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 200), (torch.bfloat16, 48)])
def test_tokens(operators: UnetOperators, dtype: torch.dtype, width: int) -> None:
    """2 * 3 tokens of the picture, of 2 * 2 each, in two images. The last active one is repeated."""
    x, norm = torch.randn(2, 24, width).to(dtype), norm_of(nn.LayerNorm(width), dtype)
    active, pixels = torch.tensor([1, 5, 5]), [2, 3, 8, 9, 16, 17, 22, 23, 16, 17, 22, 23]
    normed, some, some_normed = operators.norm_and_gather(norm, x, active, 2, 3)
    exact = F.layer_norm(x.double(), [width], norm.weight.double(), norm.bias.double(), norm.eps)
    assert_near(normed, exact)
    assert torch.equal(some, x[:, pixels])
    assert_near(some_normed, exact[:, pixels])
    assert operators.places(active, 6).tolist() == [-1, 0, -1, -1, -1, 1]

    hidden, change = x.clone(), torch.randn(2, 24, width).to(dtype)
    normed = operators.add_and_norm_(norm, hidden, change)
    assert_near(hidden, x.double() + change.double())
    assert_near(normed, F.layer_norm(hidden.double(), [width], norm.weight.double(), norm.bias.double(), norm.eps))

    value, gate = x.double().chunk(2, dim=2)
    assert_near(operators.geglu(x), value * F.gelu(gate))


# --------------------------------------------------------------------------------------------------------------- maps


@pytest.mark.parametrize(("dtype", "groups", "size"), [(torch.float32, 3, 10), (torch.bfloat16, 2, 40)])
def test_group_norms_of_a_box_and_its_surroundings(
    operators: UnetOperators, dtype: torch.dtype, groups: int, size: int
) -> None:
    """The moments are those of the box, of something that is added to it, and of the rest of the map, which is known by
    its moments; numbers are far from zero."""
    channels, grid, side = groups * size, (3, 4), 2
    x, norm = (torch.randn(2, 6, 8, channels) + 20).to(dtype), norm_of(nn.GroupNorm(groups, channels), dtype)
    bias, time = torch.randn(channels).to(dtype), torch.randn(2, channels + 5).to(dtype)[:, 5:]
    whole = x.double() + bias.double() + time.double()[:, None, None]
    whole[1] = torch.where(torch.arange(8)[None, :, None] < 4, whole[1], whole[0])  # the rest is the same in both
    layout = PageLayout(num_blocks=2, num_heads=2, head_dim=8, dtype="float32", num_moments=2 * groups)
    near, far = (torch.randn(layout.entry_bytes(12) // 4).view(torch.uint8) for _ in range(2))
    cells = whole[0].unflatten(1, (4, 2)).unflatten(0, (3, 2)).unflatten(-1, (groups, size)).permute(4, 0, 2, 1, 3, 5)
    deviation, mean = torch.std_mean(cells.flatten(3), dim=3, correction=0)
    moments = torch.cat([mean, deviation]).flatten(1).float()
    for entry, factor in ((near, 0.5), (far, 1.5)):  # halfway between them lie the right ones
        PageEntry(entry, layout, 12).write(1, torch.zeros(2, 2, 12, 8), moments * factor)
    pages = OpenPages(Pages(layout, 12, near, far, 0.5))
    box = (0, 0, 2, 3)  # in tokens: the left half

    found = operators.moments(
        x, groups, (0, 0, 2 * side, 3 * side), AddedToMap(bias, time), Outside(pages, 1, box, grid), share=0.5
    )
    ours = operators.normalised(norm, x, found, AddedToMap(bias, time), silu=True, valid=(1, 1, 99, 99))
    exact = F.group_norm(channels_first(whole), groups, norm.weight.double(), norm.bias.double(), norm.eps)
    exact = F.silu(exact).permute(0, 2, 3, 1)
    exact[:, 0] = exact[:, :, 0] = 0
    assert_near(ours[..., :4, :], exact[..., :4, :], steps=8)


def test_a_box_beyond_the_map_and_larger_maps(operators: UnetOperators) -> None:
    x, norm = torch.randn(2, 5, 3, 20), norm_of(nn.GroupNorm(4, 20), torch.float32)
    exact = F.silu(F.group_norm(channels_first(x), 4, norm.weight, norm.bias, norm.eps)).permute(0, 2, 3, 1)
    ours, raw = operators.normalised_and_cut(norm, x, operators.moments(x, 4), (1, 0, 3, 4), 2)
    assert_near(ours, F.pad(exact, (0, 0, 2, 2, 2, 2))[:, 0:8, 1:7])
    assert torch.equal(raw, x[:, 0:4, 1:3])
    large = F.interpolate(channels_first(x), size=(9, 6)).permute(0, 2, 3, 1)  # the larger map may have odd sides
    ours = operators.twice_as_large(x, (9, 6), (3, 5, 7, 10))
    assert torch.equal(ours, F.pad(large, (0, 0, 1, 1, 1, 1))[:, 6:11, 4:8])
    assert_near(operators.add(x, 2 * x, norm.bias, 0.5), 0.5 * (3 * x + norm.bias))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
@pytest.mark.parametrize("is_box", [False, True])
def test_pages_with_what_was_computed_on_top(operators: UnetOperators, dtype: PageDtype, is_box: bool) -> None:
    """Two pages of one output, of 2 * 3 tokens of 2 * 2 pixels, for two images."""
    layout = PageLayout(num_blocks=3, num_heads=4, head_dim=10, dtype=dtype, num_moments=2)
    entries = [torch.zeros(layout.entry_bytes(6), dtype=torch.uint8) for _ in range(2)]
    for entry in entries:
        for page in range(3):
            PageEntry(entry, layout, 6).write(page, torch.randn(2, 4, 6, 10))
    pages = Pages(layout, 6, entries[0], entries[1], 0.3)
    expected = torch.empty(24, 40)
    for page, part in zip((1, 2), expected.view(2, 2, 4, 6, 10), strict=True):
        pages.open().read(page, part)
    expected = expected.expand(2, 24, 40).clone()
    change, own, bias = torch.randn(2, 4, 40), torch.randn(2, 24, 40), torch.randn(40)
    pixels = [14, 15, 20, 21]  # of token 4
    fresh = Fresh(change, own, is_own_whole=True, bias=bias, scale=0.5)
    if not is_box:
        fresh = Fresh(change, own[:, pixels])
    expected[:, pixels] = 0.5 * (own[:, pixels] + change + bias) if is_box else own[:, pixels] + change
    where = (2, 2, 4, 4) if is_box else operators.places(torch.tensor([4, 4]), 6)
    assert_near(operators.fill(OpenPages(pages), 1, (2, 24, 40), fresh, 2, 3, where), expected)


# ------------------------------------------------------------------------------------------------------------- choice


class SignallingMemory(TorchDispatchMode):
    """Fills new float32 tensors without content with signalling NaN: the worst that may lie in that memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if "empty" in func.name() and output.dtype == torch.float32:
            output.view(torch.int32).fill_(0x7F800001)
        return output


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_each_kernel_is_tried(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str) -> None:
    from model_executor.kernels import unet_kernels

    class Launcher:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **constants: None

    monkeypatch.setattr(unet_kernels, name, Launcher())
    memory: Any = SignallingMemory()  # type: ignore[no-untyped-call]
    with memory, np.errstate(invalid="ignore"):  # a GPU computes with NaN in silence
        assert gpu_operators._unet_operators.__wrapped__(torch.get_default_device()) is None
    assert "compute wrongly" in caplog.text


def test_kernels_that_work_are_used_unless_layers_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from model_executor.kernels import triton_kernels

    operators, device = gpu_operators.TritonOperators(triton_kernels), torch.get_default_device()
    assert isinstance(operators.of_unets(device), UnetOperators)
    assert operators.compiling().of_unets(device) is None
