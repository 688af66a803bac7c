"""The checkpoint in the repository: complete, small, and as FluxFillPipeline expects it."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "model_executor" / "embedded"
PARTS = ("transformer", "vae", "text_encoder", "text_encoder_2")


@pytest.mark.parametrize("part", [*PARTS, "tokenizer", "tokenizer_2", "scheduler"])
def test_the_index_names_every_part(part: str) -> None:
    index = json.loads((ROOT / "model_index.json").read_text())
    assert index["_class_name"] == "FluxFillPipeline"
    assert part in index
    assert (ROOT / part).is_dir()


def test_all_weights_together_are_small() -> None:
    assert sum(path.stat().st_size for path in ROOT.rglob("*.safetensors")) <= 25_000_000


def test_the_layout_is_flux_fill() -> None:
    config = json.loads((ROOT / "transformer" / "config.json").read_text())
    assert (config["in_channels"], config["out_channels"], config["guidance_embeds"]) == (384, 64, False)
    vae = json.loads((ROOT / "vae" / "config.json").read_text())
    assert (vae["latent_channels"], vae["sample_size"]) == (16, 256)
    scheduler = json.loads((ROOT / "scheduler" / "scheduler_config.json").read_text())
    assert (scheduler["shift"], scheduler["use_dynamic_shifting"]) == (1.0, False)


@pytest.mark.parametrize("tokenizer", ["tokenizer", "tokenizer_2"])
@pytest.mark.parametrize("prompt", ["a red striped shirt", "", "Zebra!", "裙子 😀 café", "a " * 200])
def test_any_prompt_tokenises_to_24_tokens(tokenizer: str, prompt: str) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(ROOT / tokenizer)
    assert loaded.model_max_length == 24
    ids = loaded(prompt, padding="max_length", max_length=24, truncation=True)["input_ids"]
    assert len(ids) == 24
    assert max(ids) < len(loaded)


def test_capitals_read_as_the_word_they_spell() -> None:
    from transformers import AutoTokenizer, T5EncoderModel

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tokenizer_2")
    table = T5EncoderModel.from_pretrained(ROOT / "text_encoder_2").get_input_embeddings().weight
    small, large = tokenizer.convert_tokens_to_ids(["▁red", "▁Red"])
    assert small != large
    assert table[small].equal(table[large])


def test_the_pipeline_loads_and_edits() -> None:
    import numpy as np
    import torch
    from diffusers import FluxFillPipeline
    from PIL import Image

    pipeline = FluxFillPipeline.from_pretrained(ROOT, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    mask = np.zeros((64, 64), np.uint8)
    mask[16:48, 16:48] = 255
    image = pipeline(
        prompt="a red shirt", image=Image.new("RGB", (64, 64), "grey"), mask_image=Image.fromarray(mask),
        height=64, width=64, num_inference_steps=2, max_sequence_length=24,
    ).images[0]  # fmt: skip
    assert image.size == (64, 64)
