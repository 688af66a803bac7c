"""Ragged operations: each request in a batch gets the result that it would get alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from model_executor.kernels.ragged import Packing, norm_modulate, rms_modulate, spans
from model_executor.kernels.residual import Addition, Residual

WIDTH = 48
EPS = 1e-6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_modulation_of_chosen_rows(dtype: torch.dtype, fused: bool) -> None:
    """Against the formula in float64; and a request's bits are those it has alone."""
    x, factor, shift = (torch.randn(rows, WIDTH).to(dtype) for rows in (20, 3, 3))
    where = [(2, 5), (5, 6), (9, 20)]
    out = norm_modulate(x, where, EPS, factor, shift, fused=fused)
    assert out.shape == (15, WIDTH)
    for number, ((start, stop), (first, last)) in enumerate(zip(where, spans([3, 1, 11]), strict=True)):
        exact = F.layer_norm(x[start:stop].double(), [WIDTH], eps=EPS) * factor[number] + shift[number]
        tolerance = 1e-5 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(out[first:last].double(), exact, rtol=tolerance, atol=tolerance)
        lone = slice(number, number + 1)
        alone = norm_modulate(x, [(start, stop)], EPS, factor[lone], shift[lone], fused=fused)
        assert torch.equal(out[first:last], alone)


def test_norm_leaves_its_input_alone() -> None:
    x = torch.randn(4, WIDTH)
    before = x.clone()
    for fused in (False, True):
        norm_modulate(x, [(0, 4)], EPS, torch.ones(1, WIDTH), torch.zeros(1, WIDTH), fused=fused)
    assert torch.equal(x, before)


def test_the_last_tokens_of_requests_may_be_modulated_apart() -> None:
    """Then every request has two spans, of which some are empty; without, those that it has anyway."""
    plain, apart = Packing.of([2, 3], [5, 4]), Packing.of([2, 3], [5, 4], apart=[2, 0])
    assert (plain.modulated_text, plain.modulated_image) == (plain.joint_text, plain.joint_image)
    assert apart.modulated_text == ((0, 2), (2, 2), (7, 10), (10, 10))
    assert apart.modulated_image == ((2, 5), (5, 7), (10, 14), (14, 14))
    for name in ("text", "image", "joint", "joint_text", "joint_image"):
        assert getattr(apart, name) == getattr(plain, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_root_mean_square_norm_of_chosen_rows(dtype: torch.dtype) -> None:
    """Against the formula in float64; and a request's bits are those it has alone."""
    x, factor = (torch.randn(rows, WIDTH).to(dtype) for rows in (20, 3))
    where = [(2, 5), (5, 6), (9, 20)]
    out = rms_modulate(x, where, EPS, factor)
    for number, ((start, stop), (first, last)) in enumerate(zip(where, spans([3, 1, 11]), strict=True)):
        exact = F.rms_norm(x[start:stop].double(), [WIDTH], eps=EPS) * factor[number]
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out[first:last].double(), exact, rtol=tolerance, atol=tolerance)
        assert torch.equal(out[first:last], rms_modulate(x, [(start, stop)], EPS, factor[number : number + 1]))


def test_a_normed_addition() -> None:
    """To some rows, of which each request has a gate."""
    hidden, y, gate = torch.randn(9, WIDTH), torch.randn(5, WIDTH), torch.randn(2, WIDTH)
    where, normed = [(1, 3), (6, 9)], F.rms_norm(y.double(), [WIDTH], eps=0.5)
    expected = hidden.double()
    for (start, stop), (first, last), factor in zip(where, spans([2, 3]), gate.double(), strict=True):
        expected[start:stop] += factor * normed[first:last]
    Residual(hidden, fused=True).add(Addition(where, y, gate, norm_eps=0.5))
    torch.testing.assert_close(hidden.double(), expected, rtol=1e-5, atol=1e-5)


def test_text_tokens_that_fill_up_an_image_are_beside_it() -> None:
    packing = Packing.of([5, 0, 4], [2, 3, 1], [2, 0, 4])
    assert packing.joint_image == ((5, 7), (7, 10), (14, 15))
    assert packing.joint_filled == ((3, 7), (7, 10), (10, 15))
    assert packing.filled == ((0, 4), (4, 7), (7, 12))
    assert packing.fillers == [2, 0, 4]
    assert Packing.of([5, 0], [2, 3]).joint_filled == Packing.of([5, 0], [2, 3]).joint_image
