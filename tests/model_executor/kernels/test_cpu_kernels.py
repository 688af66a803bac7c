"""Compiled CPU kernels against plain references, and a denoiser on them. Skipped if they cannot be compiled."""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2SwiGLU
from torch import Tensor

from core.page_scheme import PageDtype
from model_executor.kernels import cpu_kernels as module
from model_executor.kernels.attention import normalise_and_rotate_
from model_executor.kernels.cpu_kernels import (
    Kernels,
    best_kernels,
    can_gelu,
    can_quantise,
    can_swiglu,
    pack,
)
from model_executor.kernels.linear import fused_linear, plain_linear
from model_executor.kernels.operators import Operators
from model_executor.models.base import PrimeRow, Row
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.page_cache.pages import Pages, quantise

GRID, TEXT = (6, 8), 8
TOKENS = GRID[0] * GRID[1]
ACTIVE = torch.tensor([3, 4, 5, 11, 12, 13, 30, 47])


@pytest.fixture
def kernels() -> Kernels:
    found = best_kernels()
    if found is None:
        pytest.skip("no compiled kernels on this machine")
    return found


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 8, 64), (5, 64, 128), (50, 300, 192), (27, 1280, 256)])
def test_linear(kernels: Kernels, rows: int, inputs: int, outputs: int, gelu: bool) -> None:
    """Against float64. Selected rows have the same bits as among all rows, and so has a matrix within a wider one."""
    wide = torch.randn(rows, inputs + 3)
    x, weight, bias = wide[:, :inputs], torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
    out = kernels.linear(x, pack(weight), bias, gelu=gelu)
    exact = F.linear(x.double(), weight.double(), bias.double())
    exact = F.gelu(exact, approximate="tanh") if gelu else exact
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    for count in range(1, min(rows, 8)):
        chosen = torch.randperm(rows)[:count]
        assert torch.equal(kernels.linear(x[chosen], pack(weight), bias, gelu=gelu), out[chosen])
    within = torch.full((rows, outputs + 5), 7.0)
    kernels.linear(x, pack(weight), bias, gelu=gelu, out=within[:, 2:-3])
    assert torch.equal(within[:, 2:-3], out)
    assert (within[:, :2] == 7.0).all()
    assert (within[:, -3:] == 7.0).all()


def test_gelu_far_from_zero(kernels: Kernels) -> None:
    x = torch.tensor([[-1e4], [-90.0], [-6.0], [-0.0], [6.0], [90.0], [1e4]])
    out = kernels.linear(x, pack(torch.ones(64, 1)), torch.zeros(64), gelu=True)
    torch.testing.assert_close(out, F.gelu(x, approximate="tanh").expand(-1, 64), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_gelu_in_place(kernels: Kernels, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4000), torch.tensor([-90.0, 90.0, -0.0, 0.0] * 4)]).to(dtype).view(-1, 16)
    assert can_gelu(x)
    exact = F.gelu(x.double(), approximate="tanh")
    assert kernels.gelu_(x) is x
    torch.testing.assert_close(x.double(), exact, rtol=tolerance, atol=1e-6)
    assert not can_gelu(x[:, :8])
    assert not can_gelu(x.half())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_swiglu(kernels: Kernels, dtype: torch.dtype, tolerance: float) -> None:
    """Of columns of a wider matrix, to columns of another. A row has the same bits alone."""
    x, wide = (4 * torch.randn(5, 72)).to(dtype), torch.full((5, 40), 7.0, dtype=dtype)
    x[0, 8:12] = torch.tensor([-300.0, 300.0, -0.0, 90.0])
    operators = Operators(fused_linear, kernels)
    assert can_swiglu(x[:, 8:])
    out = operators.swiglu(x[:, 8:], out=wide[:, 8:])
    torch.testing.assert_close(out.double(), gated(x[:, 8:].double()), rtol=tolerance, atol=1e-6)
    assert torch.equal(wide[:, 8:], out)
    assert (wide[:, :8] == 7.0).all()
    assert torch.equal(operators.swiglu(x[2:3, 8:]), out[2:3])


def test_swiglu_without_a_kernel(kernels: Kernels) -> None:
    """As diffusers computes it, of numbers that the kernel does not support, too."""
    x, out = torch.randn(5, 40), torch.empty(5, 20)
    assert not can_swiglu(x)
    assert not can_swiglu(x.half())
    for operators in (Operators(plain_linear), Operators(fused_linear, kernels)):
        assert torch.equal(operators.swiglu(x), Flux2SwiGLU()(x))
        assert operators.swiglu(x, out=out) is out
        assert torch.equal(out, Flux2SwiGLU()(x))


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate) * up


def attend(kernels: Kernels, query: Tensor, key_value: Tensor) -> Tensor:
    """Written to a part of a wider matrix, of which nothing else changes."""
    wide = torch.full((len(query), query[0].numel() + 8), 7.0)
    kernels.attend(query, key_value, wide[:, 8:])
    assert (wide[:, :8] == 7.0).all()
    return wide[:, 8:]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys"), [(1, 16), (50, 280), (70, 17), (49, 33), (130, 100)])
