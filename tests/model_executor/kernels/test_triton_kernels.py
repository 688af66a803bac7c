"""The GPU kernels against plain references: interpreted on a CPU; on a GPU compiled, with `TRITON_INTERPRET=0`.

A value that is rounded once is within half a unit in the last place of the exact result; the tolerance is one unit:
2^-7 for bfloat16, 2^-10 for float16. For float32 it is 1e-5, since sums have another order.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.page_scheme import PageDtype, PageLayout
from model_executor.kernels.attention import KeysValues, Projected, head_major, normalise_and_rotate_
from model_executor.kernels.gpu_attention import Attend, attend_alike, attend_each
from model_executor.kernels.gpu_operators import GpuOperators, TritonOperators
from model_executor.kernels.operators import Operators
from model_executor.kernels.ragged import Packing, Span
from model_executor.kernels.residual import Addition, Norm
from model_executor.page_cache.pages import PageEntry, Pages, quantise

pytest.importorskip("triton")  # interpreted: see conftest.py

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
EPS = 1e-6
HEADS, TEXT = 3, 5


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    """The device of the tests' tensors."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from model_executor.kernels import triton_kernels

    return triton_kernels


@pytest.fixture(scope="module")
def operators(kernels: ModuleType) -> Operators:
    return TritonOperators(kernels)


def test_kernels_compile_for_a_gpu(tmp_path: Path, kernels: ModuleType) -> None:
    """For an H200, without one: the compiler may refuse what the interpreter accepts."""
    program = Path(__file__).with_name("compile_kernels.py")
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program), "90"], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    assert compiled == {name for name, kernel in vars(kernels).items() if is_launched(name, kernel)}


def is_launched(name: str, kernel: object) -> bool:
    """Whether it is a kernel, not a function of kernels or of Triton's."""
    return hasattr(kernel, "arg_names") and name[0] != "_" and name not in {"interpolated", "first_not_below"}


def assert_near(actual: Tensor, exact: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), exact.double(), rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------------------- norm and gates


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 64, 200])
def test_norm_and_modulation(operators: Operators, dtype: torch.dtype, width: int) -> None:
    """Of selected rows, by one norm or two; factors and shifts lie in wider tables, one request has a single row."""
    x, table = torch.randn(20, width).to(dtype), torch.randn(3, 5 * width).to(dtype)
    where, (shift, factor, *others) = ((2, 5), (5, 6), (9, 20)), table.chunk(5, dim=1)
    norms = [Norm(where, factor, shift), Norm(((0, 1), (6, 7), (7, 8)), *others[:2])]
    for number in (1, 2):
        outputs = operators.residual(x).normed(EPS, *norms[:number])
        for out, norm in zip(outputs, norms[:number], strict=True):
            assert out.dtype == dtype
            assert_near(out, exactly_normed(x.double(), norm))


def exactly_normed(x: Tensor, norm: Norm) -> Tensor:
    parts = zip(norm.where, norm.factor.double(), norm.shift.double(), strict=True)
    return torch.cat(
        [F.layer_norm(x[start:stop], x.shape[1:], eps=EPS) * factor + shift for (start, stop), factor, shift in parts]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1500])
