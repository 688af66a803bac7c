"""Turns prompts into tokens and embeddings with CLIP and T5, as diffusers' pipelines do."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Tokens(NamedTuple):
    """A tokenized prompt."""

    ids: Tensor  # [1, length]
    used: int  # how many of them are the prompt's, not padding
    cut: bool  # whether the prompt was longer


def tokenize(tokenizer: Any, prompt: str, length: int) -> Tokens:
    """Tokens of a prompt, padded or cut to `length`."""
    ids = tokenizer([prompt], padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
    full = len(tokenizer(prompt).input_ids)
    return Tokens(ids, min(full, length), full > length)


def encode_t5(encoder: Any, ids: Tensor) -> Tensor:
    """T5's embeddings of tokens [1, tokens]: [tokens, width]."""
    embeds: Tensor = encoder(ids.to(encoder.device), output_hidden_states=False)[0]
    return embeds[0].to(encoder.dtype)
