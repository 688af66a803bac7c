"""`--batch-invariant` on a GPU, with sizes of real models: `TRITON_INTERPRET=0 python -m pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn

from model_executor.kernels.gpu_operators import invariant_operators
from model_executor.kernels.linear import plain_linear
from model_executor.kernels.operators import Operators
from model_executor.kernels.ragged import spans
from model_executor.models.base import PrimeRow, Row
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.models.unet.unet import Unet
from model_executor.page_cache.pages import Pages
from tools.random_unet_checkpoints import sdxl_unet

pytestmark = pytest.mark.gpu

HALF = [torch.bfloat16, torch.float16]
NEAR = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}
GRID, TOKENS, WIDTH, HEADS, HEAD_DIM = (32, 32), 1024, 64, 8, 128


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    with torch.inference_mode(), device():
        yield


def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture
def operators() -> Operators:
    return invariant_operators(device())


def make_linear(width: int, columns: int, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(width, columns, dtype=dtype)
    layer.weight.normal_(std=width**-0.5)
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("width", "columns"),
    [(3072, 12288), (12288, 3072), (15360, 3072), (64, 3072), (3072, 64), (3072, 18432), (100, 50)],
)
def test_a_rows_product_in_any_company(operators: Operators, dtype: torch.dtype, width: int, columns: int) -> None:
    """By number of rows, place and order, from any memory; and against PyTorch's."""
    layer, rows = make_linear(width, columns, dtype), 4608 if dtype != torch.float32 else 922
    x = torch.randn(rows, width, dtype=dtype)
    whole = operators.linear(layer, x)
    exact = plain_linear(layer, x)
    torch.testing.assert_close(whole, exact, rtol=NEAR[dtype], atol=NEAR[dtype])
    for number in (1, 7, 100, 512, 922):
        for first in (0, rows - number):
            part = slice(first, first + number)
            assert torch.equal(operators.linear(layer, x[part]), whole[part]), (number, first)
    order = torch.randperm(rows)
    assert torch.equal(operators.linear(layer, x[order]), whole[order])
    apart = torch.zeros(100, width + 8, dtype=dtype)
    apart[:, 3 : width + 3] = x[:100]
    assert torch.equal(operators.linear(layer, apart[:, 3 : width + 3]), whole[:100])


@pytest.mark.parametrize("dtype", HALF)
def test_activation_within_a_product(operators: Operators, dtype: torch.dtype) -> None:
    layer, x = make_linear(3072, 12288, dtype), torch.randn(922, 3072, dtype=dtype)
    whole = operators.linear(layer, x, gelu=True)
    exact = F.gelu(plain_linear(layer, x).float(), approximate="tanh")
    torch.testing.assert_close(whole.float(), exact, rtol=2 * NEAR[dtype], atol=2 * NEAR[dtype])
    assert torch.equal(operators.linear(layer, x[500:501], gelu=True), whole[500:501])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_a_requests_attention_in_any_company(operators: Any, dtype: torch.dtype, head_dim: int) -> None:
    """Alone, with fewer queries, in another order, with a share of the heads."""
    attend, heads = operators._choose(torch.empty(1), head_dim), 4
    queries, lengths = ([717, 1, 4608, 300], [4608, 640, 4608, 1100])
    if dtype == torch.float32:
        queries, lengths = ([77, 1, 300], [640, 90, 300])
    query = torch.randn(sum(queries), 3, heads, head_dim, dtype=dtype)[:, 0]
    joint = torch.randn(sum(lengths), 2, heads, head_dim, dtype=dtype)
    where, keys = spans(queries), spans(lengths)
    whole = attend(query, joint[:, 0], joint[:, 1], where, keys)
    for (start, stop), (first, last) in zip(where, keys, strict=True):
        q, k, v = query[start:stop], joint[first:last, 0], joint[first:last, 1]
        wide_q, wide_k, wide_v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
        exact = F.scaled_dot_product_attention(wide_q, wide_k, wide_v)[0]
        torch.testing.assert_close(
            whole[start:stop].float(), exact.transpose(0, 1).flatten(1), rtol=NEAR[dtype], atol=NEAR[dtype]
        )
        own, its = [(0, last - first)], whole[start:stop]
        assert torch.equal(attend(q, k, v, [(0, stop - start)], own), its)
        order = torch.randperm(stop - start)[: 1 + (stop - start) // 3]
        assert torch.equal(attend(q[order], k, v, [(0, len(order))], own), its[order])
        share = (x[:, 1:3].contiguous() for x in (q, k, v))
        assert torch.equal(attend(*share, [(0, stop - start)], own), its[:, head_dim : 3 * head_dim])


def test_a_rows_norm(operators: Operators) -> None:
    norm, x = RMSNorm(3584, 1e-6).to(torch.bfloat16), torch.randn(600, 3584, dtype=torch.bfloat16)
    whole = operators.rms_norm(norm, x)
    torch.testing.assert_close(whole, norm(x), rtol=2**-6, atol=2**-6)
    assert torch.equal(operators.rms_norm(norm, x[7:12]), whole[7:12])


def draw_row(seed: int, width: int, condition: int, text: int, pooled: int, tokens: int, grid: tuple[int, int]) -> Row:
    generator = torch.Generator(device()).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16)

    return Row(
        latents=draw(tokens, width),
        condition=draw(tokens, condition),
        prompt_embeds=draw(77, text),
        pooled_prompt_embeds=draw(pooled),
        sigma=torch.tensor(0.3 + 0.1 * seed),
        guidance_scale=3.5,
        grid=grid,
    )


