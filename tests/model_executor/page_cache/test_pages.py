"""Pages: what is written is read back within the precision of int8 and bfloat16, and keyframes are interpolated."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.page_scheme import PageDtype, PageLayout
from model_executor.page_cache.pages import PageEntry, Pages, quantise

TOKENS = 13
HEADS = 3
HEAD_DIM = 8


def layout(dtype: PageDtype) -> PageLayout:
    return PageLayout(num_blocks=3, num_heads=HEADS, head_dim=HEAD_DIM, dtype=dtype)


def keys_values(seed: int) -> Tensor:
    return torch.randn(2, HEADS, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def written(dtype: PageDtype, blocks: list[Tensor]) -> Tensor:
    """An entry with these blocks written to it."""
    entry = torch.full([layout(dtype).entry_bytes(TOKENS)], 0xEE, dtype=torch.uint8)
    for number, block in enumerate(blocks):
        PageEntry(entry, layout(dtype), TOKENS).write(number, block)
    return entry


def read(
    dtype: PageDtype, near: Tensor, far: Tensor | None, weight: float, into: torch.dtype = torch.float32, block: int = 0
) -> Tensor:
    out = torch.full([2, HEADS, TOKENS + 4, HEAD_DIM], 7.0, dtype=into)
    Pages(layout(dtype), TOKENS, near, far, weight).open().read(block, out[:, :, 4:])
    assert (out[:, :, :4] == 7.0).all(), "text tokens' rows are not the page's"
    return out[:, :, 4:]


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_blocks_are_laid_out_by_the_page_scheme(dtype: PageDtype) -> None:
    """Each block is read back from its own bytes; float32 bit by bit."""
    blocks = [keys_values(seed) for seed in range(3)]
    entry = written(dtype, blocks)
    tolerance = {"int8": 0.02, "bfloat16": 0.02, "float32": 0.0}[dtype]
    for number, block in enumerate(blocks):
        torch.testing.assert_close(read(dtype, entry, None, 0.0, block=number), block, rtol=0, atol=tolerance)
    size = layout(dtype).block_bytes(TOKENS)
    values = entry[size : size + layout(dtype).value_bytes(TOKENS)].view(getattr(torch, dtype))
    assert torch.equal(values.view(2, HEADS, TOKENS, HEAD_DIM), PageEntry(entry, layout(dtype), TOKENS).values[1])


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_interpolation_is_linear_and_exact_at_its_ends(dtype: PageDtype, into: torch.dtype) -> None:
    near, far = written(dtype, [keys_values(0)]), written(dtype, [keys_values(1)])
    ends = [read(dtype, entry, None, 0.0, into) for entry in (near, far)]
    assert not torch.equal(*ends)
    for weight, end in zip((0.0, 1.0), ends, strict=True):
        assert torch.equal(read(dtype, near, far, weight, into), end)
    exact = [read(dtype, entry, None, 0.0) for entry in (near, far)]
    for weight in (0.25, 0.5, 0.9):
        expected = ((1 - weight) * exact[0] + weight * exact[1]).to(into)
        torch.testing.assert_close(
            read(dtype, near, far, weight, into), expected, rtol=1e-2 if into != torch.float32 else 1e-5, atol=1e-6
        )


def test_rows_of_zeros_stay_zeros() -> None:
    block = keys_values(0)
    block[:, :, 5] = 0.0
    out = read("int8", written("int8", [block]), None, 0.0)
    assert (out[:, :, 5] == 0).all()
    assert torch.isfinite(out).all()


def test_pages_may_be_read_only() -> None:
    """Readers map the arena without write access."""
    entry = written("int8", [keys_values(0)])
    before = entry.clone()
    read("int8", entry, entry, 0.3)
    assert torch.equal(entry, before)


FLOATS = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 2.0**-60)


@given(st.lists(st.lists(FLOATS, min_size=4, max_size=4), min_size=1, max_size=6), st.booleans())
def test_quantisation_is_within_half_a_scale(rows: list[list[float]], as_bfloat16: bool) -> None:
    """In each row separately; the largest value is nearly exact, and signs never change."""
    x = torch.tensor(rows, dtype=torch.float32)
    x = x.bfloat16().float() if as_bfloat16 else x
    values, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), 1)
    quantise(x.bfloat16() if as_bfloat16 else x, values, scales)
    back = values * scales
    assert ((back - x).abs() <= 0.5001 * scales).all()
    largest = x.abs().amax(-1)
    torch.testing.assert_close(back.abs().amax(-1), largest, rtol=1e-6, atol=0)
    assert (back * x >= 0).all()


@given(st.lists(FLOATS, min_size=4, max_size=4), st.integers(-20, 20))
def test_quantisation_scales_with_its_input(row: list[float], exponent: int) -> None:
    """A row times a power of two has the same integers."""
    x = torch.tensor([row, [value * 2.0**exponent for value in row]])
    values, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(2, 1)
    quantise(x, values, scales)
    assert torch.equal(values[0], values[1])
    assert scales[1] == scales[0] * 2.0**exponent
