"""The checkpoints that can be served: the pipeline class named in model_index.json -> the family that runs it."""

from __future__ import annotations

from core.errors import ConfigError
from model_executor.checkpoint.loader import CONFIGURATION_ERRORS, ModelCheckpoint, first_line
from model_executor.models.base import Family
from model_executor.models.families.dit import DiT
from model_executor.models.families.flux import FluxFill, FluxInpaint, FluxKontext
from model_executor.models.families.flux2_klein import Flux2Klein
from model_executor.models.families.qwen import QwenEdit, QwenEditPlus, QwenInpaint
from model_executor.models.families.sd3 import StableDiffusion3
from model_executor.models.families.stable_diffusion import StableDiffusion, StableDiffusionXL
from model_executor.models.families.vae_family import VaeFamily
from model_executor.models.families.z_image import ZImage

FAMILIES: dict[str, type[VaeFamily]] = {
    "FluxFillPipeline": FluxFill,
    "FluxPipeline": FluxInpaint,
    "FluxInpaintPipeline": FluxInpaint,
    "FluxKontextPipeline": FluxKontext,
    "FluxKontextInpaintPipeline": FluxKontext,
    "Flux2KleinPipeline": Flux2Klein,
    "Flux2KleinInpaintPipeline": Flux2Klein,
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionImg2ImgPipeline": StableDiffusion,
    "StableDiffusionInpaintPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXL,
    "StableDiffusionXLImg2ImgPipeline": StableDiffusionXL,
    "StableDiffusionXLInpaintPipeline": StableDiffusionXL,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "StableDiffusion3InpaintPipeline": StableDiffusion3,
    "DiTPipeline": DiT,
    "QwenImagePipeline": QwenInpaint,
    "QwenImageInpaintPipeline": QwenInpaint,
    "QwenImageEditPipeline": QwenEdit,
    "QwenImageEditInpaintPipeline": QwenEdit,
    "QwenImageEditPlusPipeline": QwenEditPlus,
    "ZImagePipeline": ZImage,
    "ZImageImg2ImgPipeline": ZImage,
    "ZImageInpaintPipeline": ZImage,
}


def make_family(checkpoint: ModelCheckpoint) -> Family:
    """The family of a checkpoint, with tokenizers and scheduler loaded, but no weights. Raises ConfigError for a
    pipeline class that is not supported and for an invalid configuration."""
    name = checkpoint.class_name
    if name not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"{checkpoint.path}: pipeline class {name} is not supported; supported: {supported}")
    try:
        family = FAMILIES[name](checkpoint)
        family.info(name)
    except CONFIGURATION_ERRORS as error:
        raise ConfigError(f"{checkpoint.path}: its configuration makes no {name}: {first_line(error)}") from error
    return family
