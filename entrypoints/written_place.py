"""Checks that a command can write its result, before it does the work."""

from __future__ import annotations

import os
from pathlib import Path


def check_place(path: Path) -> None:
    """Raises ValueError or OSError if `path` cannot be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"cannot write '{path}': {'it is a folder' if path.is_dir() else 'its folder does not exist'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"cannot write '{path}': permission denied")
