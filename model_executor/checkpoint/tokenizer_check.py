"""Checks that a checkpoint's tokenizer works and fits its text encoder.

Where vocabulary files are missing, transformers silently makes a tokenizer without a vocabulary: every prompt becomes
the same few unknown tokens, and pictures do not depend on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PROBES = ("a", "b", "red", "hat", "1", "2")
"""Prompts of which a tokenizer of a usual vocabulary distinguishes some."""

MAX_OWN_PROBES = 64
"""Words of a tokenizer's own vocabulary that are tried: a small one may have no letters."""


def check_files(folder: Path, cls: Any) -> None:
    """Raises ValueError if vocabulary files of a tokenizer of class `cls` are missing: it needs either the one file
    that holds everything, or each of the others that the class names."""
    names = dict(cls.vocab_files_names)
    whole = names.pop("tokenizer_file", None)
    if whole is not None and (folder / whole).is_file():
        return
    if missing := sorted(name for name in names.values() if not (folder / name).is_file()):
        alternative = "" if whole is None else f" (or {whole})"
        raise ValueError(f"it has no {' and no '.join(missing)}{alternative}; is the checkpoint complete?")


def check_json(folder: Path) -> None:
    """Raises ValueError if a .json file of the folder is not valid JSON, or not an object."""
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file.name} cannot be read ({error}); fetch it again") from error
        if not isinstance(content, dict):
            raise ValueError(f"{file.name} holds no JSON object; fetch it again")


def check_tokenizer(tokenizer: Any, encoder: Mapping[str, Any]) -> None:
    """Raises ValueError if different prompts give the same tokens, or tokens outside the text encoder's vocabulary,
    or more than it can read, or if it cannot fill prompts up. encoder: the text encoder's configuration."""
    if tokenizer.pad_token is None:
        raise ValueError("it has no pad_token, with which diffusers' pipelines fill up prompts")
    try:
        reads = _distinguishes(tokenizer, PROBES) or _distinguishes(tokenizer, (*PROBES, *_own_words(tokenizer)))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"it cannot read a prompt ({error}); fetch its files again") from error
    if not reads:
        raise ValueError("it turns all prompts into the same tokens; is its vocabulary complete?")
    known = encoder.get("vocab_size") or encoder.get("text_config", {}).get("vocab_size")
    highest = max(tokenizer.get_vocab().values())
    if known is not None and highest >= known:
        raise ValueError(
            f"it makes tokens up to number {highest} where the text encoder's config.json has a vocab_size of {known}; "
            "are both of one checkpoint?"
        )
    places = encoder.get("max_position_embeddings") if encoder.get("model_type") == "clip_text_model" else None
    if tokenizer.model_max_length < 1:
        raise ValueError("its tokenizer_config.json has a model_max_length below 1")
    if places is not None and tokenizer.model_max_length > places:
        raise ValueError(
            f"its tokenizer_config.json names no model_max_length of at most {places} tokens, which is what the text "
            "encoder can read"
        )


def _distinguishes(tokenizer: Any, prompts: Iterable[str]) -> bool:
    """Whether not all of these prompts become the same tokens, in whatever number."""
    return len({frozenset(tokenizer(prompt, padding="max_length", max_length=8).input_ids) for prompt in prompts}) > 1


def _own_words(tokenizer: Any) -> list[str]:
    """Some words of a tokenizer's vocabulary, from all of it; without special tokens, which it knows in any case."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ids = sorted({*tokenizer.get_vocab().values()} - special)
    return [tokenizer.decode([token]) for token in ids[:: max(1, len(ids) // MAX_OWN_PROBES)]]
