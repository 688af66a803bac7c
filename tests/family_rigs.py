"""Rigs of families whose diffusers pipelines need a correction first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    Flux2KleinInpaintPipeline,
    FluxKontextInpaintPipeline,
    QwenImageEditInpaintPipeline,
    QwenImageEditPlusPipeline,
    StableDiffusion3InpaintPipeline,
    ZImageInpaintPipeline,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_inpaint, pipeline_qwenimage_edit_plus
from PIL import Image
from pipeline_rig import Rig

from core.ipc.shared_array import Arena
from tools.random_checkpoints import (
    PictureProcessor,
    make_flux_kontext,
    make_klein,
    make_qwen_edit,
    make_qwen_edit_plus,
    make_sd3,
    make_z_image,
)


def make_sd3_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    left_out = {} if options.get("has_t5", True) else {"text_encoder_3": None, "tokenizer_3": None}
    rig = Rig(make_sd3(path, **options), arena, StableDiffusion3InpaintPipeline, **left_out)
    correct_sd3(rig)
    return rig


def correct_sd3(rig: Rig) -> None:
    """Correct the pipeline of a rig of Stable Diffusion 3."""
    vae = rig.pipeline.vae
    decode, shift = vae.decode, vae.config.shift_factor
    # diffusers' pipeline subtracts the shift when it encodes, and up to 0.42 forgets to add it here.
    vae.decode = lambda latents, **options: decode(latents + shift, **options)


def make_qwen_edit_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    return _make_seeing_rig(make_qwen_edit(path, **options), arena, QwenImageEditInpaintPipeline)


def _make_seeing_rig(checkpoint: Path, arena: Arena, pipeline: Any) -> Rig:
    processor = PictureProcessor.of_checkpoint(checkpoint)
    rig = Rig(checkpoint, arena, pipeline, processor=processor)
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
    """Have Qwen-Image-Edit's pipelines work at this size; they support only an area of a million pixels."""
    patch.setattr(pipeline_qwenimage_edit_inpaint, "calculate_dimensions", lambda *_: (*size, None))
    seen, plus = pipeline_qwenimage_edit_plus.calculate_dimensions, pipeline_qwenimage_edit_plus
    patch.setattr(
        plus, "calculate_dimensions", lambda area, ratio: size if area == plus.VAE_IMAGE_SIZE else seen(area, ratio)
    )


# ---------------------------------------------------------------------------------- families that see the template


class QwenEditPlusInpaint(QwenImageEditInpaintPipeline):  # type: ignore[misc]
    """The loop of `QwenImageEditInpaintPipeline`, which applies strength and mask, with what
    `QwenImageEditPlusPipeline`, which has neither, does otherwise: its chat, the size at which the text encoder sees
    the picture, and the mode of the VAE's posterior. With samplers that draw noise the two draw differently.
    """

    _encode_vae_image = QwenImageEditPlusPipeline._encode_vae_image

    def _get_qwen_prompt_embeds(self, prompt: Any, image: Image.Image, device: Any = None, dtype: Any = None) -> Any:
        plus = pipeline_qwenimage_edit_plus
        width, height = plus.calculate_dimensions(plus.CONDITION_IMAGE_SIZE, image.width / image.height)
        seen = self.image_processor.resize(image, height, width)
        return QwenImageEditPlusPipeline._get_qwen_prompt_embeds(self, prompt, [seen], device, dtype)


def make_qwen_edit_plus_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    rig = _make_seeing_rig(make_qwen_edit_plus(path, **options), arena, QwenEditPlusInpaint)
    rig.pipeline.prompt_template_encode = unmasked_plus(rig).prompt_template_encode
    return rig


def unmasked_plus(rig: Rig) -> QwenImageEditPlusPipeline:
    """The pipeline without a mask, of the parts of `make_qwen_edit_plus_rig`."""
    pipeline = QwenImageEditPlusPipeline(**rig.pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class KontextAtSize(FluxKontextInpaintPipeline):  # type: ignore[misc]
    """Works at the size that it is asked for, as Stencil does; else it resizes pictures to sizes of its own."""

    def __call__(self, image: Image.Image, width: int, height: int, **options: Any) -> Any:
        size = {"width": width, "height": height, "max_area": width * height, "_auto_resize": False}
        return super().__call__(image=self.image_processor.resize(image, height, width), **size, **options)


def make_flux_kontext_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    return Rig(make_flux_kontext(path, **options), arena, KontextAtSize)


class SizedZImageInpaint(ZImageInpaintPipeline):  # type: ignore[misc]
    """Takes a picture of any size, as the other pipelines do: this one resizes the mask alone."""

    def __call__(self, *, image: Any, width: int, height: int, **options: Any) -> Any:
        image = self.image_processor.resize(image, height, width)
        return super().__call__(image=image, width=width, height=height, **options)


def make_z_image_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    return Rig(make_z_image(path, **options), arena, SizedZImageInpaint)
