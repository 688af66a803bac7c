"""PrimingJob: its chunks cover every block of every keyframe once, in the order in which steps need them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from core.cache.priming import Chunk, PrimingJob, TemplateInfo
from core.page_scheme import PageLayout, PageScheme, page_key

SCHEME = PageScheme(
    layout=PageLayout(num_blocks=7, num_heads=4, head_dim=64, dtype="int8"),
    keyframes=(1.0, 0.75, 0.5, 0.25, 0.0),
    latent_bytes=256,
    fingerprint="f",
    guidance_scale=30.0,
    mask_margin=8,
    full_steps=0,
)
TEMPLATE = TemplateInfo("t", "m", SCHEME, "00", 256, 256, 256, 24)


def test_a_pass_computes_all_text_tokens() -> None:
    assert TEMPLATE.pass_tokens == 256 + 24
    assert replace(TEMPLATE, extra_text_tokens=77).pass_tokens == 256 + 24 + 77


def make_job(sigmas: tuple[float, ...]) -> PrimingJob:
    return PrimingJob("prime-0", TEMPLATE, {sigma: page_key("t", sigma) for sigma in sigmas})


def next_chunk(job: PrimingJob, token_budget: int) -> Chunk:
    """Plan the next chunk, twice the same, and start it."""
    chunk = job.plan_chunk(token_budget)
    assert job.plan_chunk(token_budget) == chunk
    job.start_chunk(chunk)
    return chunk


@given(st.sets(st.sampled_from(SCHEME.keyframes), min_size=1), st.lists(st.integers(-5, 3000), min_size=1))
def test_chunks_cover_every_block_of_every_keyframe_once(sigmas: set[float], budgets: list[int]) -> None:
    job, done, filled, turn = make_job(tuple(sigmas)), [], [], 0
    while job.wanted:
        budget = budgets[turn % len(budgets)]
        chunk = next_chunk(job, budget)
        one_block = -(-len(chunk.sigmas) * TEMPLATE.pass_tokens // 7)
        assert chunk.tokens <= max(budget, one_block), "the budget holds, but for one block"
        done += [(sigma, block) for sigma in chunk.sigmas for block in range(*chunk.blocks)]
        filled += job.finish_chunk(chunk)
        turn += 1
    assert sorted(done) == sorted((sigma, block) for sigma in sigmas for block in range(7))
    assert filled == [page_key("t", sigma) for sigma in sorted(sigmas, reverse=True)], "noise falling"


def test_a_large_budget_primes_keyframes_together() -> None:
    chunk = next_chunk(make_job((1.0, 0.5, 0.0)), 2 * 280)
    assert (chunk.sigmas, chunk.blocks, chunk.tokens) == ((1.0, 0.5), (0, 7), 560)


def test_the_pass_of_a_keyframe_that_no_request_wants_any_more_is_abandoned() -> None:
    job = make_job((1.0, 0.5))
    job.finish_chunk(next_chunk(job, 40))
    job.forget(1.0)
    rest = next_chunk(job, 10_000)
    assert (rest.sigmas, rest.blocks) == ((0.5,), (0, 7))
