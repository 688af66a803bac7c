"""Edits of two passes, through a runner and through two calls of diffusers' pipeline."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from edits import Edit, box_mask, picture
from family_rigs import allow_size
from PIL import Image
from pipeline_rig import Rig
from torch import Tensor

from core.handles import ArrayRef, TensorRef
from core.messages.image_processor import CanvasScale, PrepareImages
from core.messages.worker import Free, StepPlan
from core.sampling_params import SamplingParams
from engine.images import image_ops

NOWHERE = ArrayRef(0, 0, (0,), "uint8")
PROMPT = "a red hat"
NATIVE = 256
"""Side of the largest picture, in pixels."""


class HiresEdit:
    """An edit of `picture(seed)` under `box_mask()` in two passes; what a scheduler would have a worker do for it."""

    def __init__(
        self, rig: Rig, name: str, *, seed: int, steps: int, size: tuple[int, int], scale: float, strength: float
    ) -> None:
        """strength: of the second pass."""
        self._rig = rig
        arrays = prepare(seed, size, rig.family.info("tiny").token_size, scale)
        smaller = arrays.canvases["first"]
        height, width, _ = smaller.template.shape
        self.first = rig.edit(f"{name}-first", seed=seed, steps=steps, size=(width, height), prompt=PROMPT)
        self.final = rig.edit(name, seed=seed, steps=steps, size=size, prompt=PROMPT)
        self.final.strength = strength
        self.first.upload_size, self.first.seen = size, self.final.template
        for edit, made in ((self.first, smaller), (self.final, arrays)):
            edit.mask = edit.share(made.mask)
        self.first.template = self.first.share(smaller.template)

    @property
    def passes(self) -> tuple[Edit, Edit]:
        return self.first, self.final

    def run(self) -> npt.NDArray[np.uint8]:
        """The picture that the worker makes."""
        first, final, rig = self.first, self.final, self._rig
        for plan in (first.encode_plan(), *map(first.denoise_plan, range(first.num_steps)), final.upscale_plan(first)):
            rig.do(plan)
        rig.do(StepPlan(seq=0, batches=(), free=(Free(first.key("", ""), (0,)),)))
        start = TensorRef(final.key("upscale", "latents"), 0, port="start")
        rig.do(final.encode_plan(start=start))
        for plan in (*map(final.denoise_plan, range(final.num_steps)), final.decode_plan()):
            rig.do(plan)
        return final.result()

    def expected(self, **options: Any) -> npt.NDArray[np.uint8]:
        """The picture of two calls of the pipeline. options: arguments of both."""
        rig = self._rig
        with pytest.MonkeyPatch.context() as patch:
            if rig.family.text_sees_template:
                see(patch, rig.pipeline, picture(self.final.seed, self.final.size))
            allow_size(patch, self.first.size)
            small = rig.images(self.first, output_type="latent", **options)
            allow_size(patch, self.final.size)
            if self.final.strength < 1:  # at full strength the pipelines start from noise alone
                start = enlarged(rig.pipeline, small, self.first.size, self.final.size)
                start_from(patch, rig.pipeline.scheduler, start)
            return rig.expected(self.final, **options)


def prepare(seed: int, size: tuple[int, int], token_size: int, scale: float) -> image_ops.PreparedArrays:
    """The arrays that an image processor makes for an edit of two passes."""
    job = PrepareImages(
        job_id=0,
        image=NOWHERE,
        mask=NOWHERE,
        mask_kind="luminance",
        canvas_size=None,
        mask_margin=0,
        native_size=NATIVE,
        token_size=token_size,
        max_pixels=NATIVE**2,
        scratch=NOWHERE,
        scales=(CanvasScale("first", scale, "hires_scale"),),
    )
    return image_ops.prepare(job, file_of(picture(seed, size)), file_of(box_mask(size) * 255))


def enlarged(pipeline: Any, latents: Tensor, size: tuple[int, int], to_size: tuple[int, int]) -> Tensor:
    """The latents that the pipeline gave at `size`, interpolated, in the shape in which it draws noise."""
    scale, (width, height), (to_width, to_height) = pipeline.vae_scale_factor, size, to_size
    if hasattr(pipeline, "_patchify_latents"):  # FLUX.2: as the denoiser has them
        mean, variance = (x[None, :, None, None] for x in (pipeline.vae.bn.running_mean, pipeline.vae.bn.running_var))
        deviation = torch.sqrt(variance + pipeline.vae.config.batch_norm_eps)
        latents = pipeline._unpatchify_latents((pipeline._patchify_latents(latents) - mean) / deviation)
    if hasattr(pipeline, "_unpack_latents"):
        latents = pipeline._unpack_latents(latents, height, width, scale)
    flat = latents.reshape(1, -1, height // scale, width // scale)
    wanted = (to_height // scale, to_width // scale)
    large = torch.nn.functional.interpolate(flat, size=wanted, mode="bilinear", align_corners=False)
    return pipeline._patchify_latents(large) if hasattr(pipeline, "_patchify_latents") else large  # type: ignore[no-any-return]


def see(patch: pytest.MonkeyPatch, pipeline: Any, pixels: npt.NDArray[np.uint8]) -> None:
    """Have the pipeline's text encoder see this picture, at any size of the pipeline's own."""
    encode = pipeline.encode_prompt
    patch.setattr(pipeline, "encode_prompt", lambda image, **named: encode(image=Image.fromarray(pixels), **named))


def start_from(patch: pytest.MonkeyPatch, scheduler: Any, start: Tensor) -> None:
    """Have the pipeline's next run start from noised `start`. The first latents that a run adds noise to are those that
    it starts from; all later ones, outside the mask, stay the picture's. The pipelines have no argument for that: their
    `latents` is the noise, which is also added outside the mask.
    """
    name = "scale_noise" if hasattr(scheduler, "scale_noise") else "add_noise"
    add_noise, is_first = getattr(scheduler, name), True

    def add(sample: Tensor, *args: Any, **named: Any) -> Any:
        nonlocal is_first
        chosen, is_first = start.reshape(sample.shape) if is_first else sample, False
        return add_noise(chosen, *args, **named)

    patch.setattr(scheduler, name, add)


def two_calls(
    pipeline: Any,
    prompt: str,
    image: npt.NDArray[np.uint8],
    mask: npt.NDArray[np.uint8],
    sampling: SamplingParams,
    first_size: tuple[int, int],
) -> npt.NDArray[np.uint8]:
    """Two calls of FLUX Fill's pipeline with an interpolation between them. mask: 1 = edit."""
    height, width, _ = image.shape

    def run(size: tuple[int, int], strength: float, **options: Any) -> Any:
        assert sampling.seed is not None
        return pipeline(
            prompt=prompt,
            image=Image.fromarray(image),
            mask_image=Image.fromarray(mask * 255),
            width=size[0],
            height=size[1],
            num_inference_steps=sampling.num_inference_steps,
            strength=strength,
            max_sequence_length=pipeline.tokenizer_2.model_max_length,
            generator=torch.Generator("cpu").manual_seed(sampling.seed),
            **options,
        ).images

    small = run(first_size, sampling.strength, output_type="latent")
    with pytest.MonkeyPatch.context() as patch:
        start_from(patch, pipeline.scheduler, enlarged(pipeline, small, first_size, (width, height)))
        return np.asarray(run((width, height), sampling.hires_strength)[0])


def file_of(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return np.frombuffer(buffer.getvalue(), np.uint8)
