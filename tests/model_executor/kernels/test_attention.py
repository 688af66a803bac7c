"""Attention against softmax in float64, for any number of queries and keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_executor.kernels import attention
from model_executor.kernels.attention import KeysValues, OneByOne, attend
from model_executor.kernels.linear import fused_linear, plain_linear
from model_executor.kernels.operators import Operators

HEADS, HEAD_DIM, TEXT = 3, 16, 5


def keys_values(image_tokens: int, dtype: torch.dtype = torch.float32) -> KeysValues:
    """Filled keys and values, in larger tensors."""
    tokens = TEXT + image_tokens
    room = torch.full([2 * HEADS * 100 * HEAD_DIM], 7.0, dtype=dtype)
    holder = KeysValues(room[: 2 * HEADS * tokens * HEAD_DIM].view(2, HEADS, tokens, HEAD_DIM), TEXT)
    holder.put(torch.randn(TEXT + image_tokens, 2, HEADS, HEAD_DIM).to(dtype), None)
    return holder


def attended(query: Tensor, holder: KeysValues) -> Tensor:
    out = query.new_empty(len(query), query[0].numel())
    attend(query, holder, out, fused_linear)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "image_tokens"), [(1, 1), (7, 40), (45, 40), (3, 95)])
def test_matches_softmax_in_float64(dtype: torch.dtype, queries: int, image_tokens: int) -> None:
    holder = keys_values(image_tokens, dtype)
    query = torch.randn(queries, HEADS, HEAD_DIM).to(dtype)
    keys, values = holder.joint.double()
    weights = (query.double().transpose(0, 1) @ keys.transpose(1, 2) / HEAD_DIM**0.5).softmax(-1)
    expected = (weights @ values).transpose(0, 1).flatten(1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for linear in (fused_linear, plain_linear):
        out = torch.empty(len(query), query[0].numel(), dtype=query.dtype)
        attend(query, holder, out, linear)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_few_queries_get_the_same_bits_as_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the many queries are processed in several parts."""
    holder, query = keys_values(60), torch.randn(33, HEADS, HEAD_DIM)
    together = attended(query, holder)
    for rows in ([0], [31, 32], list(range(1, 33, 3))):
        assert torch.equal(attended(query[rows], holder), together[rows])
    monkeypatch.setattr(attention, "SCORE_BYTES", 65 * 4 * 8)
    assert torch.equal(attended(query, holder), together)


def test_put_replaces_only_the_computed_rows() -> None:
    holder = keys_values(9)
    before = holder.joint.clone()
    rows = torch.tensor([0, 1, 2, 3, 4, 7, 12])
    fresh = torch.randn(len(rows), 2, HEADS, HEAD_DIM)
    holder.put(fresh, rows)
    rest = torch.tensor([row for row in range(TEXT + 9) if row not in rows])
    assert torch.equal(holder.joint[:, :, rest], before[:, :, rest])
    assert torch.equal(holder.joint[:, :, rows], fresh.permute(1, 2, 0, 3))
    assert torch.equal(holder.image, holder.joint[:, :, TEXT:])


def test_a_second_attention_reuses_the_firsts_memory() -> None:
    """Both together use no more memory than the first, and the second has the same result as with memory of its own."""
    operators, like = Operators(plain_linear), torch.empty(0)
    sizes, alone, where = [(TEXT, 7), (TEXT, 4)], [(0, 7), (0, 4)], ((0, 7), (7, 11))
    first = operators.attention(sizes, HEADS, HEAD_DIM, like)
    second, own = (operators.attention(alone, HEADS, HEAD_DIM, like, beside) for beside in (first, None))
    assert isinstance(first, OneByOne)
    assert isinstance(second, OneByOne)
    assert second.room is first.room
    qkv = torch.randn(11, 3, HEADS, HEAD_DIM)
    outputs = [each(0, 0, qkv, where, [Computed()] * 2) for each in (second, own)]
    assert torch.equal(*outputs)


class Computed:
    """A request that computes all of its tokens."""

    def load(self, number: int, page: int, keys_values: KeysValues, fresh: Tensor) -> None:
        keys_values.put(fresh, None)

    def store(self, page: int, image: Tensor) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize(("queries", "parts"), [(1, [1]), (166, [166]), (235, [118, 117]), (470, [157, 157, 156])])
def test_queries_are_attended_in_parts_that_are_alike(
    monkeypatch: pytest.MonkeyPatch, queries: int, parts: list[int]
) -> None:
    """About 155 at a time: a small last part would rearrange all keys for little."""
    seen: list[int] = []

    def attend_part(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append(len(query))
        return query

    monkeypatch.setattr(attention, "_attend_part", attend_part)
    query = torch.randn(queries, 4)
    assert torch.equal(attention._attend_head(query, query, query.T, 155), query)
    assert seen == parts
