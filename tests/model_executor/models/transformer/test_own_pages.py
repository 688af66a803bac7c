"""A request's own pages: made by a step that computes all tokens, read by its later steps, and made again where they
are missing. For every transformer family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_denoisers import ACTIVE, CASES, Case, forward, make_row
from thread_groups import ThreadGroups
from torch import Tensor

from core.page_scheme import OWN_PAGES_DTYPE
from model_executor.kernels.gpu_operators import GpuOperators
from model_executor.models.base import Row
from model_executor.models.transformer.denoiser import Denoiser
from model_executor.page_cache.own_pages import OwnPages

STEP = 3
STEERABLE = [name for name in CASES if name != "dit"]  # it edits nothing


@pytest.fixture(scope="module", params=STEERABLE)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def denoiser(case: Case) -> Denoiser:
    torch.manual_seed(0)
    return case.denoiser(case.module().eval(), 1000)


@pytest.fixture(scope="module")
def groups() -> ThreadGroups:
    return ThreadGroups(5)


class Kept:
    """One request on one rank: a full step and a later one that reads its pages."""

    def __init__(self, denoiser: Denoiser, seed: int = 0, active: Tensor = ACTIVE) -> None:
        row, later = make_row(denoiser, seed), make_row(denoiser, seed + 100)
        layout = denoiser.page_layout(OWN_PAGES_DTYPE)
        entry, made = OwnPages.room(layout, len(row.latents), torch.device("cpu"))
        entry.fill_(0x7F)  # values that would be noticed
        self.own = OwnPages(layout, len(row.latents), entry, made, STEP, row.latents, row.sigma, row.modulation)
        self.full = replace(row, own=self.own)
        same = {"prompt_embeds": row.prompt_embeds, "pooled_prompt_embeds": row.pooled_prompt_embeds}
        moved = replace(later, **same, condition=row.condition, guidance_scale=row.guidance_scale)
        self.later = replace(moved, active=active, pages=self.own.pages, own=self.own)
        self.again = replace(self.full, active=active, pages=self.own.pages)

    def without_pages(self) -> Row:
        """The later step on a rank that has none."""
        own = replace(self.own, entry=torch.full_like(self.own.entry, 0x7F), made=torch.tensor([-1, 0, 0]))
        return replace(self.later, own=own, pages=own.pages)


def test_making_pages_changes_no_bit_of_the_step(denoiser: Denoiser) -> None:
    kept = Kept(denoiser)
    assert torch.equal(forward(denoiser, [kept.full])[0], forward(denoiser, [replace(kept.full, own=None)])[0])
    assert kept.own.are_there
    assert not replace(kept.own, step=STEP + 1).are_there


def test_the_same_step_over_them_is_the_full_one_up_to_int8(denoiser: Denoiser) -> None:
    """Some rounding: no more than a hundredth of what the step predicts."""
    kept = Kept(denoiser)
    (full,) = forward(denoiser, [kept.full])
    (again,) = forward(denoiser, [kept.again])
    assert float((again - full[ACTIVE]).abs().mean()) < 0.01 * float(full.abs().mean())
    assert not torch.equal(again, full[ACTIVE]), "they are read"


def test_missing_pages_are_made_again_with_the_same_bits(denoiser: Denoiser) -> None:
    """Alone, and in a batch of which others have theirs, or have none."""
    first, second = Kept(denoiser), Kept(denoiser, 5, torch.tensor([17]))
    exact = make_row(denoiser, 9, (3, 5))
    forward(denoiser, [first.full, second.full])
    expected = [forward(denoiser, [row])[0] for row in (first.later, second.later, exact)]
    rows = [first.without_pages(), second.later, exact]
    assert all(map(torch.equal, forward(denoiser, rows), expected))
    assert rows[0].own is not None
    assert rows[0].own.are_there
    assert torch.equal(rows[0].own.entry, first.own.entry)


def test_pages_of_another_step_are_not_read(denoiser: Denoiser) -> None:
    kept = Kept(denoiser)
    forward(denoiser, [kept.full])
    expected = forward(denoiser, [kept.later])[0]
    other = make_row(denoiser, 50)
    forward(denoiser, [replace(other, own=replace(kept.own, step=STEP + 1, latents=other.latents))])
    assert not kept.own.are_there
    assert torch.equal(forward(denoiser, [kept.later])[0], expected)


@pytest.mark.parametrize("degrees", [(2, 2), (2, 1), (1, 2), (3, 5), (5, 3)])
def test_bits_do_not_depend_on_the_ranks_of_either_step(
    denoiser: Denoiser, groups: ThreadGroups, degrees: tuple[int, int]
) -> None:
    """Rank 0 is in both groups; it may lack some heads, another member all of them."""
    alone = Kept(denoiser)
    forward(denoiser, [alone.full])
    expected = forward(denoiser, [alone.later])[0]
    ranks = [Kept(denoiser) for _ in range(max(degrees))]
    run_on(groups, degrees[0], denoiser, [kept.full for kept in ranks])
    for output in run_on(groups, degrees[1], denoiser, [kept.later for kept in ranks]):
        assert torch.equal(output, expected)


def test_ranks_whose_requests_share_one_attention_keep_the_order_of_tokens(case: Case, groups: ThreadGroups) -> None:
    """As on GPUs, where keys and values of a step of all tokens are not copied."""
    torch.manual_seed(0)
    denoiser = case.denoiser(case.module().eval(), 1000, GpuOperators())
    alone = Kept(denoiser)
    forward(denoiser, [alone.full])
    ranks = [Kept(denoiser) for _ in range(2)]
    run_on(groups, 2, denoiser, [kept.full for kept in ranks])
    for output in run_on(groups, 2, denoiser, [kept.later for kept in ranks]):
        torch.testing.assert_close(output, forward(denoiser, [alone.later])[0], rtol=1e-4, atol=1e-4)


def run_on(groups: ThreadGroups, degree: int, denoiser: Denoiser, rows: list[Row]) -> list[Tensor]:
    """What each rank gets. rows: by rank."""
    if degree == 1:
        return forward(denoiser, rows[:1])
    member: Callable[..., Tensor] = lambda group: denoiser.forward([rows[group.me]], group)[0]  # noqa: E731
    return groups.run(member, range(degree))