def test_gated_sum(operators: Operators, dtype: torch.dtype, width: int) -> None:
    """In place; other rows and the added tensor are unchanged."""
    x, y, gate = torch.randn(20, width).to(dtype), torch.randn(6, width).to(dtype), torch.randn(2, 2 * width).to(dtype)
    where, before, added = ((1, 2), (9, 14)), x.clone(), y.clone()
    residual = operators.residual(x)
    residual.add(Addition(where, y, gate[:, width:]))
    assert residual.hidden is x
    assert torch.equal(y, added)
    rest = torch.tensor([row for row in range(20) if row != 1 and not 9 <= row < 14])
    assert torch.equal(x[rest], before[rest])
    for (start, stop), part, factor in zip(where, y.split([1, 5]), gate[:, width:], strict=True):
        assert_near(x[start:stop], before[start:stop].double() + factor.double() * part.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_with_the_norm_that_follows(operators: Operators, dtype: torch.dtype) -> None:
    """With the bits of one after the other: by two layers, by one, and of rows that are not all normed."""
    width, text, image = 48, ((0, 2), (5, 6)), ((2, 5), (6, 9))
    x, (y, z) = torch.randn(9, width).to(dtype), torch.randn(2, 9, width).to(dtype)
    parts = torch.randn(2, 6 * width).to(dtype).chunk(6, dim=1)
    both = [Addition(text, y[:3], parts[0]), Addition(image, z[:6], parts[1])]
    norms = [Norm(text, *parts[2:4]), Norm(image, *parts[4:])]
    joint = Addition(((0, 5), (5, 9)), y, parts[0])
    for additions, following in ((both, norms), ([joint], norms), (both, norms[1:]), ([joint], norms[1:])):
        together, apart = (operators.residual(x.clone()) for _ in range(2))
        together.add(*additions)
        apart.add(*additions)
        assert apart.hidden is not None  # nothing is left for the norm to add
        for one, other in zip(together.normed(EPS, *following), apart.normed(EPS, *following), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(together.hidden, apart.hidden)
        assert not torch.equal(together.hidden, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 200])
def test_root_mean_square_norms(operators: Operators, dtype: torch.dtype, width: int) -> None:
    """Of the state and of what is added, at once and one after the other with the same bits."""
    x, y = torch.randn(2, 11, width).to(dtype)
    where, rest = ((0, 2), (5, 9)), ((2, 5), (9, 11))
    gate, factor = torch.randn(2, 3 * width).to(dtype).chunk(3, dim=1)[:2]
    joint = Addition(((0, 5), (5, 11)), y, gate, norm_eps=1e-3)
    together, apart = (operators.residual(x.clone()) for _ in range(2))
    together.add(joint)
    apart.add(joint)
    assert apart.hidden is not None  # nothing is left for the norm to add
    exact = x.double()
    for (start, stop), its in zip(joint.where, gate.double(), strict=True):
        exact[start:stop] += its * F.rms_norm(y[start:stop].double(), [width], eps=1e-3)
    norms = [Norm(where, factor, None), Norm(rest, factor, None)]
    outputs = together.normed(EPS, *norms)
    assert all(map(torch.equal, outputs, apart.normed(EPS, *norms)))
    assert torch.equal(together.hidden, apart.hidden)
    assert_near(together.hidden, exact)
    for out, norm in zip(outputs, norms, strict=True):
        parts = [together.hidden[start:stop].double() for start, stop in norm.where]
        normed = [F.rms_norm(part, [width], eps=EPS) * its for part, its in zip(parts, factor.double(), strict=True)]
        assert_near(out, torch.cat(normed))


def test_sums_are_clipped_where_that_is_asked_for(operators: Operators) -> None:
    """To the range of float16, by themselves and with a norm."""
    where, large = ((0, 3),), torch.full([3, 48], 6e4, dtype=torch.float16)
    gate, norm = torch.ones(1, 48, dtype=torch.float16), Norm(where, *torch.ones(2, 1, 48, dtype=torch.float16))
    for is_clipped, has_norm in product((False, True), (False, True)):
        residual = operators.residual(large.clone())
        residual.add(Addition(where, large, gate, is_clipped))
        with np.errstate(over="ignore", invalid="ignore"):  # a GPU overflows in silence
            if has_norm:
                residual.normed(EPS, norm)
            hidden = residual.hidden
        assert (hidden == (65504.0 if is_clipped else float("inf"))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1500])
