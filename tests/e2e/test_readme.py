"""Runs the README's Python examples unchanged, with the embedded model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pictures import decode
from server_process import ROOT, start

README_URL = "http://127.0.0.1:8000"
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the examples, where results are written."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(code: str, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=folder, env=environment, check=True)


def assert_is_an_edit(folder: Path) -> None:
    """Assert that pixels under the mask have changed, and no others."""
    before = decode((ROOT / "examples/person.png").read_bytes())[..., :3].astype(int)
    after = decode((folder / "edited.png").read_bytes())[..., :3].astype(int)
    keep = decode((ROOT / "examples/person_mask.png").read_bytes())[..., 3]
    assert (before == after)[keep == 255].all()
    assert abs(before - after)[keep == 0].mean() > 5


def test_the_first_edit(folder: Path) -> None:
    code = BLOCKS[0]
    assert README_URL in code
    server = start(folder / "scratch", "--threads", "1")
    try:
        run(code.replace(README_URL, server.url), folder)
        assert_is_an_edit(folder)
    finally:
        status = server.stop()
    assert status == 0


def test_the_edit_without_a_server(folder: Path) -> None:
    code = BLOCKS[1]
    assert "ImageEngine" in code
    run(code, folder)
    assert_is_an_edit(folder)
