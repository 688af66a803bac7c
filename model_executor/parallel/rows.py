"""Rows over ranks: each member of a group computes some rows of a batch whole, and all get all results.

So the two rows of a request with classifier-free guidance are computed side by side, and a UNet's, which has no tokens
to share. Predictions are gathered before guidance combines them: bits are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from model_executor.kernels.ragged import Span
from model_executor.models.base import Row
from model_executor.parallel.group import Group

EVEN = 1.1
"""Rows are computed whole if no member then has more than this many times its share of the tokens: above, sharing each
request's tokens is faster, although it exchanges them in every block."""


def are_even(rows: Sequence[Row], degree: int) -> bool:
    """Whether some members can compute these rows whole in about a share of the time."""
    sizes = [num_computed(row) for row in rows]
    return max(sum(sizes[start:stop]) for start, stop in balanced(sizes, degree)) * degree <= EVEN * sum(sizes)


def predict_rows(
    rows: Sequence[Row], group: Group, predict: Callable[[Sequence[Row]], list[Tensor]], dtype: torch.dtype
) -> list[Tensor]:
    """The prediction for every row, [active tokens, latent width], on every member. predict: of one's own rows; dtype:
    of what it returns. Raises GroupBrokenError if the group is broken.
    """
    sizes, width = [num_computed(row) for row in rows], rows[0].latents.shape[1]
    spans = balanced(sizes, group.degree)
    own = predict(rows[slice(*spans[group.me])]) if spans[group.me][0] < spans[group.me][1] else []
    mine = torch.cat([rows[0].latents.new_empty(0, width, dtype=dtype), *own])
    return list(group.gather(mine, [sum(sizes[start:stop]) for start, stop in spans]).split(sizes))


def num_computed(row: Row) -> int:
    """Image tokens that a prediction has."""
    return len(row.latents) if row.active is None else len(row.active)


def balanced(sizes: Sequence[int], degree: int) -> list[Span]:
    """Consecutive spans of things of these sizes for `degree` members, each with about the same total."""
    ends = [0, *accumulate(sizes)]
    cuts = [
        min(range(len(ends)), key=lambda cut: abs(ends[cut] * degree - ends[-1] * member)) for member in range(degree)
    ]
    return list(zip(cuts, [*cuts[1:], len(sizes)], strict=True))