def test_swiglu(operators: Operators, dtype: torch.dtype, width: int) -> None:
    """Of columns of a wider matrix, to a new one and to columns of another."""
    x, wide = torch.randn(5, 2 * width + 8).to(dtype)[:, 8:], torch.full((5, width + 8), 7.0, dtype=dtype)
    exact = F.silu(x[:, :width].double()) * x[:, width:].double()
    assert_near(operators.swiglu(x), exact)
    assert_near(operators.swiglu(x, out=wide[:, 8:]), exact)
    assert_near(wide[:, 8:], exact)
    assert (wide[:, :8] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (2, 128), (24, 16), (1, 48)])
def test_norm_and_rotation(operators: Operators, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Queries and keys in place, with two sets of weights; values are unchanged. Heads of 48 numbers are left to
    PyTorch, which rounds them in between.
    """
    qkv, weights = torch.randn(11, 3, heads, head_dim).to(dtype), torch.randn(2, 2, heads, head_dim)
    rotary = torch.polar(torch.ones(11, 1, 1, head_dim // 2), torch.randn(11, 1, 1, head_dim // 2))
    where = [(((0, 2), (5, 8)), weights[0]), (((2, 5), (8, 11)), weights[1])]
    before, expected = qkv.clone(), qkv.double()
    operators.normalise_and_rotate_(qkv[:, :2], rotary, EPS, where)
    for rows, weight in where:
        for start, stop in rows:
            normed = F.rms_norm(expected[start:stop, :2], [head_dim], eps=EPS) * weight
            pairs = torch.view_as_complex(normed.unflatten(-1, (-1, 2))) * rotary[start:stop]
            expected[start:stop, :2] = torch.view_as_real(pairs).flatten(-2)
    tolerance = 4 * TOLERANCE[dtype] if head_dim == 48 else TOLERANCE[dtype]
    torch.testing.assert_close(qkv.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(qkv[:, 2], before[:, 2])


def test_keys_without_queries_are_normed_by_their_own_weights(operators: Operators) -> None:
    """As in the last block of a template."""
    qkv, weight = torch.randn(5, 3, 2, 16), torch.randn(2, 2, 16)
    rotary = torch.polar(torch.ones(5, 1, 1, 8), torch.randn(5, 1, 1, 8))
    expected = qkv.clone()
    normalise_and_rotate_(expected[:, 1:2], rotary, EPS, [([(0, 5)], weight[1:])])
    operators.normalise_and_rotate_(qkv[:, 1:2], rotary, EPS, [([(0, 5)], weight[1:])])
    torch.testing.assert_close(qkv, expected, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------------------- attention's inputs


@dataclass(frozen=True)
class Request:
    """Reads these pages, with three tokens of its own."""

    pages: Pages
    active: Tensor
    is_in_order: ClassVar[bool] = True

    def computed(self, number: int) -> Tensor:
        return self.active

    def load(self, number: int, page: int, keys_values: KeysValues, fresh: Tensor) -> None:
        rows = self.active + keys_values.text_tokens
        rows = torch.cat([torch.arange(keys_values.text_tokens), rows])
        self.pages.open().read_over(page, keys_values, fresh, rows)

    def store(self, page: int, image: Tensor) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize(
    ("attend", "dtype", "head_dim", "has_norm"),
    [
        (attend_alike, torch.float32, 64, True),
        (attend_each, torch.bfloat16, 128, True),
        (attend_each, torch.float16, 24, False),
        (attend_alike, torch.float32, 48, True),
    ],
)
def test_attention_over_projections(
    kernels: ModuleType, attend: Attend, dtype: torch.dtype, head_dim: int, has_norm: bool
) -> None:
    """Of two kinds of token, of one, and of the image alone; heads of 48 numbers with a norm are left to PyTorch."""
    ours, theirs = TritonOperators(kernels).attending(attend), GpuOperators().attending(attend_each)
    layout, tokens = PageLayout(num_blocks=2, num_heads=HEADS, head_dim=head_dim, dtype="int8"), 40
    entries = [entry(layout, tokens, seed) for seed in range(3)]
    actives = [torch.tensor([0, 7, 39]), torch.arange(1, 39, 2)]
    sources = [Request(Pages(layout, tokens, *entries[n : n + 2], 0.3), active) for n, active in enumerate(actives)]
    lengths = [len(active) for active in actives]
    packing = Packing.of([TEXT, 2], lengths)
    rotary = torch.polar(torch.ones(sum(lengths) + TEXT + 2, 1, 1, head_dim // 2), torch.rand(head_dim // 2))
    rotary = rotary * torch.polar(torch.ones(len(rotary)), torch.arange(len(rotary)).float())[:, None, None, None]

    def part(where: Sequence[Span]) -> Projected:
        rows = sum(stop - start for start, stop in where)
        weight = torch.rand(2, HEADS, head_dim) if has_norm else None
        return Projected(torch.randn(rows, 3, HEADS, head_dim).to(dtype), where, weight, EPS)

    for texts, parts in (
        ((TEXT, 2), [part(packing.joint_text), part(packing.joint_image)]),
        ((TEXT, 2), [part(packing.joint)]),
        ((0, 0), [part(packing.joint_image)]),
    ):
        sizes = [(text, tokens) for text in texts]
        results = []
        for operators in (ours, theirs):
            attention = operators.attention(sizes, HEADS, head_dim, torch.empty(0, dtype=dtype))
            copies = [each._replace(qkv=each.qkv.clone()) for each in parts]
            results.append(operators.attend(attention, 0, 1, copies, rotary, sources))
        for one, other, each in zip(*results, parts, strict=True):
            assert len(one) == len(each.qkv)
            tolerance = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# -------------------------------------------------------------------------------------------------------------- pages


def entry(layout: PageLayout, tokens: int, seed: int) -> Tensor:
    """Random pages of two blocks."""
    memory = torch.zeros(layout.entry_bytes(tokens), dtype=torch.uint8)
    torch.manual_seed(seed)
    for block in range(layout.num_blocks):
        PageEntry(memory, layout, tokens).write(block, torch.randn(2, HEADS, tokens, layout.head_dim))
    return memory


def token_major(tokens: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[2, heads, tokens, head dim], with each token's numbers contiguous in memory."""
    return head_major(torch.full([tokens, 2, HEADS, head_dim], 7.0, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "page_dtype", "tokens", "head_dim"),
    [
        (torch.float32, "int8", 1, 64),
        (torch.float32, "int8", 70, 64),
        (torch.bfloat16, "int8", 33, 128),
        (torch.float16, "int8", 13, 24),
        (torch.bfloat16, "bfloat16", 33, 128),
        (torch.float32, "bfloat16", 13, 24),
        (torch.float32, "float32", 70, 64),
        (torch.float16, "float32", 1, 24),
    ],
)
def test_pages_are_read(
    operators: Operators, dtype: torch.dtype, page_dtype: PageDtype, tokens: int, head_dim: int
) -> None:
    """At a keyframe and between two, with and without computed tokens, in either memory order."""
    layout = PageLayout(num_blocks=2, num_heads=HEADS, head_dim=head_dim, dtype=page_dtype)
    near, far = entry(layout, tokens, 1), entry(layout, tokens, 2)
    active = torch.arange(0, tokens, 3)
    rows = torch.cat([torch.arange(TEXT), active + TEXT])
    fresh = torch.randn(len(rows), 3, HEADS, head_dim).to(dtype)[:, 1:]
    for pages in (Pages(layout, tokens, near, None, 0.0), Pages(layout, tokens, near, far, 0.3)):
        exact = torch.empty(2, HEADS, tokens, head_dim)
        pages.open().read(1, exact)
        whole = torch.full([2, HEADS, TEXT + tokens, head_dim], 7.0, dtype=dtype)
        operators.open(pages).read(1, whole[:, :, TEXT:])
        assert_near(whole[:, :, TEXT:], exact)
        assert (whole[:, :, :TEXT] == 7.0).all()
        reader, keys_values = operators.open(pages), KeysValues(token_major(TEXT + tokens, head_dim, dtype), TEXT)
        for block in (0, 1):
            reader.read_over(block, keys_values, fresh, rows)
        assert torch.equal(keys_values.joint[:, :, rows], head_major(fresh))
        exact[:, :, active] = head_major(fresh).float()[:, :, TEXT:]
        assert_near(keys_values.image, exact)


def test_pages_are_read_without_text_tokens(operators: Operators) -> None:
    layout = PageLayout(num_blocks=1, num_heads=HEADS, head_dim=64, dtype="int8")
    pages, active = Pages(layout, 9, entry(layout, 9, 1), None, 0.0), torch.tensor([0, 4, 8])
    expected, ours = (KeysValues(token_major(9, 64, torch.float32), 0) for _ in range(2))
    fresh = torch.randn(3, 2, HEADS, 64)
    pages.open().read_over(0, expected, fresh, active)
    operators.open(pages).read_over(0, ours, fresh, active)
    torch.testing.assert_close(ours.joint, expected.joint, rtol=1e-5, atol=1e-5)


def test_a_block_is_waited_for_before_it_is_read(operators: Operators) -> None:
    layout, asked = PageLayout(num_blocks=2, num_heads=HEADS, head_dim=64, dtype="int8"), list[int]()
    pages = Pages(layout, 9, entry(layout, 9, 1), None, 0.0, asked.append)
    reader = operators.open(pages)
    assert asked == []
    reader.read(1, torch.empty(2, HEADS, 9, 64))
    assert asked == [1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 64), (70, 64), (33, 128), (13, 24)])
