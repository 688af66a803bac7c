"""Groups of linear layers with low-rank additions for some rows: against float64, and bit by bit in other batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from model_executor.kernels.cpu_kernels import Kernels, best_kernels
from model_executor.kernels.linear import fused_linear, gpu_linear, plain_linear
from model_executor.kernels.linear_groups import (
    PACKED_BYTES,
    AnyGroup,
    KernelGroup,
    PackedGroup,
    ProductGroup,
    group_layers,
    keeps_packed,
)
from model_executor.kernels.low_rank import LowRank, Segment, Segments, runs

INPUTS = 300


def kernel_group(layers: Sequence[nn.Linear]) -> AnyGroup:
    kernels: Kernels | None = best_kernels()
    if kernels is None:
        pytest.skip("no compiled kernels on this machine")
    return KernelGroup(layers, kernels)


def bfloat16_group(layers: Sequence[nn.Linear]) -> AnyGroup:
    """Of a setting in bfloat16."""
    return kernel_group(layers)


MAKE: dict[str, Callable[[Sequence[nn.Linear]], AnyGroup]] = {
    "plain": lambda layers: ProductGroup(layers, plain_linear),
    "as on a GPU": lambda layers: ProductGroup(layers, gpu_linear),
    "oneDNN": lambda layers: ProductGroup(layers, fused_linear),
    "packed": PackedGroup,
    "kernels": kernel_group,
    "kernels, bfloat16": bfloat16_group,
}
OUTPUTS = {"one": (64,), "three": (64, 128, 64), "panels of two layers": (96, 32)}
Lows = Sequence[LowRank | None]


def make_lows(outputs: Sequence[int], ranks: Sequence[int], seed: int) -> Lows:
    """A rank of 0 means no addition."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) / size[1] ** 0.5

    return [
        LowRank(draw(rank, INPUTS), draw(number, rank)) if rank else None
        for number, rank in zip(outputs, ranks, strict=True)
    ]


@pytest.fixture(params=MAKE)
def make(request: pytest.FixtureRequest) -> Callable[[Sequence[nn.Linear]], AnyGroup]:
    return MAKE[request.param]


@pytest.fixture(params=OUTPUTS)
def outputs(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return OUTPUTS[request.param]


class Setting:
    """A group with two patches, of which the second changes the last layer alone."""

    def __init__(self, make: Callable[[Sequence[nn.Linear]], AnyGroup], outputs: Sequence[int]) -> None:
        dtype = torch.bfloat16 if make is bfloat16_group else torch.float32
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [nn.Linear(INPUTS, number, bias=number != 64).requires_grad_(False) for number in outputs]
            self.layers, self.x = [layer.to(dtype) for layer in layers], torch.randn(40, INPUTS).to(dtype)
        self.expected = [layer.double()(self.x.double()) for layer in deepcopy(self.layers)]
        self.lows = {
            "a": make_lows(outputs, [4] * len(outputs), 1),
            "b": make_lows(outputs, [0] * (len(outputs) - 1) + [17], 2),
        }
        self.group = make(self.layers)
        for patch, lows in self.lows.items():
            its = [low and low.to(self.x.device, dtype) for low in lows]
            self.group.put(patch, self.group.addition(its))

    def exact(self, segments: Segments, *, gelu: bool) -> Tensor:
        y = torch.cat(self.expected, dim=1)
        for each in segments:
            rows, scale = slice(*each.rows), 1.0 if each.scale is None else each.scale.double()[:, None]
            x, first = self.x[rows].double(), 0
            for low, layer in zip(self.lows.get(each.patch, [None] * len(self.layers)), self.layers, strict=True):
                if low is not None:
                    y[rows, first : first + layer.out_features] += scale * (x @ low.down.double().T @ low.up.double().T)
                first += layer.out_features
        return F.gelu(y, approximate="tanh") if gelu else y


MIXED = (
    Segment("a", (3, 20), None),
    Segment("a", (33, 40), torch.linspace(-1, 2, 7)),
    Segment("b", (10, 37), torch.linspace(0.5, 1.5, 27)),
    Segment("nothing here", (0, 40), None),
)


@pytest.mark.parametrize("gelu", [False, True])
@torch.inference_mode()
def test_rows_get_the_sum_of_their_additions(
    make: Callable[[Sequence[nn.Linear]], AnyGroup], outputs: tuple[int, ...], gelu: bool
) -> None:
    setting = Setting(make, outputs)
    ours = setting.group(setting.x, MIXED, gelu=gelu)
    exact = setting.exact(MIXED, gelu=gelu)
    tolerance = 1e-3 if gelu and make is MAKE["as on a GPU"] else 1e-5  # on a CPU its GELU is the exact one
    if make is bfloat16_group:
        tolerance = 2e-2  # of the additions' own numbers
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8 if make is bfloat16_group else 1e-4, atol=tolerance)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("name", ["oneDNN", "packed", "kernels", "kernels, bfloat16"])
@torch.inference_mode()
def test_a_rows_bits_depend_on_it_and_its_additions_alone(name: str, outputs: tuple[int, ...], gelu: bool) -> None:
    """Also those of a row without additions, which are those of the group without patches."""
    setting = Setting(MAKE[name], outputs)
    together, plain = setting.group(setting.x, MIXED, gelu=gelu), setting.group(setting.x, gelu=gelu)
    for (start, stop), its in runs(len(setting.x), MIXED):
        alone = tuple(Segment(each.patch, (0, stop - start), each.scale_of((start, stop))) for each in its)
        assert torch.equal(setting.group(setting.x[start:stop], alone, gelu=gelu), together[start:stop])
        for row in range(start, stop):
            one = tuple(Segment(each.patch, (0, 1), each.scale_of((row, row + 1))) for each in its)
            assert torch.equal(setting.group(setting.x[row : row + 1], one, gelu=gelu), together[row : row + 1])
    assert torch.equal(together[:3], plain[:3])


