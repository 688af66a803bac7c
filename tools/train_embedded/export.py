"""Stage `export`: writes the trained parts as a FluxFillPipeline checkpoint in bfloat16."""

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxFillPipeline
from transformers import T5EncoderModel, T5TokenizerFast

from tools.train_embedded.captions import vocabulary
from tools.train_embedded.denoiser import load_models
from tools.train_embedded.tokenizing import t5_tokenizer, tokenizers_in
from tools.train_embedded.training import load, save, state_of
from tools.train_embedded.vae import load_vae

SERVING_DEFAULTS = {"num_inference_steps": 8}  # for requests that give none
LARGEST_CHECKPOINT = 25_000_000  # bytes, all weights together


Weights = dict[str, dict[str, torch.Tensor]]
"""Part -> its parameters by name."""


def assemble(work: Path, stage: str, share: float = 1.0) -> FluxFillPipeline:
    """The pipeline with a stage's averaged weights, in bfloat16. share: of these, 0..1; the rest are those of `distil`,
    which `refine` begins with. Raises FileNotFoundError if a stage was not trained.
    """
    weights = _averaged(work, stage)
    if share < 1.0:
        weights = between(_averaged(work, "distil"), weights, share)
    tokenizers = tokenizers_in(work / "tokenizers")
    models = load_models(weights, tokenizers)
    pipeline = FluxFillPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0, use_dynamic_shifting=False),
        vae=load_vae(work / "vae"),
        text_encoder=models.clip.eval(),
        tokenizer=tokenizers.clip,
        text_encoder_2=models.t5.eval(),
        tokenizer_2=accept_capitals(models.t5, tokenizers.t5),
        transformer=models.transformer.eval(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(torch.bfloat16)


def _averaged(work: Path, stage: str) -> Weights:
    state = load(work / f"{stage}.pt")
    if state is None:
        raise FileNotFoundError(work / f"{stage}.pt")
    weights: Weights = state["average"]
    return weights


def between(before: Weights, after: Weights, share: float) -> Weights:
    """Weights on the line from those before a training to those after it, `share` of the way. They keep more of what
    the model could do before (Wortsman et al., Robust fine-tuning of zero-shot models, 2022, section 3)."""
    return {
        part: {name: torch.lerp(before[part][name].float(), weight.float(), share) for name, weight in weights.items()}
        for part, weights in after.items()
    }


def accept_capitals(t5: T5EncoderModel, tokenizer: T5TokenizerFast) -> T5TokenizerFast:
    """Give the spellings "Red" and "RED" the embedding of "red", for every word; returns a tokenizer with them.

    T5's tokenizer is case-sensitive, and a normalizer that lower-cases would be lost when it is loaded again.
    """
    words = vocabulary()
    spellings = {form: word for word in words for form in (word.capitalize(), word.upper()) if form != word}
    cased = t5_tokenizer(words, tuple(spellings))
    t5.resize_token_embeddings((len(cased) + 7) // 8 * 8, mean_resizing=False)
    table = t5.get_input_embeddings().weight.data
    for form, word in spellings.items():
        table[cased.convert_tokens_to_ids(f"▁{form}")] = table[tokenizer.convert_tokens_to_ids(f"▁{word}")]
    return cased


def load_pipeline(folder: Path) -> FluxFillPipeline:
    pipeline = FluxFillPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def export(work: Path, folder: Path, stage: str, share: float = 1.0) -> None:
    """See `assemble`."""
    assemble(work, stage, share).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(SERVING_DEFAULTS) + "\n")
    size = weight_bytes(folder)
    if size > LARGEST_CHECKPOINT:
        raise ValueError(f"the checkpoint has {size} bytes of weights, more than {LARGEST_CHECKPOINT}")
    print(f"exported {stage} to {folder}, {size / 1e6:.1f} MB of weights", flush=True)


def resume_from(folder: Path, work: Path) -> None:
    """Lay an exported checkpoint out in `work` as the result of the stage `distil`, to go on from it."""
    pipeline = load_pipeline(folder).to(torch.float32)
    pipeline.vae.save_pretrained(work / "vae")
    pipeline.tokenizer.save_pretrained(work / "tokenizers" / "clip")
    pipeline.tokenizer_2.save_pretrained(work / "tokenizers" / "t5")
    parts = {name: getattr(pipeline, name) for name in ("transformer", "text_encoder", "text_encoder_2")}
    save(work / "distil.pt", {"average": {name: state_of(part) for name, part in parts.items()}})
