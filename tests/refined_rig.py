"""Pictures that a base model and a refiner share, and diffusers' composition of two pipelines for the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import (
    AutoencoderKL,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    StableDiffusionXLInpaintPipeline,
)
from edits import box_mask, picture
from PIL import Image
from pipeline_rig import PROMPT

from model_executor.models.base import ImageInputs
from tools.random_unet_checkpoints import make_sdxl, make_sdxl_refiner

SIZE = (96, 128)
"""width, height in pixels."""

GUIDANCE = 3.0
SEED = 5


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for; pixels and mask as `edits.picture` and `edits.box_mask` make them."""

    steps: int
    start: float  # the refiner's
    is_edit: bool
    strength: float = 1.0
    size: tuple[int, int] = SIZE

    @property
    def template(self) -> npt.NDArray[np.uint8]:
        return picture(SEED, self.size)

    @property
    def mask(self) -> npt.NDArray[np.uint8]:
        return box_mask(self.size) if self.is_edit else np.ones((self.size[1], self.size[0]), np.uint8)

    def inputs(self, part: tuple[float, float]) -> ImageInputs:
        return ImageInputs(
            template=torch.from_numpy(self.template),
            mask=torch.from_numpy(self.mask),
            seed=SEED,
            num_inference_steps=self.steps,
            num_denoising_steps=int(self.steps * self.strength),
            part=part,
        )


SOLVERS: dict[str, dict[str, Any]] = {
    "euler": {"scheduler_class": EulerDiscreteScheduler},
    "ancestral": {"scheduler_class": EulerAncestralDiscreteScheduler},
    "dpm": {"scheduler_class": DPMSolverMultistepScheduler},
}


class Composition:
    """SDXL's base and refiner, whose VAEs are equal, and diffusers' inpainting pipelines of both."""

    def __init__(self, folder: Path, base: dict[str, Any], refiner: dict[str, Any]) -> None:
        """base, refiner: options of the checkpoints."""
        paths = [make_sdxl(folder / "base", seed=1, **base)]
        vae = AutoencoderKL.from_pretrained(paths[0] / "vae")
        self.paths = (*paths, make_sdxl_refiner(folder / "refiner", seed=2, vae=vae, **refiner))
        self.base, self.refiner = map(_pipeline, self.paths)

    def picture(self, asked: Asked) -> npt.NDArray[np.uint8]:
        """As diffusers documents it: latents of the base model's pipeline are the refiner's image."""
        image = Image.fromarray(asked.template)
        first = self.base(**arguments(asked), image=image, denoising_end=asked.start, strength=asked.strength).images
        return pixels(self.refiner(**arguments(asked, "np"), image=first, denoising_start=asked.start).images)


def _pipeline(path: Path) -> Any:
    made = StableDiffusionXLInpaintPipeline.from_pretrained(path, add_watermarker=False)
    made.set_progress_bar_config(disable=True)
    return made


def arguments(asked: Asked, output_type: str = "latent") -> dict[str, Any]:
    """Of either pipeline's call."""
    return {
        "prompt": PROMPT,
        "mask_image": Image.fromarray(asked.mask * 255),
        "width": asked.size[0],
        "height": asked.size[1],
        "num_inference_steps": asked.steps,
        "guidance_scale": GUIDANCE,
        "output_type": output_type,
        "generator": torch.Generator("cpu").manual_seed(SEED),
    }


def pixels(pictures: Any) -> npt.NDArray[np.uint8]:
    """A pipeline's only picture, of output_type "np"."""
    return np.asarray((pictures[0] * 255).round().astype(np.uint8))
