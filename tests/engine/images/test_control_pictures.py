"""Control pictures at the sizes of an edit, and of a picture that is made from nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from hires_rig import NOWHERE, file_of
from PIL import Image

from core.errors import InvalidImageError, InvalidRequestError
from core.ipc.shared_array import Arena, ArenaAllocator, carve
from core.messages.image_processor import CanvasScale, PreparedImages, PrepareImages
from engine.images import image_ops
from engine.images.control_pictures import control_arrays
from engine.images.image_processor import perform

NATIVE = 128
CONTROL = np.random.default_rng(5).integers(0, 256, (96, 160, 3), np.uint8)


def job_of(**options: Any) -> PrepareImages:
    common: dict[str, Any] = {"image": None, "mask": None, "mask_kind": "luminance", "canvas_size": (160, 96)}
    sizes = {"mask_margin": 0, "native_size": NATIVE, "token_size": 16, "max_pixels": 256**2, "scratch": NOWHERE}
    return PrepareImages(job_id=1, **(common | sizes | options))


def test_it_is_resized_as_the_pipelines_do() -> None:
    ((ours,), (smaller,)) = control_arrays([file_of(CONTROL)], job_of(), (160, 96), None, [(128, 80), (64, 48)])
    processor = VaeImageProcessor(vae_scale_factor=8, do_convert_rgb=True, do_normalize=False)
    theirs = processor.preprocess(Image.fromarray(CONTROL), height=80, width=128)
    assert np.array_equal(ours, (theirs[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
    assert smaller.shape == (48, 64, 3)


def test_it_is_cropped_with_the_picture() -> None:
    job, box = job_of(padding_mask_crop=4), (20, 10, 84, 58)
    ((ours,),) = control_arrays([file_of(CONTROL)], job, (160, 96), box, [(128, 96)])
    processor = VaeImageProcessor(vae_scale_factor=8, do_convert_rgb=True, do_normalize=False)
    arguments = {"height": 96, "width": 128, "crops_coords": box, "resize_mode": "fill"}
    theirs = processor.preprocess(Image.fromarray(CONTROL), **arguments)
    assert np.array_equal(ours, (theirs[0].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))


@pytest.mark.parametrize("size", [(160, 96), (80, 48), (320, 191)])
def test_it_may_have_any_size_of_the_proportions(size: tuple[int, int]) -> None:
    file = file_of(np.asarray(Image.fromarray(CONTROL).resize(size)))
    ((ours,),) = control_arrays([file], job_of(), (160, 96), None, [(128, 80)])
    assert ours.shape == (80, 128, 3)


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="it has 96x96 pixels, and what it goes with 160x96") as caught:
        control_arrays([file_of(CONTROL[:, :96])], job_of(), (160, 96), None, [(128, 80)])
    assert caught.value.param == "control_image"
    with pytest.raises(InvalidImageError, match="Invalid control image file") as damaged:
        control_arrays([np.zeros(9, np.uint8)], job_of(), (160, 96), None, [(128, 80)])
    assert damaged.value.param == "control_image"
    with pytest.raises(InvalidRequestError, match=r"exceeds limit|more than the 100 allowed"):
        control_arrays([file_of(CONTROL)], job_of(max_pixels=100), (160, 96), None, [(128, 80)])


@pytest.mark.parametrize("is_generation", [True, False])
def test_a_processor_makes_them_at_every_size(is_generation: bool) -> None:
    arena = Arena.create(7, 2**22)
    space = ArenaAllocator(arena)
    files = []
    for content in (file_of(CONTROL), file_of(255 - CONTROL)):
        files.append(carve(space.alloc(content.nbytes), 0, content.shape, "uint8"))
        arena.view(files[-1])[...] = content
    scratch = space.alloc(image_ops.scratch_bytes(NATIVE, 16, 2, 2))
    image = {} if is_generation else {"image": files[0]}
    scales = (CanvasScale("first", 2.0, "hires_scale"),)
    answer = perform(arena, job_of(controls=tuple(files), scratch=scratch, scales=scales, **image))
    assert isinstance(answer, PreparedImages), answer
    assert (answer.template is None) is is_generation
    for canvas in (answer, answer.canvases["first"]):
        one, other = (arena.view(each) for each in canvas.control_pictures)
        assert one.shape == other.shape == (canvas.height, canvas.width, 3)
        assert np.abs(one.astype(int) + other - 255).max() <= 1
