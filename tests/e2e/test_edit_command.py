"""`python -m entrypoints.edit` prints one line, and refuses an output that cannot be written before it computes
anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from server_process import ROOT

from entrypoints.edit import main, save


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A red square with a transparent middle, which is edited without a mask and unchanged with one."""
    pixels = np.full((64, 64, 4), (200, 0, 0, 255), np.uint8)
    pixels[16:48, 16:48, 3] = 0
    path = tmp_path / "in.png"
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    """The upper left corner."""
    pixels = np.zeros((64, 64), np.uint8)
    pixels[:8, :8] = 255
    path = tmp_path / "mask.png"
    Image.fromarray(pixels).save(path)
    return path


def test_jpeg_of_a_picture_with_transparency(tiny_checkpoint: Path, source: Path, mask: Path) -> None:
    out = source.with_name("out.JPG")
    command = [sys.executable, "-m", "entrypoints.edit", str(source), "--mask-image", str(mask), "--prompt", "p"]
    command += ["-o", str(out), "--model", str(tiny_checkpoint), "--seed", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{out}  seed 1  mask ratio ")
    pixels = np.asarray(Image.open(out))
    assert pixels.shape == (64, 64, 3)
    assert pixels[32, 32].min() > 240, "on white"
    assert pixels[60, 60, 0] > 180


def test_a_reference_that_the_model_does_not_see(
    tiny_checkpoint: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(source), "--reference", str(source), "--prompt", "p", "-o", str(source.with_name("out.png"))]
    assert main([*arguments, "--model", str(tiny_checkpoint)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: Invalid 'reference_image': ")
    assert error.endswith("sees no references; leave them out.")


@pytest.mark.parametrize("name", ["out.png", "out.webp", "OUT.WEBP"])
@pytest.mark.parametrize("channels", [3, 4])
def test_formats_that_can_be_lossless_are(tmp_path: Path, name: str, channels: int) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (32, 40, channels), np.uint8)
    save(Image.fromarray(pixels), tmp_path / name)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / name)), pixels)


@pytest.mark.parametrize("name", ["out", "out.gif", "out.pdf", "nowhere/out.png", "folder.png", "locked/out.png"])
def test_an_output_that_cannot_be_written_is_refused_at_once(
    source: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source.with_name("folder.png").mkdir()
    source.with_name("locked").mkdir(mode=0o500)
    if name.startswith("locked") and os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    out = source.parent / name
    assert main([str(source), "--prompt", "p", "-o", str(out), "--model", "/no/such/model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot write '{out}'")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("flag", "value"), [("--prompt", ""), ("--seed", "-1"), ("--padding-mask-crop", "-1")])
def test_invalid_arguments_are_refused_before_a_model_is_loaded(
    source: Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"--prompt": "p", "-o": str(source.with_name("out.png")), "--model": "/no/such/model", flag: value}
    assert main([str(source), *(word for pair in arguments.items() for word in pair)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: Invalid '{flag[2:].replace('-', '_')}': ")
    assert error.count("\n") == 1
