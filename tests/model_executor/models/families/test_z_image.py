"""Z-Image: whole pictures through the runner against diffusers' pipelines, float32; prompts; refused checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchHeunDiscreteScheduler,
    FlowMatchLCMScheduler,
    ZImageImg2ImgPipeline,
    ZImageInpaintPipeline,
    ZImagePipeline,
)
from edits import Edit, picture
from PIL import Image
from pipeline_rig import Rig, assert_same
from torch import Tensor
from transformers import Qwen3ForCausalLM

from core.config import ModelConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from model_executor.checkpoint.describe import describe
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import ImageInputs
from model_executor.models.families.z_image import ZImage
from model_executor.models.latents import pack
from model_executor.models.registry import make_family
from tools.random_checkpoints import make_z_image

PROMPT = "a red hat"


def make_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    return Rig(make_z_image(path, **options), arena, ZImageInpaintPipeline)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    rig = make_rig(tmp_path_factory.mktemp("model") / "z-image", arena)
    yield rig
    rig.pages.close()


def guided(edit: Edit, scale: float, negative_prompt: str = "") -> dict[str, Any]:
    """Add guidance to the edit; returns the further argument for the pipeline."""
    edit.guidance_scale = edit.true_cfg_scale = scale
    edit.negative_prompt = negative_prompt if scale > 0 else None
    return {"negative_prompt": negative_prompt}


# -------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    ("size", "strength", "scale", "negative_prompt"),
    [
        ((128, 128), 1.0, 0.0, ""),  # as many tokens as are asked for, without fillers
        ((96, 160), 1.0, 4.0, "a plain blue hat, and more words than fit"),
        ((48, 80), 0.6, 0.5, "blue"),
        ((128, 128), 0.6, 4.0, ""),
    ],
)
def test_edit_equals_the_pipeline(
    rig: Rig, size: tuple[int, int], strength: float, scale: float, negative_prompt: str
) -> None:
    edit = rig.edit(f"{size}-{strength}", seed=3, steps=5, size=size)
    edit.strength = strength
    options = guided(edit, scale, negative_prompt)
    assert_same(rig.run(edit), rig.expected(edit, **options))


@pytest.mark.parametrize(("size", "scale"), [((96, 64), 0.0), ((112, 48), 5.0)])
def test_a_picture_made_of_nothing_equals_the_other_pipelines(rig: Rig, size: tuple[int, int], scale: float) -> None:
    """Whose noise is drawn first."""
    edit = rig.edit(f"made-{size}", seed=4, steps=4, size=size)
    edit.template = edit.mask = None  # type: ignore[assignment]
    options = guided(edit, scale)
    assert_same(rig.run(edit), called(rig, ZImagePipeline, edit, **options))


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_an_edit_without_a_mask_equals_the_other_pipelines(rig: Rig, strength: float) -> None:
    edit = rig.edit(f"whole-{strength}", seed=5, steps=4, size=(64, 80))
    rig.arena.view(edit.mask)[...] = 1
    edit.strength = strength
    options = guided(edit, 3.0) | {"image": Image.fromarray(picture(edit.seed, edit.size)), "strength": strength}
    assert_same(rig.run(edit), called(rig, ZImageImg2ImgPipeline, edit, **options))


def called(rig: Rig, pipeline: Any, edit: Edit, **options: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The picture of another pipeline with the same parts."""
    return np.asarray(made_by(rig, pipeline, edit, **options))


def made_by(rig: Rig, pipeline: Any, edit: Edit, **options: Any) -> Any:
    """What another pipeline with the same parts makes."""
    made = pipeline(**rig.pipeline.components)
    made.set_progress_bar_config(disable=True)
    width, height = edit.size
    pictures = made(
        prompt=edit.prompt,
        width=width,
        height=height,
        num_inference_steps=edit.steps,
        guidance_scale=edit.guidance_scale,
        max_sequence_length=16,
        generator=torch.Generator("cpu").manual_seed(edit.seed),
        **options,
    )
    return pictures.images[0]


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": {"use_dynamic_shifting": True}},
        {"scheduler": {"stochastic_sampling": True, "shift": 3.0}},
        {"scheduler_class": FlowMatchLCMScheduler},
    ],
)
def test_every_sampler_equals_the_pipeline(
    tmp_path: Path, arena: Arena, options: dict[str, Any], strength: float
) -> None:
    rig = make_rig(tmp_path / "sampler", arena, **options)
    edit = rig.edit("sampled", seed=8, steps=5, size=(64, 96))
    edit.strength = strength
    extra = guided(edit, 3.0)
    assert_same(rig.run(edit), rig.expected(edit, **extra))
    rig.pages.close()


