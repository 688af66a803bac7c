"""FLUX: the ragged, block-by-block forward pass against diffusers', for the same module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model_executor.kernels.linear import fused_linear, plain_linear
from model_executor.kernels.operators import Operators
from model_executor.models.base import Row
from model_executor.models.transformer.flux_transformer import FluxTransformer
from tools.random_checkpoints import flux_transformer

WIDTH = 32


def module(dtype: torch.dtype, guidance_embeds: bool) -> Any:
    torch.manual_seed(0)
    return flux_transformer(WIDTH, guidance_embeds).to(dtype).eval()


def make_row(seed: int, grid: tuple[int, int], text_tokens: int, dtype: torch.dtype = torch.float32) -> Row:
    generator = torch.Generator().manual_seed(seed)
    tokens = grid[0] * grid[1]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return Row(
        latents=draw(tokens, 64),
        condition=draw(tokens, 320),
        prompt_embeds=draw(text_tokens, WIDTH),
        pooled_prompt_embeds=draw(WIDTH),
        sigma=torch.rand((), generator=generator),
        guidance_scale=1.0 + seed,
        grid=grid,
    )


ROWS = [((4, 4), 8), ((3, 5), 8), ((6, 2), 11), ((1, 1), 5)]
"""(grid, text tokens) of requests that share a batch."""


@torch.inference_mode()
def reference(module: Any, row: Row) -> Tensor:
    """diffusers' forward, with inputs as FluxFillPipeline prepares them."""
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(row.grid[0])), torch.arange(float(row.grid[1])))
    guidance = torch.full([1], row.guidance_scale) if module.config.guidance_embeds else None
    output: Tensor = module(
        hidden_states=torch.cat([row.latents, row.condition], dim=1)[None],
        timestep=(row.sigma * 1000).expand(1).to(row.latents.dtype) / 1000,
        guidance=guidance,
        pooled_projections=row.pooled_prompt_embeds[None],
        encoder_hidden_states=row.prompt_embeds[None],
        txt_ids=torch.zeros(row.prompt_embeds.shape[0], 3),
        img_ids=ids.to(row.latents.dtype),
        return_dict=False,
    )[0][0]
    return output


@torch.inference_mode()
def forward(transformer: FluxTransformer, rows: list[Row]) -> list[Tensor]:
    return transformer.forward(rows)


@pytest.mark.parametrize("guidance_embeds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_request_is_bit_identical(dtype: torch.dtype, guidance_embeds: bool) -> None:
    """With layers run as PyTorch runs them, nothing is left that differs."""
    flux = module(dtype, guidance_embeds)
    transformer = FluxTransformer(flux, 1000, Operators(plain_linear))
    for seed, (grid, text_tokens) in enumerate(ROWS):
        row = make_row(seed, grid, text_tokens, dtype)
        assert torch.equal(forward(transformer, [row])[0], reference(flux, row))


@pytest.mark.parametrize("guidance_embeds", [False, True])
def test_ragged_batch_matches_each_request_alone(guidance_embeds: bool) -> None:
    """Sizes, text lengths, noise levels and guidance all differ within one batch."""
    flux = module(torch.float32, guidance_embeds)
    rows = [make_row(seed, grid, text_tokens) for seed, (grid, text_tokens) in enumerate(ROWS)]
    for linear in (plain_linear, fused_linear):
        outputs = forward(FluxTransformer(flux, 1000, Operators(linear)), rows)
        for output, row in zip(outputs, rows, strict=True):
            torch.testing.assert_close(output, reference(flux, row), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """The layers the server uses: a request's output is the same to the bit, alone or with any others."""
    transformer = FluxTransformer(module(dtype, True), 1000)
    rows = [make_row(seed, grid, text_tokens, dtype) for seed, (grid, text_tokens) in enumerate(ROWS)]
    alone = [forward(transformer, [row])[0] for row in rows]
    for together in (rows, rows[::-1], rows[:2], rows * 3):
        for output, row in zip(forward(transformer, together), together, strict=True):
            index = next(i for i, other in enumerate(rows) if other is row)
            assert torch.equal(output, alone[index])


def test_all_tokens_active_is_the_exact_pass() -> None:
    """Naming every token needs no pages and gives the same bits; leaving one out without pages is refused."""
    transformer = FluxTransformer(module(torch.float32, False), 1000)
    row = make_row(0, (4, 4), 8)
    everything = forward(transformer, [row])[0]
    assert torch.equal(forward(transformer, [replace(row, active=torch.arange(16))])[0], everything)
    with pytest.raises(ValueError, match="pages"):
        forward(transformer, [replace(row, active=torch.tensor([3, 7, 8]))])


def test_adapters_run_as_themselves() -> None:
    """A layer that is not a plain nn.Linear is called, not read."""

    class Doubled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layer = Doubled(8, 8)
    x = torch.randn(3, 8)
    with torch.inference_mode():
        assert torch.equal(fused_linear(layer, x), layer(x))
        assert torch.equal(fused_linear(layer, x, gelu=True), plain_linear(layer, x, gelu=True))
