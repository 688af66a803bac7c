"""Stage `export`: the trained parts as one FluxFillPipeline checkpoint in bf16."""

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxFillPipeline

from tools.train_embedded.denoiser import load_models
from tools.train_embedded.tokenizing import build_tokenizers
from tools.train_embedded.training import load
from tools.train_embedded.vae import load_vae

SERVING_DEFAULTS = {"num_inference_steps": 8}  # what a request that names none gets
LARGEST_CHECKPOINT = 25_000_000  # bytes, all weights together


def assemble(work: Path, stage: str) -> FluxFillPipeline:
    """The pipeline of a stage's averaged weights, in bf16."""
    state = load(work / f"{stage}.pt")
    if state is None:
        raise FileNotFoundError(work / f"{stage}.pt")
    tokenizers = build_tokenizers()
    models = load_models(state["average"], tokenizers)
    pipeline = FluxFillPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0, use_dynamic_shifting=False),
        vae=load_vae(work / "vae"),
        text_encoder=models.clip.eval(),
        tokenizer=tokenizers.clip,
        text_encoder_2=models.t5.eval(),
        tokenizer_2=tokenizers.t5,
        transformer=models.transformer.eval(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(torch.bfloat16)


def load_pipeline(folder: Path) -> FluxFillPipeline:
    pipeline = FluxFillPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def export(work: Path, folder: Path, stage: str) -> None:
    assemble(work, stage).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(SERVING_DEFAULTS) + "\n")
    size = weight_bytes(folder)
    if size > LARGEST_CHECKPOINT:
        raise ValueError(f"the checkpoint has {size} bytes of weights, more than {LARGEST_CHECKPOINT}")
    print(f"exported {stage} to {folder}, {size / 1e6:.1f} MB of weights", flush=True)
