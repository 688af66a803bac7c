"""Stage `export`: writes the averaged weights as a StableDiffusionInpaintPipeline checkpoint in float32."""

from pathlib import Path

import torch
from diffusers import StableDiffusionInpaintPipeline

from tools.random_checkpoints import save
from tools.train_embedded.training import load, load_state
from tools.train_unet.models import Models, build_models, build_scheduler, embedded_tokenizers, embedded_vae
from tools.train_unet.trainer import CHECKPOINT

SERVING_DEFAULTS = {"num_inference_steps": 20, "guidance_scale": 3.0}  # for requests that give none


def assemble(work: Path) -> StableDiffusionInpaintPipeline:
    vae = embedded_vae()
    vae.register_to_config(shift_factor=None)  # neither the pipeline nor training shifts latents
    models = averaged(work)
    return StableDiffusionInpaintPipeline(
        vae=vae,
        text_encoder=models.clip.eval(),
        tokenizer=embedded_tokenizers().clip,
        unet=models.unet.eval().to(memory_format=torch.contiguous_format),
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def averaged(work: Path) -> Models:
    """The models with averaged weights. Raises FileNotFoundError if nothing was trained."""
    state = load(work / CHECKPOINT)
    if state is None:
        raise FileNotFoundError(work / CHECKPOINT)
    models = build_models(state["sizes"])
    for name, module in models.named().items():
        load_state(module, state["average"][name])
    return models


def export(work: Path, folder: Path) -> None:
    save(assemble(work), folder, SERVING_DEFAULTS)
