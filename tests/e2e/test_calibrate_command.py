"""`python -m entrypoints.calibrate` on a small checkpoint, and an engine that uses its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from diffusers import FlowMatchHeunDiscreteScheduler
from PIL import Image

from core.calibration import Calibration
from entrypoints.calibrate import UNSAFE, main
from entrypoints.image_engine import ImageEngine
from tools.random_checkpoints import (
    make_flux,
    make_flux_kontext,
    make_klein,
    make_qwen_edit,
    make_qwen_edit_plus,
    make_sd3,
    make_z_image,
)
from tools.random_unet_checkpoints import make_sdxl

pytestmark = pytest.mark.slow  # twelve engines start

FLAGS = ("--prompt", "p", "--num-edits", "3", "--steps", "4", "--dtype", "float32")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    save_noise(folder, 64)
    return folder


def save_noise(folder: Path, side: int) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)
    Image.fromarray(noise).save(folder / "noise.png")


def calibrate(checkpoint: Path, images: Path, *flags: str) -> int:
    return main(["--model", str(checkpoint), "--images", str(images), *FLAGS, *flags])


def test_the_engine_uses_the_saved_calibration(
    tiny_checkpoint: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert calibrate(tiny_checkpoint, images, "--ssim-p10", "-1") == 0
    (saved,) = (tmp_path / "cache" / "stencil" / "calibration").iterdir()
    found = msgspec.json.decode(saved.read_bytes(), type=Calibration)
    assert found.safe
    assert (found.keyframes, found.dtype) == ((1.0, 0.0), "int8")
    assert (found.mask_margin, found.full_steps, found.full_steps_from) == (0, 0, 0.0)
    assert (found.num_edits, found.num_inference_steps) == (3, 4)
    with ImageEngine(str(tiny_checkpoint), dtype="float32") as engine:
        scheme = engine.model.page_scheme
    assert scheme is not None
    assert (scheme.keyframes, scheme.layout.dtype, scheme.mask_margin) == ((1.0, 0.0), "int8", 0)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "flux": lambda path: make_flux(path, guidance_embeds=True, scheduler={"use_dynamic_shifting": True}),
    "flux-kontext": lambda path: make_flux_kontext(path, guidance_embeds=True),
    "flux2-klein": make_klein,
    "sd3": lambda path: make_sd3(path, scheduler_class=FlowMatchHeunDiscreteScheduler),
    "qwen-image-edit": make_qwen_edit,
    "qwen-image-edit-plus": make_qwen_edit_plus,
    "z-image": make_z_image,
    "sdxl": make_sdxl,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_compared_with_its_exact_edits(
    family: str, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SD3 with guidance, whose two rows share pages, and a sampler that calls the model twice per step."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = FAMILIES[family](tmp_path / "model")
    save_noise(images, 128 if family == "sdxl" else 64)  # of as many tokens
    capsys.readouterr()
    assert calibrate(checkpoint, images, "--ssim-p10", "0.2") == 0
    (saved,) = (tmp_path / "cache" / "stencil" / "calibration").iterdir()
    found = msgspec.json.decode(saved.read_bytes(), type=Calibration)
    assert 0.2 <= found.ssim_p10 <= found.ssim_mean < 1, "alike, and not the same"
    assert f"SSIM {found.ssim_mean:.4f}, p10 {found.ssim_p10:.4f}" in capsys.readouterr().out
    with ImageEngine(str(checkpoint), dtype="float32") as engine:
        scheme = engine.model.page_scheme
    assert scheme is not None
    assert (scheme.keyframes, scheme.mask_margin) == (found.keyframes, found.mask_margin)


def test_an_error_that_cannot_be_reached_is_unsafe(
    tiny_checkpoint: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "calibration.json"
    assert calibrate(tiny_checkpoint, images, "--ssim-p10", "1.1", "--output", str(output)) == UNSAFE
    found = msgspec.json.decode(output.read_bytes(), type=Calibration)
    assert not found.safe
    assert found.ssim_p10 < 1.1
    assert "unsafe" in capsys.readouterr().out