@torch.inference_mode()
def test_in_bfloat16_outputs_need_not_fill_a_panel() -> None:
    """Of one layer, or of several with additions of their own."""
    for outputs in ((24,), (16, 8, 48)):
        setting = Setting(bfloat16_group, outputs)
        together = setting.group(setting.x, MIXED)
        torch.testing.assert_close(together.double(), setting.exact(MIXED, gelu=False), rtol=2**-8, atol=2e-2)
        assert torch.equal(setting.group(setting.x[:2]), together[:2])


@torch.inference_mode()
def test_in_bfloat16_with_amx_a_row_of_a_large_denoiser_keeps_its_bits() -> None:
    """oneDNN multiplies few rows otherwise there, so weights of any size are packed."""
    kernels = best_kernels()
    if kernels is None or not kernels.has_tiles:
        pytest.skip("no AMX on this machine")
    torch.manual_seed(0)
    layers, x = [nn.Linear(3072, 512).bfloat16()], torch.randn(200, 3072).bfloat16()
    group = group_layers(layers, fused_linear, keeps_packed(PACKED_BYTES + 1, x.dtype, kernels), kernels)
    for number in (8, 33, 150):
        assert torch.equal(group(x[:number]), group(x)[:number])
    assert not keeps_packed(PACKED_BYTES + 1, torch.float32, kernels)
    assert not keeps_packed(PACKED_BYTES + 1, x.dtype, None)
    assert keeps_packed(PACKED_BYTES, torch.float32, None)


@pytest.mark.parametrize("gelu", [False, True])
@torch.inference_mode()
def test_no_rows_give_no_rows(make: Callable[[Sequence[nn.Linear]], AnyGroup], gelu: bool) -> None:
    """A rank's share of a request's tokens may be empty."""
    setting = Setting(make, (64, 128))
    assert setting.group(setting.x[:0], (Segment("a", (0, 0), None),), gelu=gelu).shape == (0, 192)


@torch.inference_mode()
def test_a_dropped_patch_has_no_effect(make: Callable[[Sequence[nn.Linear]], AnyGroup]) -> None:
    setting = Setting(make, (64,))
    setting.group.drop("a")
    where = (Segment("a", (0, 40), None),)
    assert torch.equal(setting.group(setting.x, where), setting.group(setting.x))


spans = st.tuples(st.integers(0, 20), st.integers(0, 20)).filter(lambda span: span[0] < span[1])


@settings(max_examples=50)
@given(st.lists(spans, max_size=5))
def test_runs_cover_all_rows_and_know_their_segments(rows: list[tuple[int, int]]) -> None:
    segments = tuple(Segment(str(number), span, None) for number, span in enumerate(rows))
    found = list(runs(20, segments))
    assert [row for (start, stop), _ in found for row in range(start, stop)] == list(range(20))
    for (start, stop), its in found:
        for row in range(start, stop):
            assert its == tuple(each for each in segments if each.rows[0] <= row < each.rows[1])
