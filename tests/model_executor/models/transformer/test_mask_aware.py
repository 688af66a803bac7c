"""Active tokens over a template's pages, against a forward pass over all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.page_scheme import PageDtype
from model_executor.kernels.linear import Linear, fused_linear, plain_linear
from model_executor.kernels.operators import Operators
from model_executor.models.base import PrimeRow, Row
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.page_cache.pages import Pages
from tools.random_checkpoints import flux_transformer

WIDTH = 32
GRID = (6, 8)
TOKENS = GRID[0] * GRID[1]
ACTIVE = torch.tensor([3, 4, 5, 11, 12, 13, 30, 47])
KINDS = [plain_linear, fused_linear]
DTYPES = [torch.float32, torch.bfloat16]


def transformer(dtype: torch.dtype = torch.float32, linear: Linear | None = None) -> FluxTransformer:
    torch.manual_seed(0)
    operators = None if linear is None else Operators(linear)
    return FluxTransformer(flux_transformer(WIDTH, True).to(dtype).eval(), 1000, operators)


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
    """A row that primes the same inputs; its pages start with values that would be noticed."""
    tokens = row.latents.shape[0]
    entry = torch.full([flux.page_layout(pages).entry_bytes(tokens)], 0x7F, dtype=torch.uint8)
    shared = ("latents", "condition", "prompt_embeds", "pooled_prompt_embeds", "sigma", "guidance_scale", "grid")
    return PrimeRow(**{name: getattr(row, name) for name in shared}, hidden=None, entry=entry)


@torch.inference_mode()
def prime(flux: FluxTransformer, rows: Sequence[PrimeRow], cuts: Sequence[int] = ()) -> None:
    """Prime all blocks, in chunks that end at `cuts`."""
    rows = list(rows)
    for start, stop in zip([0, *cuts], [*cuts, flux.num_pages], strict=True):
        states = flux.prime(rows, (start, stop))
        rows = [replace(row, hidden=state) for row, state in zip(rows, states, strict=True)]
    assert all(row.hidden == () for row in rows)


@torch.inference_mode()
def forward(flux: FluxTransformer, rows: Sequence[Row]) -> list[Tensor]:
    return flux.forward(rows)


def primed(flux: FluxTransformer, row: Row, active: Tensor, pages: PageDtype = "float32") -> Row:
    """The row with these tokens active, over pages of its own inputs."""
    template = prime_row(flux, row, pages)
    prime(flux, [template])
    layout = flux.page_layout(pages)
    return replace(row, active=active, pages=Pages(layout, row.latents.shape[0], template.entry, None, 0.0))


@pytest.mark.parametrize("linear", KINDS)
@pytest.mark.parametrize("active", [ACTIVE, torch.arange(1, TOKENS), torch.arange(TOKENS)])
def test_own_content_gives_the_bits_of_the_exact_pass(linear: Linear, active: Tensor) -> None:
    """If pages contain what the request itself would compute, omitting tokens changes nothing. PyTorch's own products
    round by the number of rows on some processors (MKL with AVX-512)."""
    flux = transformer(linear=linear)
    row = make_row(0)
    (exact,) = forward(flux, [row])
    (output,) = forward(flux, [primed(flux, row, active)])
    if linear is fused_linear:
        assert torch.equal(output, exact[active])
    torch.testing.assert_close(output, exact[active], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_own_content_in_pages_of_the_compute_dtype(dtype: torch.dtype) -> None:
    """In bfloat16 too, where bfloat16 pages lose nothing."""
    flux = transformer(dtype)
    row = make_row(1, dtype)
    (exact,) = forward(flux, [row])
    pages: PageDtype = "float32" if dtype == torch.float32 else "bfloat16"
    (output,) = forward(flux, [primed(flux, row, ACTIVE, pages)])
    assert torch.equal(output, exact[ACTIVE])


@pytest.mark.parametrize(("pages", "limit"), [("int8", 0.02), ("bfloat16", 0.01)])
def test_error_of_smaller_pages_is_bounded(pages: PageDtype, limit: float) -> None:
    """Relative to the velocity; and it is not zero, so the pages are read."""
    flux = transformer()
    row = make_row(2)
    (exact,) = forward(flux, [row])
    (output,) = forward(flux, [primed(flux, row, ACTIVE, pages)])
    error = (output - exact[ACTIVE]).norm() / exact[ACTIVE].norm()
    assert 0 < error < limit


def test_between_keyframes_both_count() -> None:
    """Weights 0 and 1 are the two keyframes; in between, the result lies between theirs."""
    flux = transformer()
    row, other = make_row(3), make_row(4)
    near, far = (primed(flux, r, ACTIVE).pages for r in (row, other))
    assert near is not None
    assert far is not None

    def at(weight: float) -> Tensor:
        pages = Pages(near.layout, TOKENS, near.near, far.near, weight)
        return forward(flux, [replace(row, active=ACTIVE, pages=pages)])[0]

    assert torch.equal(at(0.0), forward(flux, [replace(row, active=ACTIVE, pages=near)])[0])
    assert torch.equal(at(1.0), forward(flux, [replace(row, active=ACTIVE, pages=far)])[0])
    distances = [float((at(weight) - at(0.0)).norm()) for weight in (0.0, 0.2, 0.5, 0.8, 1.0)]
    assert distances == sorted(distances)
    assert distances[1] > 0


def mixed_rows(flux: FluxTransformer, dtype: torch.dtype) -> list[Row]:
    """Exact and mask-aware rows, int8 and float32 pages, leading full blocks, various sizes and text lengths, and a
    single active token.
    """
    rows = [make_row(seed, dtype) for seed in range(5)]
    small, single = make_row(6, dtype, (2, 3), 5), make_row(7, dtype, (1, 1), 3)
    return [
        primed(flux, rows[0], ACTIVE, "int8"),
        rows[1],
        replace(primed(flux, rows[2], ACTIVE[:3]), full_blocks=range(1)),
        replace(primed(flux, rows[3], ACTIVE, "bfloat16"), full_blocks=range(2)),
        replace(rows[4], active=ACTIVE[5:], full_blocks=range(flux.num_pages)),
        primed(flux, small, torch.tensor([4]), "int8"),
        single,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_mixed_batch_are_those_of_each_request_alone(dtype: torch.dtype) -> None:
    flux = transformer(dtype)
    rows = mixed_rows(flux, dtype)
    alone = [forward(flux, [row])[0] for row in rows]
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 3, 1, 5, 0, 4, 2], [2, 2, 3], [5, 5]):
        for index, output in zip(order, forward(flux, [rows[i] for i in order]), strict=True):
            assert torch.equal(output, alone[index])


@pytest.mark.parametrize("linear", KINDS)
@pytest.mark.parametrize("full_blocks", [1, 2, 3])
def test_full_blocks_on_own_inputs(linear: Linear, full_blocks: int) -> None:
    """Blocks that compute all tokens read no pages: theirs contain garbage here."""
    flux = transformer(linear=linear)
    row = make_row(5)
    (exact,) = forward(flux, [row])
    partial = primed(flux, row, ACTIVE)
    assert partial.pages is not None
    start = full_blocks * partial.pages.layout.block_bytes(TOKENS)
    partial.pages.near[:start] = 0x7F
    (output,) = forward(flux, [replace(partial, full_blocks=range(full_blocks))])
    assert torch.equal(output, exact[ACTIVE])
    if full_blocks == flux.num_pages:
        (output,) = forward(flux, [replace(row, active=ACTIVE, full_blocks=range(full_blocks))])
        assert torch.equal(output, exact[ACTIVE])


def test_full_blocks_compute_more_than_pages_hold() -> None:
    """With another picture's pages, more full blocks come closer to the exact result."""
    flux = transformer()
    row = make_row(8)
    (exact,) = forward(flux, [row])
    pages = primed(flux, make_row(9), ACTIVE).pages
    errors = [
        float(
            (forward(flux, [replace(row, active=ACTIVE, pages=pages, full_blocks=range(p))])[0] - exact[ACTIVE]).norm()
        )
        for p in range(flux.num_pages + 1)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > errors[1] > errors[-1] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [[1], [2], [1, 2]])
