"""Rigs of families whose diffusers pipelines need a correction first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    Flux2KleinInpaintPipeline,
    QwenImageEditInpaintPipeline,
    StableDiffusion3InpaintPipeline,
    ZImageInpaintPipeline,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_inpaint
from PIL import Image
from pipeline_rig import Rig

from core.ipc.shared_array import Arena
from tools.random_checkpoints import PictureProcessor, make_klein, make_qwen_edit, make_sd3, make_z_image


def make_sd3_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    left_out = {} if options.get("has_t5", True) else {"text_encoder_3": None, "tokenizer_3": None}
    rig = Rig(make_sd3(path, **options), arena, StableDiffusion3InpaintPipeline, **left_out)
    vae = rig.pipeline.vae
    decode, shift = vae.decode, vae.config.shift_factor
    # diffusers' pipeline subtracts the shift when it encodes, and up to 0.42 forgets to add it here.
    vae.decode = lambda latents, **options: decode(latents + shift, **options)
    return rig


def make_qwen_edit_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    checkpoint = make_qwen_edit(path, **options)
    processor = PictureProcessor.of_checkpoint(checkpoint)
    rig = Rig(checkpoint, arena, QwenImageEditInpaintPipeline, processor=processor)
    encoder = rig.pipeline.text_encoder
    forward = encoder.forward

    def told_of_pictures(input_ids: torch.Tensor, **inputs: Any) -> Any:
        """Passes on the processor's outputs that diffusers' pipeline, up to 0.42, drops."""
        return forward(input_ids, mm_token_type_ids=(input_ids == processor.image_token_id).int(), **inputs)

    encoder.forward = told_of_pictures
    return rig


class SizedKleinPipeline(Flux2KleinInpaintPipeline):  # type: ignore[misc]
    """Makes pictures of the size that it is given; diffusers', of that of the upload."""

    def __call__(self, *, image: Image.Image, width: int, height: int, **options: Any) -> Any:
        resized = image.resize((width, height), Image.Resampling.LANCZOS)
        return super().__call__(image=resized, width=width, height=height, **options)


def make_klein_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    return Rig(make_klein(path, **options), arena, SizedKleinPipeline)


def allow_size(patch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    """Have Qwen-Image-Edit's pipeline work at this size; it supports only an area of a million pixels."""
    patch.setattr(pipeline_qwenimage_edit_inpaint, "calculate_dimensions", lambda *_: (*size, None))


class SizedZImageInpaint(ZImageInpaintPipeline):  # type: ignore[misc]
    """Takes a picture of any size, as the other pipelines do: this one resizes the mask alone."""

    def __call__(self, *, image: Any, width: int, height: int, **options: Any) -> Any:
        image = self.image_processor.resize(image, height, width)
        return super().__call__(image=image, width=width, height=height, **options)


def make_z_image_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    return Rig(make_z_image(path, **options), arena, SizedZImageInpaint)