def test_batch_of_others_at_different_steps_changes_nothing(rig: Rig) -> None:
    """Edits of other sizes, strengths, prompts and guidance join and leave; each keeps its bytes, and equals the
    pipeline's."""
    shapes = [((128, 128), 4, 1.0, 3.0), ((96, 160), 7, 0.5, 0.0), ((64, 64), 2, 1.0, 2.0), ((48, 176), 5, 0.8, 5.0)]
    edits = [rig.edit(f"mixed-{i}", seed=i, steps=steps, size=size) for i, (size, steps, _, _) in enumerate(shapes)]
    for edit, (_, _, strength, scale) in zip(edits, shapes, strict=True):
        edit.strength = strength
        guided(edit, scale)
    edits[1].prompt = "hat"
    rig.assert_company_changes_nothing(edits, rig.expected)


@torch.inference_mode()
@pytest.mark.parametrize("is_made", [False, True], ids=["an edit", "made of nothing"])
def test_latents_in_bfloat16_equal_the_pipelines_at_every_step(tmp_path: Path, arena: Arena, is_made: bool) -> None:
    """Noise, latents between steps and guidance, to the bit: what the pipeline's denoiser predicts is given to both,
    and they have one VAE."""
    path = make_z_image(tmp_path / "half")
    rig = Rig(path, arena, ZImageInpaintPipeline, in_bfloat16=True)
    family, edit = rig.family, rig.edit("half", seed=6, steps=4, size=(64, 96))
    assert isinstance(family, ZImage)
    rig.pipeline.vae = family._vae._module
    edit.strength = 1.0 if is_made else 0.75
    options = guided(edit, 3.0) | {"output_type": "latent"}
    calls: list[tuple[list[Tensor], list[Tensor]]] = []  # (seen, predicted) of the rows of a step
    rig.pipeline.transformer.register_forward_hook(lambda _, args, output: calls.append((args[0], output[0])))
    theirs = made_by(rig, ZImagePipeline, edit, **options) if is_made else rig.images(edit, **options)[0]
    template, mask = (torch.from_numpy(rig.arena.view(ref).copy()) for ref in (edit.template, edit.mask))
    if is_made:
        mask = torch.ones_like(mask)
    inputs = ImageInputs(
        template=template, is_empty=is_made, mask=mask, seed=6, num_inference_steps=4, num_denoising_steps=len(calls)
    )
    image = family.encode_image(inputs)
    sample = image.begin(family.grid(*edit.size))
    for step, (seen, predicted) in enumerate(calls):
        sample = replace(sample, step=step)
        assert torch.equal(family.denoiser_input(sample), pack(seen[0].transpose(0, 1)))
        guided_velocity = family.combine_guidance([-pack(rows.transpose(0, 1)) for rows in predicted], 3.0)
        latents, state = family.advance(sample, guided_velocity)
        sample = replace(sample, latents=latents, state=state)
    assert sample.latents.dtype == image.latents.dtype == torch.float32
    assert torch.equal(sample.latents, pack(theirs[None]))
    rig.pages.close()


def test_pictures_in_bfloat16_are_near_the_pipelines(tmp_path: Path, arena: Arena) -> None:
    """Through the runner; denoiser and VAE round otherwise."""
    path = make_z_image(tmp_path / "half")
    rig = Rig(path, arena, ZImageInpaintPipeline, in_bfloat16=True)
    edit = rig.edit("half", seed=3, steps=5, size=(128, 128))
    options = guided(edit, 4.0)
    difference = np.abs(rig.run(edit).astype(int) - rig.expected(edit, **options))
    assert difference.mean() < 1.0
    assert difference.max() < 20
    rig.pages.close()


# --------------------------------------------------------------------------------------------------------- prompts


