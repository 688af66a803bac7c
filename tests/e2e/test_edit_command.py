"""`python -m entrypoints.edit` prints one line, and refuses an output that cannot be written before it computes
anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from server_process import ROOT

from entrypoints.edit import main, save
from tools.random_checkpoints import make_flux


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


@pytest.mark.parametrize("flag", ["--mask-point", "--mask-box"])
def test_what_are_no_numbers_is_refused_with_what_they_are(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["in.png", flag, "120;90"])
    assert "'120;90' is no list of numbers such as 120,90" in capsys.readouterr().err


FILES = ROOT / "tests" / "workflow_files"


def picture_at(path: Path) -> npt.NDArray[np.uint8]:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def printed(capsys: pytest.CaptureFixture[str], *words: str, model: Path) -> Any:
    """What a workflow's command prints."""
    assert main(["--model", str(model), *words]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_workflow_writes_its_pictures_and_tensors_and_prints_the_rest(
    tiny_checkpoint: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = source.with_name("out.png")
    given = {"image": f"@{source}", "count": "-4", "words": "a=b", "strength": "2"}
    words = [word for name, value in given.items() for word in ("--input", f"{name}={value}")]
    file = str(FILES / "inspecting.py")
    made = printed(capsys, "--workflow", file, *words, "-o", str(out), model=tiny_checkpoint)
    assert made["values"] == {"count": -3, "strength": 4.0, "flip": True, "words": "a=b!"}
    places = {"style": "out-style.png", "picture": "out.png", "means": "out-means.npy"}
    assert made["files"] == {name: str(source.with_name(place)) for name, place in places.items()}
    pixels = picture_at(out)
    np.testing.assert_array_equal(pixels, picture_at(source))
    np.testing.assert_allclose(np.load(source.with_name("out-means.npy")), pixels.mean((0, 1)), rtol=1e-5)
    assert picture_at(source.with_name("out-style.png")).shape == (1, 1, 3)


def test_a_workflow_may_take_a_tensor_and_make_no_file(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "numbers.npy", np.arange(6.0).reshape(2, 3))
    numbers = f"numbers=@{tmp_path / 'numbers.npy'}"
    made = printed(capsys, "--workflow", str(FILES / "summing.py"), "--input", numbers, model=tiny_checkpoint)
    assert made == {"files": {}, "values": {"sum": 15.0}}


def test_a_model_edits_by_a_workflow(
    tmp_path: Path, source: Path, mask: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = make_flux(tmp_path / "flux", native_size=64), source.with_name("out.png")
    words = [str(source), "--mask-image", str(mask), "--prompt", "p", "--num-inference-steps", "1", "-o", str(out)]
    workflow = ["--workflow", str(ROOT / "examples" / "workflows" / "guarded.py"), "--input", "most_red=-255"]
    made = printed(capsys, *words, *workflow, model=model)
    assert made == {"files": {"picture": str(out)}, "values": {"is_safe": False}}
    assert not picture_at(out)[:4, :4].any()


WHOLE = ("--input", "image=@{}", "--input", "count=1")
INSPECT = ("--workflow", str(FILES / "inspecting.py"), "-o", "out.png")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*INSPECT, "--input", "image=@none.png", "--input", "count=1"), "Cannot read 'none.png': No such file"),
        ((*INSPECT, "--input", "image=none.png", "--input", "count=1"), "Invalid 'image': it is a picture of up to"),
        ((*INSPECT, "--input", "image=@{}"), "Missing input 'count' of workflow 'inspect'; give one: integer"),
        ((*INSPECT, "--input", "count=1.5"), "Invalid type for 'count': expected an integer"),
        ((*INSPECT, "--input", "count=1", "--input", "count=2"), "Invalid 'count': given more than once"),
        ((*INSPECT, "--input", "who=1"), "Invalid 'who': workflow 'inspect' has no such input; it takes image, count"),
        ((*INSPECT, "--input", "who"), "Invalid '--input who': give NAME=VALUE, or NAME=@FILE"),
        ((*INSPECT, *WHOLE, "{}"), "Invalid 'image': workflow 'inspect' takes all"),
        ((*INSPECT, *WHOLE, "--seed", "1"), "Invalid '--seed': workflow 'inspect'"),
        ((*INSPECT[:2], *WHOLE), "Missing '--output': the workflow makes style"),
        ((*INSPECT[:3], "out.gif", *WHOLE), "its name must end in .png"),
        (("--workflow", str(FILES / "without_pictures.py")), "has several, length, count; give a file with one"),
        (("--workflow", "none.py"), "none.py: cannot be read"),
        (("{}", "--prompt", "p", "-o", "out.png", "--input", "x=1"), "a workflow takes inputs; name its file"),
        (("{}", "-o", "out.png"), "Missing '--prompt': an edit needs it"),
    ],
)
def test_what_a_workflow_is_given_wrongly_is_refused_before_a_model_is_loaded(
    source: Path, words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "/no/such/model", *(word.format(source) for word in words)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert told in error
    assert error.count("\n") == 1
