"""Compiled CPU kernels in bfloat16: against float64, and compiled for CPUs without AVX512-BF16, with the same bits.
Skipped if they cannot be compiled."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.page_scheme import PageLayout
from model_executor.cpu import cpu_features, cpu_has_amx
from model_executor.kernels import cpu_kernels as module
from model_executor.kernels.attention import normalise_and_rotate_
from model_executor.kernels.compiled_library import compiled_library
from model_executor.kernels.cpu_kernels import (
    LANES,
    AddedProduct,
    Kernels,
    best_kernels,
    can_multiply,
    can_norm,
    can_read,
    can_rotate,
    pack,
    pack_tiles,
)
from model_executor.page_cache.pages import PageEntry, Pages

CLOSE = 2**-8
"""Relative: rounding to bfloat16 changes a number by half of it at most."""


@pytest.fixture
def kernels() -> Kernels:
    found = best_kernels()
    if found is None:
        pytest.skip("no compiled kernels on this machine")
    return found


def compiled(folder: Path, *flags: str) -> Kernels:
    """With other instruction sets than those of this machine."""
    if not isinstance(best_kernels(), Kernels):
        pytest.skip("no compiled kernels on this machine")
    source, compiler = Path(module.__file__).with_suffix(".c"), shutil.which("cc") or ""
    with compiled_library(source, compiler, (*module._FLAGS, *flags), cpu_features(), folder) as library:
        return Kernels(ctypes.CDLL(str(library.path)), library.digest)


@pytest.fixture(scope="module")
def untiled(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """For a CPU with AVX-512, but without AMX."""
    return compiled(tmp_path_factory.mktemp("untiled"), "-mno-amx-tile")


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """For a CPU with AVX-512 that does not multiply bfloat16."""
    return compiled(tmp_path_factory.mktemp("portable"), "-mno-avx512bf16", "-mno-amx-tile")


def draw(*size: int) -> Tensor:
    return torch.randn(size).to(torch.bfloat16)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.int16), y.view(torch.int16))


LAYERS = [(1, 8, 64), (5, 64, 24), (33, 96, 32), (50, 300, 192), (9, 3000, 72), (150, 4200, 40)]
"""(rows, inputs, outputs). One fills tiles, others leave some of their rows or columns, or both, empty; the last one
has too many inputs for one block, and too many rows."""


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), LAYERS)
def test_linear(kernels: Kernels, untiled: Kernels, rows: int, inputs: int, outputs: int, gelu: bool) -> None:
    """Selected rows have the same bits as among all rows, and so has a matrix within a wider one, of which nothing else
    changes."""
    wide, weight, bias = draw(rows, inputs + 3), draw(outputs, inputs) / inputs**0.5, draw(outputs)
    x = wide[:, :inputs]
    exact = F.linear(x.double(), weight.double(), bias.double())
    exact = F.gelu(exact, approximate="tanh") if gelu else exact
    for each in (kernels, untiled):
        packed = each.pack(weight)
        out = each.linear(x, packed, bias, gelu=gelu)
        torch.testing.assert_close(out.double(), exact, rtol=CLOSE, atol=1e-5)
        for count in {*range(1, min(rows, 8)), *range(15, rows, 16)}:
            chosen = torch.randperm(rows)[:count]
            assert torch.equal(each.linear(x[chosen], packed, bias, gelu=gelu), out[chosen])
        within = torch.full((rows, outputs + 5), 7.0, dtype=torch.bfloat16)
        each.linear(x, packed, bias, gelu=gelu, out=within[:, 2:-3])
        assert torch.equal(within[:, 2:-3], out)
        assert (within[:, :2] == 7.0).all()
        assert (within[:, -3:] == 7.0).all()
        assert each.linear(x[:0], packed, bias, gelu=gelu).shape == (0, outputs)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), LAYERS)
def test_linear_without_avx512_bf16(
    untiled: Kernels, portable: Kernels, rows: int, inputs: int, outputs: int, gelu: bool
) -> None:
    x, packed, bias = draw(rows, inputs), pack(draw(outputs, inputs) / inputs**0.5), draw(outputs)
    ours, theirs = (each.linear(x, packed, bias, gelu=gelu) for each in (untiled, portable))
    assert same_bits(theirs, ours)


def test_tiles_sum_up_in_the_order_that_is_documented(kernels: Kernels) -> None:
    """Steps of 32 inputs: in each, the even and the odd ones one after the other, then both together. A product of two
    numbers is exact in float32."""
    if not kernels.has_tiles:
        pytest.skip("this CPU has no AMX")
    x, weight = draw(40, 128), draw(64, 128)
    products = (x.float()[:, None] * weight.float()).unflatten(2, (4, 16, 2))
    total = torch.zeros(40, 64)
    for step in products.unbind(2):
        of_step = torch.zeros(40, 64, 2)
        for pair in step.unbind(2):
            of_step += pair
        total += of_step.sum(2)
    out = kernels.linear(x, kernels.pack(weight), torch.zeros(64).bfloat16(), gelu=False)
    assert torch.equal(out, total.bfloat16())


@pytest.mark.parametrize(("rows", "inputs"), [(3, 64), (70, 72)])
def test_rows_with_additions(kernels: Kernels, untiled: Kernels, rows: int, inputs: int) -> None:
    """Low-rank products of their own for some rows and some panels of outputs; each row has the bits that it has
    alone."""
    x, weight, bias = draw(rows, inputs), draw(192, inputs) / 8, draw(192)
    low, up, columns = torch.randn(rows, 7), torch.randn(3, 4, 64), torch.tensor([0, -1, 3], dtype=torch.int32)
    cut = rows // 2 + 1
    exact = F.linear(x.double(), weight.double(), bias.double())
    exact[cut:, :64] += low[cut:, :4].double() @ up[0].double()
    exact[cut:, 128:] += low[cut:, 3:].double() @ up[2].double()
    for each in (kernels, untiled):
        packed = each.pack(weight)
        pieces = [(0, cut, ()), (cut, rows, [AddedProduct(low[cut:], up, columns)])]
        out = each.linear(x, packed, bias, gelu=False, pieces=pieces)
        torch.testing.assert_close(out.double(), exact, rtol=CLOSE, atol=1e-5)
        for row in range(cut, rows):
            alone = [(0, 1, [AddedProduct(low[row : row + 1], up, columns)])]
            assert torch.equal(each.linear(x[row : row + 1], packed, bias, gelu=False, pieces=alone)[0], out[row])
        assert torch.equal(each.linear(x, packed, bias, gelu=False)[:cut], out[:cut])


def test_sums_of_numbers_of_any_size_have_the_same_bits(kernels: Kernels, portable: Kernels) -> None:
    """Also of denormal ones, which count as zeros. Sums are not rounded to bfloat16 here."""
    x = (torch.randn(200, 64) * 10.0 ** torch.randint(-40, 12, (200, 64))).to(torch.bfloat16)
    weight, scale = pack(draw(32, 64), LANES), torch.rand(200)
    ours, theirs = (each.narrow_linear(x, weight, scale) for each in (kernels, portable))
    assert torch.equal(ours, theirs)
    tiny = torch.full((1, 64), 1e-39).to(torch.bfloat16)
    assert (tiny > 0).all()
    for each in (kernels, portable):
        assert (each.narrow_linear(tiny, pack(torch.ones(16, 64).bfloat16(), LANES), None) == 0).all()


def test_denormal_numbers_count_as_zeros_everywhere(kernels: Kernels, portable: Kernels) -> None:
    """As numbers that are read, and as results."""
    tiny, root = torch.full((64,), 1e-39).bfloat16(), torch.full((1, 64), 2.0**-63).bfloat16()
    weight, x, least = (torch.eye(64) * 2.0**-63).bfloat16(), draw(1, 64), torch.full((1, 64), 2.0**-126)
    page, scale = torch.full((2, 1, 1, 64), 100, dtype=torch.int8), torch.full((2, 1, 1, 1), 1e-41)
    rotary = torch.full((1, 1, 1, 32), 1e-39, dtype=torch.complex64)
    for each in (kernels, portable):
        normed, added, out = torch.empty_like(x), torch.zeros_like(x), torch.empty(2, 1, 1, 64, dtype=torch.bfloat16)
        assert torch.equal(each.linear(root, each.pack(weight), -tiny, gelu=False).float(), least)
        each.norm(x, [(0, 1)], 1e-6, tiny[None], None, normed)
        each.add_gated_(added, [(0, 1)], root, root / 2, None)
        each.read(page, scale, None, None, out)
        turned = x.clone().view(1, 1, 1, 64)
        each.normalise_and_rotate_(turned, rotary, 1e-6, torch.ones(1, 1, 64))
        assert all((result == 0).all() for result in (normed, added, out, turned))
    assert (torch.tensor([1e-39]) > 0).all(), "elsewhere they are what they were"


def test_narrow_linear(kernels: Kernels) -> None:
    x, weight, scale = draw(27, 300), draw(32, 300), torch.rand(27)
    out = kernels.narrow_linear(x, pack(weight, LANES), scale)
    assert out.dtype == torch.float32
    exact = (x.double() @ weight.double().T) * scale[:, None].double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(kernels.narrow_linear(x[3:5], pack(weight, LANES), scale[3:5]), out[3:5])


def attend(kernels: Kernels, query: Tensor, key_value: Tensor) -> Tensor:
    """Written to a part of a wider matrix, of which nothing else changes."""
    wide = torch.full((len(query), query[0].numel() + 8), 7.0, dtype=torch.bfloat16)
    kernels.attend(query, key_value, wide[:, 8:])
    assert (wide[:, :8] == 7.0).all()
    return wide[:, 8:]


def exact_attention(query: Tensor, key_value: Tensor) -> Tensor:
    scores = query.double().transpose(0, 1) @ key_value[0].double().transpose(1, 2) / query.shape[2] ** 0.5
    attended: Tensor = (scores.softmax(-1) @ key_value[1].double()).transpose(0, 1).flatten(1)
    return attended


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys"), [(1, 16), (50, 280), (70, 17), (49, 193), (130, 384), (20, 209)])
def test_attend(kernels: Kernels, untiled: Kernels, portable: Kernels, queries: int, keys: int, head_dim: int) -> None:
    """Selected queries have the same bits as among all."""
    query, key_value = draw(queries, 3, 3, head_dim)[:, 0] * 3, draw(2, 3, keys, head_dim)
    exact = exact_attention(query, key_value)
    for each in (kernels, untiled):
        out = attend(each, query, key_value)
        torch.testing.assert_close(out.double(), exact, rtol=2 * CLOSE, atol=5e-3)
        for count in (1, 2, 17, 33, 48, 64):
            chosen = torch.randperm(queries)[:count]
            assert torch.equal(attend(each, query[chosen], key_value), out[chosen])
    assert same_bits(attend(portable, query, key_value), attend(untiled, query, key_value))


@pytest.mark.parametrize("head_dim", [1, 16, 40, 63, 72, 96, 160])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (17, 31), (50, 257), (33, 545)])
def test_attend_with_tiles(kernels: Kernels, queries: int, keys: int, head_dim: int) -> None:
    """Heads of any width, and any number of keys, of which those that fill up a tile have no weight."""
    if not kernels.has_tiles:
        pytest.skip("no AMX")
    query, key_value = draw(queries, 3, 2, head_dim)[:, 1] * 3, draw(2, 2, keys, head_dim) + 3
    assert kernels.can_attend(query, keys)
    out = attend(kernels, query, key_value)
    torch.testing.assert_close(out.double(), exact_attention(query, key_value), rtol=2 * CLOSE, atol=5e-3)
    for chosen in (torch.randperm(queries)[:16], torch.arange(queries).flip(0)):
        assert same_bits(attend(kernels, query[chosen], key_value), out[chosen])


@pytest.mark.parametrize("place", [3, 250, 299])
@pytest.mark.parametrize("size", [100.0, 1000.0])
def test_attend_survives_large_scores(kernels: Kernels, untiled: Kernels, place: int, size: float) -> None:
    """In the first tile of keys, or in a later one, after which nothing is left of those before."""
    key_value = torch.ones(2, 1, 300, 64, dtype=torch.bfloat16)
    key_value[0, 0, place], key_value[1, 0, place] = size, 5.0
    for each in (kernels, untiled):
        query = torch.full((2, 1, 64), size, dtype=torch.bfloat16)
        assert (attend(each, query, key_value) == 5.0).all()
        assert (attend(each, -query, key_value)[:, :64] == 1.0).all()


def test_attention_to_denormal_numbers(kernels: Kernels, untiled: Kernels) -> None:
    """They count as zeros: as queries and keys, after which all keys weigh alike, and as values."""
    tiny = torch.full((2, 1, 40, 64), 1e-39).bfloat16()
    values = torch.cat([tiny[:1] * 0 + 100, draw(1, 1, 40, 64)])
    for each in (kernels, untiled):
        assert (attend(each, draw(3, 1, 64), tiny) == 0).all()
        mean = values[1, 0].double().mean(0).expand(3, 64)
        out = attend(each, tiny[0].transpose(0, 1)[:3], values)
        torch.testing.assert_close(out.double(), mean, rtol=CLOSE, atol=1e-5)


@pytest.mark.parametrize(("tokens", "kinds", "head_dim"), [(1, 1, 16), (9, 2, 64), (50, 2, 128)])
def test_normalise_and_rotate(kernels: Kernels, portable: Kernels, tokens: int, kinds: int, head_dim: int) -> None:
    """Rounded once; numbers beside queries and keys are unchanged."""
    qkv, weight = draw(tokens, 3, 3, head_dim), torch.randn(kinds, 3, head_dim)
    rotary = torch.polar(torch.ones(tokens, 1, 1, head_dim // 2), torch.randn(tokens, 1, 1, head_dim // 2))
    expected, other = qkv[:, :kinds].float(), qkv.clone()
    before = qkv[:, kinds:].clone()
    normalise_and_rotate_(expected, rotary, 1e-6, [([(0, tokens)], weight)])
    assert can_rotate(qkv)
    kernels.normalise_and_rotate_(qkv[:, :kinds], rotary, 1e-6, weight)
    torch.testing.assert_close(qkv[:, :kinds].float(), expected, rtol=CLOSE, atol=1e-5)
    assert torch.equal(qkv[:, kinds:], before)
    portable.normalise_and_rotate_(other[:, :kinds], rotary, 1e-6, weight)
    assert same_bits(other, qkv)


SPANS = [(0, 3), (4, 8), (8, 9)]
"""Of a matrix of 9 rows; row 3 is in none."""


@pytest.mark.parametrize("has_shift", [True, False])
@pytest.mark.parametrize("width", [48, 64])
def test_norm(kernels: Kernels, portable: Kernels, width: int, has_shift: bool) -> None:
    """A layer norm, also of numbers far from zero, and a root-mean-square norm; of each span, with its own factors."""
    x = draw(9, width) + torch.randint(-20, 20, (9, 1))
    factor, shift = draw(3, 2 * width)[:, :width], draw(3, width + 8)[:, 8:] if has_shift else None
    ours, theirs = x.new_empty(8, width), x.new_empty(8, width)
    assert can_norm(x)
    kernels.norm(x, SPANS, 1e-6, factor, shift, ours)
    portable.norm(x, SPANS, 1e-6, factor, shift, theirs)
    for number, ((start, stop), its) in enumerate(zip(SPANS, ours.split([3, 4, 1]), strict=True)):
        rows, weight = x[start:stop].double(), factor[number].double()
        if shift is None:
            exact = F.rms_norm(rows, (width,), weight, 1e-6)
        else:
            exact = F.layer_norm(rows, (width,), weight, shift[number].double(), 1e-6)
        torch.testing.assert_close(its.double(), exact, rtol=CLOSE, atol=1e-4)
    assert same_bits(theirs, ours)


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("width", [48, 64])
def test_add_gated(kernels: Kernels, portable: Kernels, width: int, eps: float | None) -> None:
    """To the rows of each span, times the span's gate; other rows keep their bits."""
    x, y, gate = draw(9, width), draw(8, width) * 5, draw(3, 2 * width)[:, width:]
    ours, theirs = x.clone(), x.clone()
    kernels.add_gated_(ours, SPANS, y, gate, eps)
    portable.add_gated_(theirs, SPANS, y, gate, eps)
    change = y.double() if eps is None else F.rms_norm(y.double(), (width,), None, eps)
    exact = x.double()
    for (start, stop), its, factor in zip(SPANS, change.split([3, 4, 1]), gate.double(), strict=True):
        exact[start:stop] += factor * its
    torch.testing.assert_close(ours.double(), exact, rtol=CLOSE, atol=1e-5)
    assert torch.equal(ours[3], x[3])
    assert same_bits(theirs, ours)


