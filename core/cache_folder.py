"""Where a user's caches lie: pages, fingerprints and calibrations, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def user_cache_folder(environment: Mapping[str, str]) -> Path:
    """stencil/ in $XDG_CACHE_HOME or ~/.cache, as the XDG base directory specification says: a path that is not
    absolute counts as none."""
    given = Path(environment.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path(environment.get("HOME", "/")) / ".cache"
    return base / "stencil"
