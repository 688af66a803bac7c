"""Paths of a user's cache folders: pages, fingerprints and calibrations, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from core.errors import ConfigError
from core.paths import expanded


def user_cache_folder(environment: Mapping[str, str]) -> Path:
    """stencil/ in $XDG_CACHE_HOME or ~/.cache, by the XDG base directory specification: a path that is not absolute,
    such as an empty one, is ignored. Without a home it is in /.cache, never in the working directory."""
    given, home = Path(environment.get("XDG_CACHE_HOME", "")), Path(environment.get("HOME", ""))
    base = given if given.is_absolute() else (home if home.is_absolute() else Path("/")) / ".cache"
    return base / "stencil"


def page_folder(directory: str, environment: Mapping[str, str]) -> Path:
    """Folder of the cached pages on disk. directory: see `CacheConfig`. Raises ConfigError if it names the home (~user)
    of a user who does not exist.
    """
    if not directory:
        return user_cache_folder(environment) / "pages"
    try:
        return expanded(directory)
    except ConfigError as error:
        raise ConfigError(f"--cache-dir {error}") from error