def primed(denoiser: Any, row: Row) -> Pages:
    layout, tokens = denoiser.page_layout("int8"), len(row.latents)
    entry = torch.zeros(layout.entry_bytes(tokens), dtype=torch.uint8)
    shared = {field.name: getattr(row, field.name) for field in fields(Row)[:8]}
    denoiser.prime([PrimeRow(**shared, hidden=None, entry=entry)], (0, layout.num_blocks))
    return Pages(layout, tokens, entry, None, 0.0)


def test_a_transformers_rows_alone_and_in_a_mixed_batch(operators: Operators) -> None:
    """FLUX's shape with few layers and heads, in bfloat16: masked ones, an exact one, one after a block in full."""
    module = FluxTransformer2DModel(
        in_channels=2 * WIDTH,
        out_channels=WIDTH,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=512,
        pooled_projection_dim=256,
        guidance_embeds=True,
    )
    denoiser = FluxTransformer(module.to(torch.bfloat16).eval().requires_grad_(False), 1000, operators)
    rows = [draw_row(seed, WIDTH, WIDTH, 512, 256, TOKENS, GRID) for seed in range(8)]
    batch = [
        replace(row, active=torch.arange(seed, TOKENS, seed + 3), pages=primed(denoiser, row)) if seed != 4 else row
        for seed, row in enumerate(rows)
    ]
    batch[6] = replace(batch[6], full_blocks=range(1))
    alone = [denoiser.forward([row])[0] for row in batch]
    assert all(torch.isfinite(output).all() for output in alone)
    for order in (range(8), (5, 1, 7, 0), (4, 6)):
        for number, output in zip(order, denoiser.forward([batch[number] for number in order]), strict=True):
            assert torch.equal(output, alone[number]), (order, number)


def test_a_unets_rows_alone_and_in_a_mixed_batch(operators: Operators) -> None:
    module = sdxl_unet(9, 64).to(device(), torch.bfloat16).eval().requires_grad_(False)
    unet = Unet(module, 1000, 32, operators)
    text = module.config.cross_attention_dim
    rows = [draw_row(seed, 64, 80, text, 64, 64, (8, 8)) for seed in range(3)]
    edit = replace(rows[0], active=torch.arange(5, 30, 2), pages=primed(unet, rows[0]))
    batch = [edit, rows[1], replace(edit, prompt_embeds=rows[1].prompt_embeds), rows[2]]
    batch.append(replace(rows[2], prompt_embeds=rows[1].prompt_embeds))
    alone = [unet.forward([row])[0] for row in batch]
    assert all(torch.equal(output, expected) for output, expected in zip(unet.forward(batch), alone, strict=True))
