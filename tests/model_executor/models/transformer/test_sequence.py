"""Shares of a request's tokens."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from model_executor.models.transformer.sequence import _without


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_the_other_tokens_ascend(case: tuple[int, set[int]]) -> None:
    num_tokens, tokens = case
    others = _without(torch.tensor(sorted(tokens), dtype=torch.int64), num_tokens)
    assert others.dtype == torch.int64
    assert others.tolist() == [token for token in range(num_tokens) if token not in tokens]
