"""Prompts to tokens and embeddings, as diffusers' pipelines make them with CLIP and T5."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Tokens(NamedTuple):
    """ids: [1, length]. used: how many of them are the prompt's. cut: whether it was longer."""

    ids: Tensor
    used: int
    cut: bool


def tokenize(tokenizer: Any, prompt: str, length: int) -> Tokens:
    """Padded or cut to `length`."""
    ids = tokenizer([prompt], padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
    full = len(tokenizer(prompt).input_ids)
    return Tokens(ids, min(full, length), full > length)


def encode_t5(encoder: Any, ids: Tensor) -> Tensor:
    """The sequence, [tokens, width]."""
    embeds: Tensor = encoder(ids.to(encoder.device), output_hidden_states=False)[0]
    return embeds[0].to(encoder.dtype)