def test_priming_in_chunks_and_company_writes_the_same_bytes(dtype: torch.dtype, cuts: list[int]) -> None:
    """Templates of other sizes and noise levels in the same call."""
    flux = transformer(dtype)
    rows = [make_row(0, dtype), make_row(0, dtype, sigma=0.2), make_row(1, dtype, (2, 5), 3)]
    alone = [prime_row(flux, row, "int8") for row in rows]
    for row in alone:
        prime(flux, [row])
    together = [prime_row(flux, row, "int8") for row in rows]
    prime(flux, together, cuts)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.entry, other.entry)
    assert not torch.equal(alone[0].entry, alone[1].entry)


def test_a_chunk_may_run_twice() -> None:
    """A chunk does not change the hidden state that it continues from."""
    flux = transformer()
    row = prime_row(flux, make_row(0), "float32")
    with torch.inference_mode():
        (state,) = flux.prime([row], (0, 1))
        again = replace(row, hidden=state)
        first, second = (flux.prime([again], (1, 2))[0][0] for _ in range(2))
    assert torch.equal(first, second)


def test_an_entry_of_another_size_is_refused() -> None:
    flux = transformer()
    row = prime_row(flux, make_row(0), "int8")
    with pytest.raises(ValueError, match="bytes"):
        prime(flux, [replace(row, entry=row.entry[:-64])])


def test_layout_counts_all_blocks() -> None:
    layout = transformer().page_layout("int8")
    assert (layout.num_blocks, layout.num_heads, layout.head_dim, layout.dtype) == (3, 2, 32, "int8")
