"""The prompt cache with a real text encoder: equal bits, bounded bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from model_executor.models.base import EncodedText, Family
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.stores.prompt_cache import PromptCache

LENGTH = 16


@pytest.fixture(scope="module")
def family(tiny_checkpoint: Path) -> Family:
    models = ResidentModels.open([ModelConfig(model=str(tiny_checkpoint), served_model_name="tiny", dtype="float32")])
    models.load_all()
    return models.families["tiny"]


@torch.inference_mode()
def encoded(cache: PromptCache, *prompts: str, length: int = LENGTH) -> list[EncodedText]:
    return [cache.encode(prompt, length) for prompt in prompts]


def one_text(family: Family) -> int:
    cache = PromptCache(family)
    encoded(cache, "a hat")
    return cache.nbytes


@torch.inference_mode()
def test_results_equal_the_encoders(family: Family) -> None:
    cache = PromptCache(family)
    for prompt, length in (("a red hat", 16), ("a red hat", 8), ("a blue hat", 16), ("a red hat", 16)):
        text, expected = cache.encode(prompt, length), family.encode_text(prompt, length)
        assert torch.equal(text.prompt_embeds, expected.prompt_embeds)
        assert torch.equal(text.pooled_prompt_embeds, expected.pooled_prompt_embeds)
        assert (text.num_tokens, text.truncated) == (expected.num_tokens, expected.truncated)


def test_a_prompt_is_embedded_once_for_each_length(family: Family) -> None:
    cache = PromptCache(family)
    first, again = encoded(cache, "a red hat", "a red hat")
    assert again is first
    (shorter,) = encoded(cache, "a red hat", length=8)
    assert shorter.prompt_embeds.shape[0] == 8


@torch.inference_mode()
def test_no_owner_finds_anothers_prompts(family: Family) -> None:
    cache = PromptCache(family)
    mine, again, yours = (cache.encode("a red hat", LENGTH, cache_salt=salt) for salt in ("me", "me", "you"))
    assert again is mine
    assert yours is not mine
    assert torch.equal(yours.prompt_embeds, mine.prompt_embeds)


def test_the_least_recently_used_goes_first(family: Family) -> None:
    cache = PromptCache(family, max_bytes=2 * one_text(family))
    red, blue = encoded(cache, "red", "blue")
    assert encoded(cache, "red")[0] is red
    encoded(cache, "green")
    assert encoded(cache, "red")[0] is red
    assert encoded(cache, "blue")[0] is not blue


def test_bytes_stay_within_the_budget(family: Family) -> None:
    size = one_text(family)
    cache = PromptCache(family, max_bytes=3 * size + size // 2)
    for i in range(12):
        encoded(cache, f"hat {i:x}")
        assert cache.nbytes == min(i + 1, 3) * size
    assert size >= (LENGTH + 1) * 64 * 4


def test_a_long_prompt_counts_itself(family: Family) -> None:
    cache = PromptCache(family)
    encoded(cache, "a hat" + " " * 50_000)
    assert cache.nbytes == one_text(family) + 50_000


def test_results_that_do_not_fit_are_not_kept(family: Family) -> None:
    cache = PromptCache(family, max_bytes=one_text(family) - 1)
    first, again = encoded(cache, "a hat", "a hat")
    assert again is not first
    assert cache.nbytes == 0
