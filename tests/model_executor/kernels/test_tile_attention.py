"""Attention with AMX's tiles against the same kernel on keys and values copied together; skipped without AMX."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from core.page_scheme import PageDtype, PageLayout
from model_executor.kernels.attention import Attention, KeysValues, OneByOne, head_major
from model_executor.kernels.cpu_kernels import Kernels, best_kernels
from model_executor.kernels.linear import fused_linear
from model_executor.kernels.operators import Operators, best_operators
from model_executor.kernels.ragged import spans
from model_executor.kernels.tile_attention import PlacedKeysValues
from model_executor.page_cache.pages import PageEntry, Pages, Reader

HEADS, HEAD_DIM, TEXT, BLOCK = 3, 40, 5, 1


@pytest.fixture
def kernels() -> Kernels:
    found = best_kernels()
    if found is None or not found.has_tiles:
        pytest.skip("no AMX on this machine")
    return found


def draw(*size: int) -> Tensor:
    return torch.randn(size).to(torch.bfloat16)


@dataclass
class Source:
    """A request: text and these image tokens are computed, the others are on pages. None: all are computed."""

    image_tokens: int
    active: Tensor | None
    reader: Reader | None = None
    order: Tensor | None = None  # of all tokens, if they are computed in another one
    stored: list[Tensor] = field(default_factory=list)
    is_in_order: bool = True

    def __post_init__(self) -> None:
        self.rows = self.order
        if self.active is not None:
            self.rows = torch.cat([torch.arange(TEXT), self.active + TEXT])
        computed = self.image_tokens if self.active is None else len(self.active)
        self.qkv = draw(TEXT + computed, 3, HEADS, HEAD_DIM)

    def computed(self, number: int) -> Tensor | None:
        return self.active

    def load(self, number: int, page: int, keys_values: KeysValues, fresh: Tensor) -> None:
        if self.reader is None or self.rows is None:
            keys_values.put(fresh, self.rows)
        else:
            self.reader.read_over(page, keys_values, fresh, self.rows)

    def store(self, page: int, image: Tensor) -> None:
        self.stored.append(image.clone())

    @property
    def keys_values(self) -> KeysValues:
        """What it attends to, copied together."""
        tokens = TEXT + self.image_tokens
        joined = KeysValues(torch.empty(2, HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16), TEXT)
        self.load(BLOCK, BLOCK, joined, self.qkv[:, 1:])
        return joined


def reader_of(
    image_tokens: int, weight: float, dtype: PageDtype = "int8", heads: tuple[int, int] | None = None
) -> Reader:
    layout = PageLayout(num_blocks=2, num_heads=HEADS, head_dim=HEAD_DIM, dtype=dtype)
    entries = [torch.empty(layout.entry_bytes(image_tokens), dtype=torch.uint8) for _ in range(2)]
    for entry in entries:
        for block in range(2):
            PageEntry(entry, layout, image_tokens).write(block, draw(2, HEADS, image_tokens, HEAD_DIM))
    far = entries[1] if weight else None
    return best_operators(torch.device("cpu")).open(Pages(layout, image_tokens, entries[0], far, weight, heads=heads))


def masked(image_tokens: int, active: int, weight: float = 0.3, dtype: PageDtype = "int8") -> Source:
    chosen = torch.randperm(image_tokens)[:active].sort().values
    return Source(image_tokens, chosen, reader_of(image_tokens, weight, dtype))


def tiled(image_tokens: list[int], heads: int, kernels: Kernels) -> Attention:
    sizes = [(TEXT, number) for number in image_tokens]
    return Operators(fused_linear, kernels).attention(sizes, heads, HEAD_DIM, draw(1))


def attended(kernels: Kernels, sources: list[Source]) -> list[Tensor]:
    qkv = torch.cat([source.qkv for source in sources])
    where = spans(len(source.qkv) for source in sources)
    attention = tiled([source.image_tokens for source in sources], HEADS, kernels)
    out = attention(BLOCK, BLOCK, qkv, where, sources)
    return [out[start:stop] for start, stop in where]


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.int16), y.view(torch.int16))


@pytest.mark.parametrize("image_tokens", [1, 12, 100, 300])
@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_keys_and_values_of_pages(kernels: Kernels, image_tokens: int, weight: float, dtype: PageDtype) -> None:
    """Dequantised to the same bits as by the kernel that reads pages alone."""
    source = masked(image_tokens, (image_tokens + 2) // 3, weight, dtype)
    expected = torch.empty(len(source.qkv), HEADS * HEAD_DIM, dtype=torch.bfloat16)
    kernels.attend(source.qkv[:, 0], source.keys_values.joint, expected)
    (out,) = attended(kernels, [source])
    assert same_bits(out, expected)


@pytest.mark.parametrize("order", [None, torch.randperm(TEXT + 50)])
def test_all_tokens_are_computed(kernels: Kernels, order: Tensor | None) -> None:
    """Keys and values are read where they are, and stored in the order of the tokens."""
    source = Source(50, None, order=order)
    joined = source.keys_values
    expected = torch.empty(len(source.qkv), HEADS * HEAD_DIM, dtype=torch.bfloat16)
    kernels.attend(source.qkv[:, 0], joined.joint, expected)
    (out,) = attended(kernels, [source])
    assert same_bits(out, expected)
    (image,) = source.stored
    assert torch.equal(image, joined.image)
    if order is None:
        assert torch.equal(image, head_major(source.qkv[TEXT:, 1:]))


def test_a_request_has_the_same_bits_in_any_company(kernels: Kernels) -> None:
    sources = [
        masked(300, 20),
        Source(37, None),
        masked(90, 1),
        masked(64, 64, 0.0),
        masked(41, 40, 0.7),
        Source(1, None),
    ]
    sources += [masked(200, 33, dtype="bfloat16"), masked(33, 2)]
    alone = [attended(kernels, [source])[0] for source in sources]
    for number in range(2, len(sources) + 1):
        for first in (0, len(sources) - number):
            together = attended(kernels, sources[first : first + number])
            assert all(map(same_bits, together, alone[first:]))
    assert all(map(same_bits, reversed(attended(kernels, sources[::-1])), alone))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_a_head_has_the_same_bits_on_any_rank(kernels: Kernels, dtype: PageDtype) -> None:
    """Ranks attend to some of the heads each, and read these from pages."""
    torch.manual_seed(0)
    whole = masked(70, 9, dtype=dtype)
    torch.manual_seed(0)
    chosen = torch.randperm(70)[:9].sort().values
    (expected,) = attended(kernels, [whole])
    for first, last in ((0, 1), (1, 3)):
        torch.manual_seed(0)
        torch.randperm(70)
        part = Source(70, chosen, reader_of(70, 0.3, dtype, (first, last)))
        qkv = whole.qkv[:, :, first:last]
        out = tiled([70], last - first, kernels)(BLOCK, BLOCK, qkv, [(0, len(qkv))], [part])
        assert same_bits(out, expected.unflatten(1, (HEADS, HEAD_DIM))[:, first:last].flatten(1))


def test_the_attention_of_bfloat16_has_tiles(kernels: Kernels) -> None:
    operators = best_operators(torch.device("cpu"))
    for dtype, kind in ((torch.bfloat16, PlacedKeysValues), (torch.float32, KeysValues)):
        attention = operators.attention([(1, 2)], 1, 24, torch.empty(1, dtype=dtype))
        assert isinstance(attention, OneByOne)
        (keys_values,) = attention._keys_values
        assert type(keys_values) is kind
