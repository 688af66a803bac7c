"""Reads files that should be small, whatever they are."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 16 * 1024**2
"""Ten times what the largest file takes that the project writes for itself."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file; a pipe or a device is not waited for. Raises OSError, ValueError if it is another thing."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("it is no regular file")
    return os.fdopen(fd, "rb")


def read_small(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """A regular file's content. Raises OSError; ValueError if it is no such file, or longer than this."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path.name} has more than {max_bytes // 1024**2} MiB")
    return content
