"""What --model and a catalog's `path` may name: the embedded model, a diffusers directory, a Hugging Face hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path

from core.config import EMBEDDED_MODEL, EMBEDDED_NAME, EMBEDDED_SEGMENTER
from core.errors import ConfigError

EMBEDDED_SEGMENTER_NAME = f"{EMBEDDED_NAME}-segmenter"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NAME = re.compile(r"[\w.:/-]+")


def named_model(text: str) -> tuple[str, str]:
    """(name, path) of a --model value, which is a path, or NAME=PATH; without a name it is ""."""
    name, equals, path = text.partition("=")
    if not equals or not path or not _NAME.fullmatch(name) or os.path.isdir(text):  # also too long a text is none
        return "", real_model(text)
    return name, real_model(path)


def real_model(path: str) -> str:
    """The path, or the embedded model's if it is its name and no directory is called so."""
    return EMBEDDED_MODEL if path == EMBEDDED_NAME and not Path(path).is_dir() else path


def named_segmenter(text: str) -> str:
    """The path of a --segmenter value: the embedded segmenter's if it is called so and no directory is."""
    return EMBEDDED_SEGMENTER if text == EMBEDDED_SEGMENTER_NAME and not Path(text).is_dir() else text


def is_hub_id(model: str) -> bool:
    """Whether it could be a hub id, of the form owner/name."""
    return _HUB_ID.fullmatch(model) is not None and not model.startswith(".")


def check_model(model: str) -> None:
    """Raises ConfigError if `model` is neither a diffusers directory nor a possible hub id. The worker checks more."""
    path = Path(model)
    try:
        is_directory, is_there, has_index = path.is_dir(), path.exists(), (path / "model_index.json").is_file()
    except OSError as error:
        raise ConfigError(f"cannot read '{model}': {error.strerror}") from error
    if is_directory:
        if not has_index:
            raise ConfigError(f"'{model}' is not a diffusers checkpoint: it has no model_index.json")
    elif is_there:
        raise ConfigError(f"'{model}' is a file; --model takes a diffusers directory or a Hugging Face hub id")
    elif not is_hub_id(model):
        raise ConfigError(f"there is no directory '{model}', and it is no Hugging Face hub id of the form owner/name")
