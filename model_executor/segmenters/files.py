"""Reads the files that a segmenter has beside its weights: tokenizer, preparation of pictures, known things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from model_executor.checkpoint.loader import ONE_PART, ModelCheckpoint, first_line
from model_executor.checkpoint.tokenizer_check import check_files, check_tokenizer

THINGS = "things.json"
"""A JSON list of nouns: the smallest things that a segmenter of words knows."""

PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"


def read_config(checkpoint: ModelCheckpoint) -> Any:
    """The configuration of a checkpoint's one model, with the defaults of its class. Raises ConfigError."""
    return checkpoint.outline(ONE_PART).config


def read_tokenizer(checkpoint: ModelCheckpoint, cls: Any, config: Any) -> Any:
    """The tokenizer of this class. config: from `read_config`. Raises ConfigError if it is missing, damaged, or does
    not fit the model."""
    folder = checkpoint.folder(ONE_PART)
    try:
        check_files(folder, cls)
        tokenizer = cls.from_pretrained(folder, local_files_only=True)
        check_tokenizer(tokenizer, config.to_dict())
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(f"cannot load the tokenizer of {folder}: {first_line(error)}") from error
    return tokenizer


def read_preparation(checkpoint: ModelCheckpoint) -> tuple[Path, Any]:
    """(the file that says how pictures are prepared, what it says), in the order in which transformers looks for it.
    Raises ConfigError."""
    folder = checkpoint.folder(ONE_PART)
    whole = folder / PROCESSOR
    if whole.is_file():
        content = _read_json(whole)
        if isinstance(content, dict) and "image_processor" in content:
            return whole, content["image_processor"]
    return folder / PREPROCESSOR, _read_json(folder / PREPROCESSOR)


def read_image_processor(checkpoint: ModelCheckpoint, cls: Any) -> Any:
    """The image processor of this class. Raises ConfigError."""
    file, content = read_preparation(checkpoint)
    try:
        return cls.from_dict(content)
    except Exception as error:  # whatever an entry of a wrong type causes
        raise ConfigError(f"{file} describes no {cls.__name__} ({first_line(error)}); fetch it again") from error


def read_things(checkpoint: ModelCheckpoint) -> tuple[str, ...]:
    """The nouns of things.json; none if there is no such file. Raises ConfigError."""
    file = checkpoint.folder(ONE_PART) / THINGS
    if not file.is_file():
        return ()
    content = _read_json(file)
    if not isinstance(content, list) or not content or not all(isinstance(noun, str) and noun for noun in content):
        raise ConfigError(f"{file} is no list of nouns")
    return tuple(content)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {first_line(error)}") from error
