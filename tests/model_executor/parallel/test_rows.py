"""Rows over ranks: every member gets all predictions, in order, whoever computed them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_groups import ThreadGroups
from torch import Tensor

from model_executor.models.base import Row
from model_executor.parallel.group import Group
from model_executor.parallel.rows import are_even, balanced, predict_rows

WIDTH = 3


def make_row(tokens: int, active: int | None = None) -> Row:
    return Row(
        latents=torch.randn(tokens, WIDTH),
        condition=torch.empty(tokens, 0),
        grid=(1, tokens),
        prompt_embeds=torch.empty(2, 4),
        pooled_prompt_embeds=torch.empty(4),
        sigma=torch.tensor(0.5),
        guidance_scale=1.0,
        active=None if active is None else torch.arange(active),
    )


def predict(rows: Sequence[Row]) -> list[Tensor]:
    return [2 * (row.latents if row.active is None else row.latents[row.active]) for row in rows]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.integers(1, 6))
def test_spans_cover_all_rows_in_order(sizes: list[int], degree: int) -> None:
    spans = balanced(sizes, degree)
    assert len(spans) == degree
    assert [number for start, stop in spans for number in range(start, stop)] == list(range(len(sizes)))


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("sizes", [[(4, None)], [(4, None), (4, None)], [(9, 2), (5, None), (3, 3), (8, 0)]])
def test_every_member_gets_all_predictions(sizes: list[tuple[int, int | None]], degree: int) -> None:
    rows = [make_row(*size) for size in sizes]
    seen: list[int] = []

    def run(group: Group) -> list[Tensor]:
        return predict_rows(rows, group, lambda some: seen.append(len(some)) or predict(some), torch.float32)

    for found in ThreadGroups(degree).run(run, range(degree)):
        assert all(map(torch.equal, found, predict(rows)))
    assert sum(seen) == len(rows), "each row is computed once"


def test_rows_are_computed_whole_where_that_is_fair() -> None:
    assert are_even([make_row(64), make_row(64)], 2)
    assert are_even([make_row(64, 20), make_row(20)], 2)
    assert not are_even([make_row(64)], 2)
    assert not are_even([make_row(64), make_row(32)], 2)
    assert not are_even([make_row(64), make_row(64)], 4)
