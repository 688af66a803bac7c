"""padding_mask_crop: from photo to file through the image operations and a runner, against diffusers' pipelines."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import FluxInpaintPipeline, StableDiffusion3InpaintPipeline
from PIL import Image
from pipeline_rig import PROMPT, Rig

from core.handles import ArrayRef
from core.ipc.shared_array import Arena
from core.messages.image_processor import ComposeImage, PrepareImages
from engine.images import image_ops
from tools.random_checkpoints import make_flux, make_sd3

NOWHERE = ArrayRef(0, 0, (0,), "uint8")
STEPS, SEED = 4, 3
Pixels = npt.NDArray[np.uint8]

CASES: list[tuple[tuple[int, int], tuple[int, int, int, int], int]] = [
    ((400, 300), (150, 90, 230, 170), 16),
    ((400, 300), (0, 0, 40, 25), 10),
    ((250, 377), (201, 340, 250, 377), 0),
    ((401, 149), (3, 60, 390, 80), 200),
    ((90, 70), (30, 20, 50, 60), 5),
]
"""Size of the photo (the last is smaller than the model's own), box of the mask, padding."""


def make_dev(path: Path, arena: Arena) -> Rig:
    options = {"guidance_embeds": True, "scheduler": {"use_dynamic_shifting": True}}
    return Rig(make_flux(path, **options), arena, FluxInpaintPipeline)


def make_3(path: Path, arena: Arena) -> Rig:
    rig = Rig(make_sd3(path), arena, StableDiffusion3InpaintPipeline)
    vae = rig.pipeline.vae
    decode, shift = vae.decode, vae.config.shift_factor
    # See test_sd3_inpaint.py.
    vae.decode = lambda latents, **options: decode(latents + shift, **options)
    return rig


@pytest.fixture(scope="module", params=[make_dev, make_3])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    make: Callable[[Path, Arena], Rig] = request.param
    rig = make(tmp_path_factory.mktemp("model") / "crops", arena)
    yield rig
    rig.pages.close()


def file_of(image: Image.Image) -> Pixels:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return np.frombuffer(buffer.getvalue(), np.uint8)


def ours(rig: Rig, photo: Image.Image, mask: Image.Image, padding: int) -> tuple[Pixels, tuple[int, int]]:
    """The picture that comes back, and the size of the model's input."""
    info = rig.family.info("tiny")
    common: dict[str, Any] = {"job_id": 0, "image": NOWHERE, "mask": NOWHERE, "mask_kind": "luminance"}
    common |= {"canvas_size": None, "max_pixels": 10**6}
    sides = {"native_size": info.native_size, "token_size": info.token_size, "max_side": info.max_side}
    job = PrepareImages(**common, **sides, mask_margin=0, scratch=NOWHERE, padding_mask_crop=padding)
    files = file_of(photo), file_of(mask)
    prepared = image_ops.prepare(job, *files)
    height, width, _ = prepared.template.shape
    edit = rig.edit("crop", seed=SEED, steps=STEPS, size=(width, height))
    rig.arena.view(edit.template)[...] = prepared.template
    rig.arena.view(edit.mask)[...] = prepared.mask
    edit.guidance_scale = 7.0
    room = np.zeros(10**6, np.uint8)
    settings: dict[str, Any] = {"output_size": None, "output_format": "png", "compression": 100, "base64": False}
    paste = ComposeImage(**common, **settings, pixels=NOWHERE, out=NOWHERE, crop=prepared.crop)
    written = image_ops.compose(paste, rig.run(edit), *files, room).nbytes
    return np.asarray(Image.open(io.BytesIO(room[:written].tobytes()))), (width, height)


@pytest.mark.parametrize(("size", "box", "padding"), CASES)
def test_the_whole_way_equals_the_pipeline(
    rig: Rig, size: tuple[int, int], box: tuple[int, int, int, int], padding: int
) -> None:
    (width, height), (left, top, right, bottom) = size, box
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    white = np.zeros((height, width), np.uint8)
    white[top:bottom, left:right] = 255
    photo, mask = Image.fromarray(pixels), Image.fromarray(white)
    painted, frame = ours(rig, photo, mask, padding)
    output = rig.pipeline(
        PROMPT,
        image=photo,
        mask_image=mask,
        width=frame[0],
        height=frame[1],
        padding_mask_crop=padding,
        strength=1.0,
        num_inference_steps=STEPS,
        guidance_scale=7.0 if isinstance(rig.pipeline, FluxInpaintPipeline) else 1.0,
        max_sequence_length=16,
        generator=torch.Generator("cpu").manual_seed(SEED),
    )
    expected = np.asarray(output.images[0])
    assert expected[white > 0].std() > 10, "a flat picture proves nothing"
    assert np.abs(painted.astype(int) - expected).max() <= 2
    assert np.array_equal(painted[white == 0], pixels[white == 0])
