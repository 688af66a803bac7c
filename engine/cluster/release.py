"""The code that machines run. With different code they would misread each other's messages, or paint other bits."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from core.errors import ConfigError

ROOT = Path(__file__).parents[2]
PARTS = ("core", "engine", "model_executor")
"""Packages that an engine's processes run."""


@cache
def source_digest() -> str:
    """Of the files of all PARTS, in hexadecimal."""
    digest = hashlib.sha256()
    for path in sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_same(digest: str, machine: str) -> None:
    """Raises ConfigError if the API server's `source_digest` is not that of this machine, which is named."""
    if digest != source_digest():
        raise ConfigError(f"{machine} has another release of Stencil than the API server: install the same on both")