@pytest.mark.parametrize("has_far", [True, False])
@pytest.mark.parametrize("heads", [(0, 3), (1, 2)])
def test_read(kernels: Kernels, portable: Kernels, has_far: bool, heads: tuple[int, int]) -> None:
    """Pages of all heads or of some, to a part of a larger buffer, of which nothing else changes."""
    chosen = slice(*heads)
    near, far = (torch.randint(-127, 128, (2, 3, 13, 32), dtype=torch.int8)[:, chosen] for _ in range(2))
    near_scale, far_scale = (torch.rand(2, 3, 13, 1)[:, chosen] for _ in range(2))
    room = torch.full((2, heads[1] - heads[0], 17, 32), 7.0, dtype=torch.bfloat16)
    other, out = room.clone(), room[:, :, 4:]
    far_page, its_scale = (far, far_scale) if has_far else (None, None)
    assert can_read(out)
    kernels.read(near, near_scale, far_page, its_scale, out)
    exact = near_scale.double() * near.double() + (far_scale.double() * far.double() if has_far else 0)
    torch.testing.assert_close(out.double(), exact, rtol=CLOSE, atol=1e-5)
    assert (room[:, :, :4] == 7.0).all()
    portable.read(near, near_scale, far_page, its_scale, other[:, :, 4:])
    assert same_bits(other, room)