def test_pages_are_written(operators: Operators, dtype: torch.dtype, tokens: int, head_dim: int) -> None:
    """With the bits of PyTorch's operators, except for a division that may differ in the last bit."""
    x = head_major(torch.randn(tokens, 3, HEADS, head_dim).to(dtype)[:, 1:])
    x[0, 0, 0] = 0.0
    values, expected = (torch.full(x.shape, 99, dtype=torch.int8) for _ in range(2))
    scales, expected_scales = (torch.full([*x.shape[:3], 1], 9.0) for _ in range(2))
    operators.quantise(x, values, scales)
    quantise(x, expected, expected_scales)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    assert (values.int() - expected.int()).abs().max() <= 1
    assert (values == expected).float().mean() > 0.999
    assert (values[0, 0, 0] == 0).all()


def test_a_share_of_the_heads_is_written_and_read(operators: Operators) -> None:
    """As ranks do that compute a step together."""
    layout = PageLayout(num_blocks=2, num_heads=HEADS, head_dim=64, dtype="int8")
    whole, mine = entry(layout, 9, 1), entry(layout, 9, 1)
    x = torch.randn(2, 2, 9, 64)
    for memory, quantised_by in ((whole, quantise), (mine, operators.quantise)):
        PageEntry(memory, layout, 9, quantised_by).of_heads((1, 3)).write(1, x)
    assert torch.equal(mine, whole)
    pages = Pages(layout, 9, mine, None, 0.0, heads=(1, 3))
    ours, expected = (torch.empty(2, 2, 9, 64) for _ in range(2))
    operators.open(pages).read(1, ours)
    pages.open().read(1, expected)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(ours, x, rtol=0.02, atol=0.02)


def test_rows_without_a_scale_are_zeros(operators: Operators) -> None:
    x = torch.zeros(2, 1, 2, 64)
    x[0, 0, 0, 3], x[0, 0, 1, 3], x[1, 0, 0, 3] = 1e-44, float("inf"), 127.0
    values, scales = torch.full(x.shape, 99, dtype=torch.int8), torch.empty(2, 1, 2, 1)
    operators.quantise(x, values, scales)
    expected = torch.zeros(2, 1, 2, 64, dtype=torch.int8)
    expected[1, 0, 0, 3] = 127
    assert torch.equal(values, expected)
