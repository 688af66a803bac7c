"""Small and full disks for tests: real file systems."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_tmpfs(folder: Path, nbytes: int) -> Iterator[Path]:
    """Creates `folder` and mounts a file system of its own on it; skips the test where mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs", str(folder)]
    try:
        answer = subprocess.run(mount, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if answer.returncode:
        pytest.skip(f"no file system can be mounted here: {answer.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