def test_pages_are_read_into_any_memory_order(kernels: Kernels) -> None:
    """Also into tensors that the kernel cannot write to."""
    layout = PageLayout(num_blocks=1, num_heads=3, head_dim=32, dtype="int8")
    near = torch.empty(layout.entry_bytes(13), dtype=torch.uint8)
    PageEntry(near, layout, 13).write(0, draw(2, 3, 13, 32))
    reader = Pages(layout, 13, near, None, 0.0).open(kernels)
    reader.read(0, expected := torch.empty(2, 3, 13, 32, dtype=torch.bfloat16))
    for order in ((0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)):
        out = torch.empty([expected.shape[n] for n in order], dtype=torch.bfloat16).permute(order)
        assert not can_read(out)
        reader.read(0, out)
        assert torch.equal(out, expected)


def test_numbers_of_several_dtypes_are_refused(kernels: Kernels) -> None:
    """Not read as if they were of one."""
    x, weight = draw(2, 64), draw(64, 64)
    for operands in ((x.float(), pack(weight), draw(64)), (x, pack(weight), torch.zeros(64))):
        with pytest.raises(TypeError, match=r"torch\.float32.*torch\.bfloat16|torch\.bfloat16.*torch\.float32"):
            kernels.linear(*operands, gelu=False)
    with pytest.raises(TypeError):
        kernels.narrow_linear(x.float(), pack(weight, LANES), None)


def test_sizes_without_products() -> None:
    assert not can_multiply(torch.bfloat16, 63, 64)
    assert not can_multiply(torch.float32, 64, 24)
    assert not can_multiply(torch.float16, 64, 64)
    assert not can_norm(draw(2, 24))
    assert not can_norm(torch.empty(2, 32))
    assert not can_read(draw(2, 1, 4, 24))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_weights_are_packed_wherever_they_begin(dtype: torch.dtype) -> None:
    """Within a file also at an odd number, where pairs have no address of their own."""
    numbers = torch.arange(64 * 64 + 1).to(dtype)
    assert pack_tiles(numbers[1:].view(64, 64)).equal(pack_tiles(numbers[1:].clone().view(64, 64)))


def test_tiles_are_used_where_there_are_some(kernels: Kernels, portable: Kernels) -> None:
    """And a digest tells, since results have other bits."""
    assert kernels.has_tiles is cpu_has_amx()
    assert kernels.digest.endswith(" tiles") is kernels.has_tiles
    assert not portable.has_tiles
    assert kernels.can_attend(draw(1, 2, 24), 5) is kernels.has_tiles
    assert not portable.can_attend(draw(1, 2, 24), 5)
    assert portable.can_attend(draw(1, 2, 64), 16)
