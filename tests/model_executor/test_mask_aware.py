"""Active tokens over a template's pages, against the same forward with every token computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from checkpoints import flux_transformer
from torch import Tensor

from core.page_scheme import PageDtype
from model_executor.linear import Linear, fused_linear, plain_linear
from model_executor.models.base import PrimeRow, Row
from model_executor.models.flux_transformer import FluxTransformer
from model_executor.pages import Pages

WIDTH = 32
GRID = (6, 8)
TOKENS = GRID[0] * GRID[1]
ACTIVE = torch.tensor([3, 4, 5, 11, 12, 13, 30, 47])
KINDS = [plain_linear, fused_linear]
DTYPES = [torch.float32, torch.bfloat16]


def transformer(dtype: torch.dtype = torch.float32, linear: Linear | None = None) -> FluxTransformer:
    torch.manual_seed(0)
    return FluxTransformer(flux_transformer(WIDTH, True).to(dtype).eval(), 1000, linear)


def make_row(
    seed: int,
    dtype: torch.dtype = torch.float32,
    grid: tuple[int, int] = GRID,
    text_tokens: int = 8,
    sigma: float = 0.6,
) -> Row:
    generator = torch.Generator().manual_seed(seed)
    tokens = grid[0] * grid[1]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return Row(
        latents=draw(tokens, 64),
        condition=draw(tokens, 320),
        prompt_embeds=draw(text_tokens, WIDTH),
        pooled_prompt_embeds=draw(WIDTH),
        sigma=torch.tensor(sigma),
        guidance_scale=1.0 + seed,
        grid=grid,
    )


def prime_row(flux: FluxTransformer, row: Row, pages: PageDtype) -> PrimeRow:
    """The same inputs, to be primed; pages start as something that would show."""
    tokens = row.latents.shape[0]
    entry = torch.full([flux.page_layout(pages).entry_bytes(tokens)], 0x7F, dtype=torch.uint8)
    shared = ("latents", "condition", "prompt_embeds", "pooled_prompt_embeds", "sigma", "guidance_scale", "grid")
    return PrimeRow(**{name: getattr(row, name) for name in shared}, hidden=None, entry=entry)


@torch.inference_mode()
def prime(flux: FluxTransformer, rows: Sequence[PrimeRow], cuts: Sequence[int] = ()) -> None:
    """All blocks, in chunks that end at `cuts`."""
    rows = list(rows)
    for start, stop in zip([0, *cuts], [*cuts, flux.num_blocks], strict=True):
        states = flux.prime(rows, (start, stop))
        rows = [replace(row, hidden=state) for row, state in zip(rows, states, strict=True)]
    assert all(row.hidden == () for row in rows)


@torch.inference_mode()
def forward(flux: FluxTransformer, rows: Sequence[Row]) -> list[Tensor]:
    return flux.forward(rows)


def primed(flux: FluxTransformer, row: Row, active: Tensor, pages: PageDtype = "float32") -> Row:
    """The row with these tokens active over pages of its own inputs."""
    template = prime_row(flux, row, pages)
    prime(flux, [template])
    layout = flux.page_layout(pages)
    return replace(row, active=active, pages=Pages(layout, row.latents.shape[0], template.entry, None, 0.0))


@pytest.mark.parametrize("linear", KINDS)
@pytest.mark.parametrize("active", [ACTIVE, torch.arange(1, TOKENS), torch.arange(TOKENS)])
def test_own_content_gives_the_bits_of_the_exact_pass(linear: Linear, active: Tensor) -> None:
    """Where pages hold what the request itself would compute, leaving tokens out changes nothing."""
    flux = transformer(linear=linear)
    row = make_row(0)
    (exact,) = forward(flux, [row])
    (output,) = forward(flux, [primed(flux, row, active)])
    assert torch.equal(output, exact[active])
