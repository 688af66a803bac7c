"""Small files: what is longer, or no file at all, is not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.ipc.small_files import read_small


def test_only_small_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 100)
    assert read_small(tmp_path / "small", 100) == b"x" * 100
    with pytest.raises(ValueError, match="small has more than"):
        read_small(tmp_path / "small", 99)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(ValueError, match="no regular file"):
            read_small(tmp_path / name)
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises((OSError, ValueError)):
            read_small(path)
