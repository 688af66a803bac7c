"""Rows of a pass whose heads ranks share, and what must be computed before those that read pages of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from model_executor.kernels.ragged import Span
from model_executor.models.base import Row
from model_executor.parallel.group import Group


def with_heads(row: Row, heads: Span) -> Row:
    """A row that reads these heads of its pages only."""
    return row if row.pages is None else replace(row, pages=replace(row.pages, heads=heads))


def with_own_heads(row: Row, heads: Span | None) -> Row:
    """A row whose own pages, if it has any, are of these heads only; None: of all."""
    return row if row.own is None else replace(row, own=row.own.with_heads(heads))


def with_text(row: Row, text: slice) -> Row:
    """A row with these of its text tokens only."""
    state = None if row.prompt_state is None else row.prompt_state[text]
    return replace(row, prompt_embeds=row.prompt_embeds[text], prompt_state=state)


def lacking_pages(rows: Sequence[Row], group: Group | None) -> list[Row]:
    """For those of these rows that read their own pages, which this rank or another one of the group lacks, the row of
    the step that makes them."""
    readers = [(row, row.own) for row in rows if row.own is not None and row.active is not None]
    missing = torch.tensor([not own.are_there for _, own in readers])
    if group is not None and readers:
        missing = group.gather(missing[None].float(), [1] * group.degree).any(dim=0)
    return [
        replace(
            row,
            latents=own.latents,
            sigma=own.sigma,
            modulation=own.modulation,
            active=None,
            box=None,
            pages=None,
        )
        for (row, own), is_missing in zip(readers, missing.tolist(), strict=True)
        if is_missing
    ]