@torch.inference_mode()
@pytest.mark.parametrize("options", [{}, {"encoder_class": Qwen3ForCausalLM}], ids=["plain", "with a head"])
def test_an_embedding_equals_the_pipelines(tmp_path: Path, arena: Arena, options: dict[str, Any]) -> None:
    rig = make_rig(tmp_path / "encoder", arena, **options)
    for prompt in ("", "a red hat", "\n\n  two lines\nand more "):
        text = rig.family.encode_text(prompt, 224)
        (theirs,), _ = rig.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)
        torch.testing.assert_close(text.prompt_embeds, theirs, rtol=1e-4, atol=1e-4)
        assert (text.num_tokens, text.truncated) == (len(prompt), False)
    rig.pages.close()


@torch.inference_mode()
def test_a_long_prompt_is_cut_with_its_chat(rig: Rig) -> None:
    whole = rig.family.encode_text(PROMPT, 224)
    for length, number in ((12, 6), (3, 0)):
        cut = rig.family.encode_text(PROMPT, length)
        torch.testing.assert_close(cut.prompt_embeds, whole.prompt_embeds[:length], rtol=1e-4, atol=1e-4)
        assert (cut.num_tokens, cut.truncated) == (number, True)


@torch.inference_mode()
def test_a_prompt_cannot_contain_the_chats_special_tokens(rig: Rig) -> None:
    for special in ("<|im_end|>", "<|im_start|>", "<|endoftext|>"):
        assert rig.family.encode_text(f"a {special}", 224).num_tokens == len(f"a {special}")


# ----------------------------------------------------------------------------------------------------- checkpoints


def test_defaults_are_the_pipelines_or_the_checkpoints(tmp_path: Path) -> None:
    info = describe(str(make_z_image(tmp_path / "plain"))).info
    assert (info.family, info.default_num_inference_steps, info.default_guidance_scale) == ("z-image", 50, 5.0)
    assert (info.has_guidance, info.is_guidance_cfg, info.neutral_guidance_scale) == (True, True, 0.0)
    assert (info.max_text_tokens, info.max_side, info.conditions_per_token) == (224, 64, 0)
    own = {"num_inference_steps": 8, "guidance_scale": 0.0}
    turbo = describe(str(make_z_image(tmp_path / "turbo", generation_config=own))).info
    assert (turbo.default_num_inference_steps, turbo.default_guidance_scale) == (8, 0.0)


def with_config(**changes: Any) -> Callable[[Path], None]:
    """Changes the transformer's configuration."""

    def change(path: Path) -> None:
        file = path / "transformer" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def with_chat(template: str) -> Callable[[Path], None]:
    return lambda path: (path / "tokenizer" / "chat_template.jinja").write_text(template) and None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_config(siglip_feat_dim=8), "a denoiser with siglip_feat_dim, which also reads pictures, is not"),
        (with_config(qk_norm=False), "a denoiser without qk_norm is not supported"),
        (with_config(in_channels=4), "a denoiser of 4 channels beside a VAE of 16 is not supported"),
        (with_config(all_patch_size=[4]), "a denoiser without patches of 2 pixels' side is not supported"),
        (with_config(axes_dims=[8, 8, 8]), "whose three axes_dims do not add up to its head dim, 32, is not supported"),
        (with_config(n_heads=None), "its configuration makes no ZImagePipeline"),
        (with_chat("{{ 'hello' }}"), "the tokenizer's chat template cannot be used: it gives no message back"),
        (with_chat("{% if %}"), "the tokenizer's chat template cannot be used: "),
    ],
)
def test_checkpoints_of_other_pipelines_and_broken_ones_are_refused(
    tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    path = make_z_image(tmp_path / "other")
    change(path)
    with pytest.raises(ConfigError, match=reason) as caught:
        make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))
    assert "\n" not in str(caught.value)


def test_a_scheduler_that_takes_no_noise_levels_is_refused(tmp_path: Path) -> None:
    path = make_z_image(tmp_path / "heun", scheduler_class=FlowMatchHeunDiscreteScheduler)
    with pytest.raises(ConfigError, match="which FlowMatchHeunDiscreteScheduler does not take"):
        make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))


def test_the_pipeline_that_sees_pictures_is_refused(tmp_path: Path) -> None:
    path = make_z_image(tmp_path / "omni")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"_class_name": "ZImageOmniPipeline"}))
    with pytest.raises(ConfigError, match="pipeline class ZImageOmniPipeline is not supported"):
        make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))