def test_attend(kernels: Kernels, queries: int, keys: int, head_dim: int) -> None:
    """Against softmax in float64. Selected queries have the same bits as among all."""
    qkv, key_value = torch.randn(queries, 3, 3, head_dim), torch.randn(2, 3, keys, head_dim)
    query = qkv[:, 0] * 3
    weights = query.double().transpose(0, 1) @ key_value[0].double().transpose(1, 2) / head_dim**0.5
    exact = (weights.softmax(-1) @ key_value[1].double()).transpose(0, 1).flatten(1)
    out = attend(kernels, query, key_value)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    for count in (1, 2, 17, 33, 48, 64):
        chosen = torch.randperm(queries)[:count]
        assert torch.equal(attend(kernels, query[chosen], key_value), out[chosen])


def test_attend_survives_large_scores(kernels: Kernels) -> None:
    key_value = torch.ones(2, 1, 20, 64)
    key_value[0, 0, 3] = 100.0
    key_value[1, 0, 3] = 5.0
    out = attend(kernels, torch.full((2, 1, 64), 100.0), key_value)
    torch.testing.assert_close(out, torch.full((2, 64), 5.0))


@pytest.mark.parametrize(("tokens", "kinds", "head_dim"), [(1, 1, 16), (9, 2, 64), (50, 2, 128)])
def test_normalise_and_rotate(kernels: Kernels, tokens: int, kinds: int, head_dim: int) -> None:
    """Against PyTorch; numbers beside queries and keys are unchanged."""
    qkv, weight = torch.randn(tokens, 3, 3, head_dim), torch.randn(kinds, 3, head_dim)
    rotary = torch.polar(torch.ones(tokens, 1, 1, head_dim // 2), torch.randn(tokens, 1, 1, head_dim // 2))
    expected = qkv.clone()
    normalise_and_rotate_(expected[:, :kinds], rotary, 1e-6, [([(0, tokens)], weight)])
    kernels.normalise_and_rotate_(qkv[:, :kinds], rotary, 1e-6, weight)
    torch.testing.assert_close(qkv, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(qkv[:, kinds:], expected[:, kinds:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 48, 64])
def test_quantise(kernels: Kernels, width: int, dtype: torch.dtype) -> None:
    """With PyTorch's bits, from any memory order, into a part of the heads; rows without a scale are zeros."""
    x = (torch.randn(13, 3, 5, width) * 10 ** torch.randint(-3, 4, (13, 3, 5, 1))).permute(1, 2, 0, 3)[1:]
    x[0, 0, 0], x[1, 2, 4] = 0.0, 1e-44
    x[0, 1, 3, 2], x[0, 1, 4, :3] = float("inf"), torch.tensor([0.5, 127.0, 126.5])
    x[1, 1, 5, 0], x[1, 1, 5, 5], x[1, 1, 6] = float("nan"), 3.0, 2e-43
    x = x.to(dtype)
    whole = [torch.full((2, 5, 13, width), 99, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full((2, 5, 13, 1), 9.0) for _ in range(2)]
    for way, values, its in zip((quantise, kernels.quantise), whole, scales, strict=True):
        way(x[:, 1:4], values[:, 1:4], its[:, 1:4])
    assert can_quantise(x)
    assert torch.equal(*whole)
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
    assert scales[0][1, 1, 5].isnan()
    assert (whole[1][:, 4] == 99).all()


@pytest.mark.parametrize(
    ("channels", "size", "tile"), [(16, (12, 20), (12, 20)), (48, (16, 8), (4, 4)), (64, (1, 3), (1, 1))]
)
def test_tile_sums(kernels: Kernels, channels: int, size: tuple[int, int], tile: tuple[int, int]) -> None:
    x = make_map(channels, size)
    values = torch.stack([x[0].double(), x[0].double().square()])
    expected = F.avg_pool2d(values, tile, divisor_override=1)
    torch.testing.assert_close(kernels.tile_sums(x, tile).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "groups", "size", "tiles"),
    [(16, 4, (12, 21), (1, 1)), (48, 48, (16, 8), (4, 2)), (64, 1, (3, 9), (1, 3)), (16, 2, (1, 1), (1, 1))],
)
def test_moments(kernels: Kernels, channels: int, groups: int, size: tuple[int, int], tiles: tuple[int, int]) -> None:
    """Of tiles of which one weighs nothing, whatever its values."""
    x, weights = make_map(channels, size), torch.rand(tiles)
    values = torch.stack([x[0].double(), x[0].double().square()])
    each = F.avg_pool2d(values, (size[0] // tiles[0], size[1] // tiles[1])).reshape(2, groups, -1, *tiles).mean(2)
    if weights.numel() > 1:
        weights[0, 0] = 0.0
        x[:, :, 0, 0] = float("nan")
    expected = (each * weights).sum((2, 3))
    torch.testing.assert_close(kernels.moments(x, groups, weights).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("channels", "groups", "size"), [(16, 4, (7, 5)), (48, 48, (1, 1)), (48, 3, (2, 2)), (64, 1, (9, 2))]
)
def test_norm_silu(kernels: Kernels, channels: int, groups: int, size: tuple[int, int]) -> None:
    """Nearly as close to float64 as bfloat16 can be, also far from zero; a variance that rounds to less than 0 is 0."""
    x, weight, bias = make_map(channels, size), torch.randn(channels), torch.randn(channels)
    x[:, :, 0, 0] = torch.linspace(-300, 300, channels)
    mean = torch.randn(groups)
    moments = torch.stack([mean, mean.square() + torch.rand(groups)])
    moments[1, 0] = mean[0] ** 2 - 1e-3
    variance = (moments[1] - mean.square()).clamp_min(0.0)
    statistics = (each.repeat_interleave(channels // groups).double() for each in (mean, variance))
    expected = F.silu(F.batch_norm(x.double(), *statistics, weight.double(), bias.double(), eps=1e-2))
    out = kernels.norm_silu(x, moments, weight, bias, 1e-2)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=2e-5)


def make_map(channels: int, size: tuple[int, int]) -> Tensor:
    return torch.randn(1, channels, *size).to(torch.bfloat16, memory_format=torch.channels_last)


def test_the_choice_of_the_attention_kernel_does_not_depend_on_the_number_of_queries(kernels: Kernels) -> None:
    assert all(kernels.can_attend(torch.empty(n, 2, 64), 16) for n in (1, 500))
    assert not kernels.can_attend(torch.empty(1, 2, 32), 16)
    assert not kernels.can_attend(torch.empty(1, 2, 64, dtype=torch.float16), 16)
    assert not kernels.can_attend(torch.empty(1, 2, 64), 15)


def test_kernels_are_used_on_one_thread_only() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert best_kernels() is None
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("compiler", [None, "false", "/nonexistent/cc"])
def test_without_a_working_compiler_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str | None
) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: compiler)
    with caplog.at_level(logging.INFO, "stencil.worker"):
        assert module._compiled.__wrapped__() is None
    assert "no compiled kernels" in caplog.text


def test_compiling_again_gives_the_same_library(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that what was cached under its digest is found again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    again = module._compiled.__wrapped__()
    assert again is not None
    assert again.digest == kernels.digest


# --------------------------------------------------------------------------------------------------------- denoiser


@pytest.fixture(scope="module")
def flux() -> Any:
    """A denoiser with head dim 64, which the kernels support."""
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=32,
        out_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=False,
        axes_dims_rope=(16, 24, 24),
    ).eval()


def make_row(seed: int) -> Row:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Row(
        latents=draw(TOKENS, 16),
        condition=draw(TOKENS, 16),
        prompt_embeds=draw(TEXT, 32),
        pooled_prompt_embeds=draw(32),
        sigma=torch.tensor(0.6),
        guidance_scale=1.0,
        grid=GRID,
    )


def own_pages(denoiser: FluxTransformer, row: Row, dtype: PageDtype) -> Pages:
    """Pages with the row's own activations."""
    layout = denoiser.page_layout(dtype)
    entry = torch.empty(layout.entry_bytes(TOKENS), dtype=torch.uint8)
    shared = ("latents", "condition", "prompt_embeds", "pooled_prompt_embeds", "sigma", "guidance_scale", "grid")
    template = PrimeRow(**{name: getattr(row, name) for name in shared}, hidden=None, entry=entry)
    denoiser.prime([template], (0, denoiser.num_pages))
    return Pages(layout, TOKENS, entry, None, 0.0)


def in_dtype(row: Row, dtype: torch.dtype) -> Row:
    names = "latents", "condition", "prompt_embeds", "pooled_prompt_embeds"
    return replace(row, **{name: getattr(row, name).to(dtype) for name in names})


@pytest.mark.parametrize(
    ("pages", "dtype", "tolerance"), [("float32", torch.float32, 1e-4), ("bfloat16", torch.bfloat16, 0.05)]
)
@torch.inference_mode()
def test_denoiser_on_kernels(
    kernels: Kernels, flux: Any, pages: PageDtype, dtype: torch.dtype, tolerance: float
) -> None:
    """Equal to PyTorch's operators within rounding. Own content gives the bits of the exact pass, and so does any
    batch.
    """
    module = deepcopy(flux).to(dtype)
    denoiser, rows = FluxTransformer(module, 1000), [in_dtype(make_row(seed), dtype) for seed in (0, 1)]
    exact = [denoiser.forward([row])[0] for row in rows]
    for row, output in zip(rows, exact, strict=True):
        (plain,) = FluxTransformer(module, 1000, Operators(fused_linear)).forward([row])
        torch.testing.assert_close(output, plain, rtol=tolerance, atol=tolerance / 10)
        assert not torch.equal(output, plain), "the kernels are not used"
    edits = [replace(row, active=ACTIVE[n:], pages=own_pages(denoiser, row, pages)) for n, row in enumerate(rows)]
    together = denoiser.forward([edits[1], rows[0], edits[0]])
    for output, expected in zip(together, (exact[1][ACTIVE[1:]], exact[0], exact[0][ACTIVE]), strict=True):
        assert torch.equal(output, expected)
