"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from core.errors import ConfigError


def expanded(path: str) -> Path:
    """The path, with a home directory for a leading ~ or ~user. Raises ConfigError if that user has none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: there is no such home directory; give a whole path") from error
