"""Checks, before anything is loaded, that cached pages can be stored in the configured folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from core.cache_folder import page_folder
from core.config import CacheConfig
from core.errors import ConfigError

logger = logging.getLogger("stencil.engine")


def check_page_folder(cache: CacheConfig) -> None:
    """Raises ConfigError if the path is not a folder, or the folder cannot be created. Changes nothing.

    A folder that fails later is tolerated: edits prime the pages that they do not find.
    """
    if not (cache.disk_bytes or cache.directory):
        return
    folder = page_folder(cache.directory, os.environ)
    try:
        why = _why_unusable(folder)
    except OSError as error:
        why = error.strerror
    if why:
        raise ConfigError(f"cached pages cannot lie in {folder}: {why}; give another --cache-dir")
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
        logger.warning("cached pages are read from %s and not written: this user may not write there", folder)


def _why_unusable(folder: Path) -> str | None:
    """The reason, None if it is usable. Raises OSError if the file system does not say."""
    nearest = next(path for path in (folder, *folder.parents) if path.is_symlink() or path.exists())
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    if nearest != folder and not os.access(nearest, os.W_OK | os.X_OK):
        return f"this user may not write in {nearest}"
    return None
