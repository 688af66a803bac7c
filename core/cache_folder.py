"""Where a user's caches lie: pages, fingerprints and calibrations, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from core.errors import ConfigError


def user_cache_folder(environment: Mapping[str, str]) -> Path:
    """stencil/ in $XDG_CACHE_HOME or ~/.cache, as the XDG base directory specification says: a path that is not
    absolute, such as an empty one, counts as none. Without a home it is the root's, never the working directory's."""
    given, home = Path(environment.get("XDG_CACHE_HOME", "")), Path(environment.get("HOME", ""))
    base = given if given.is_absolute() else (home if home.is_absolute() else Path("/")) / ".cache"
    return base / "stencil"


def page_folder(directory: str, environment: Mapping[str, str]) -> Path:
    """Where cached pages lie on disk. directory: as in `CacheConfig`. Raises ConfigError for a user's home that there
    is not.
    """
    if not directory:
        return user_cache_folder(environment) / "pages"
    try:
        return Path(directory).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--cache-dir {directory}: there is no such home directory; give a whole path") from error
