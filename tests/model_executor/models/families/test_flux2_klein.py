"""FLUX.2-klein: whole edits through the runner against diffusers' pipelines, float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler, FlowMatchLCMScheduler, Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from edits import Edit, picture
from family_rigs import make_klein_rig
from PIL import Image
from pipeline_rig import PROMPT, Rig, assert_same

from core.config import ModelConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from model_executor.checkpoint.describe import describe
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import EncodedText, ImageInputs
from model_executor.models.families.flux2_klein import TEXT_LAYERS, Flux2Klein, empirical_shift
from model_executor.models.registry import make_family
from tools.random_checkpoints import make_klein

KINDS: dict[str, dict[str, Any]] = {"base": {}, "distilled": {"is_distilled": True, "text_layers": TEXT_LAYERS[-1]}}


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    rig = make_klein_rig(tmp_path_factory.mktemp("model") / request.param, arena, **KINDS[request.param])
    yield rig
    rig.pages.close()


def make_edit(rig: Rig, name: str, size: tuple[int, int], strength: float, scale: float, **options: int) -> Edit:
    """An edit. scale: of guidance, which a distilled model does not have."""
    edit = rig.edit(name, size=size, **options)
    edit.strength, edit.guidance_scale = strength, scale
    if rig.family.info("tiny").has_guidance:
        edit.true_cfg_scale, edit.negative_prompt = scale, "" if scale > 1 else None
    return edit


@pytest.mark.parametrize(
    ("size", "strength", "scale"),
    [((128, 128), 1.0, 1.0), ((96, 160), 1.0, 4.0), ((96, 160), 0.6, 1.0), ((128, 80), 0.6, 4.0)],
)
def test_edit_equals_the_pipeline(rig: Rig, size: tuple[int, int], strength: float, scale: float) -> None:
    edit = make_edit(rig, f"{size}-{strength}", size, strength, scale, seed=3, steps=4)
    assert_same(rig.run(edit), rig.expected(edit))


def painted(rig: Rig, edit: Edit, image: Image.Image | None) -> npt.NDArray[np.uint8]:
    """The picture of the pipeline that takes no mask."""
    pipeline = Flux2KleinPipeline(**rig.pipeline.components, is_distilled=rig.pipeline.config.is_distilled)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        image=image,
        prompt=edit.prompt,
        width=edit.size[0],
        height=edit.size[1],
        num_inference_steps=edit.steps,
        guidance_scale=edit.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(edit.seed),
        max_sequence_length=16,
    )
    pixels: npt.NDArray[np.uint8] = np.asarray(made.images[0])
    return pixels


@pytest.mark.parametrize("has_template", [True, False])
def test_a_picture_without_a_mask_equals_the_other_pipelines(rig: Rig, has_template: bool) -> None:
    """Of a template, and of nothing: the denoiser then sees no template, not an empty one."""
    edit = make_edit(rig, f"whole-{has_template}", (96, 80), 1.0, 4.0, seed=5, steps=4)
    image = Image.fromarray(picture(edit.seed, edit.size)) if has_template else None
    edit.mask = None  # type: ignore[assignment]
    if not has_template:
        edit.template = None  # type: ignore[assignment]
    assert_same(rig.run(edit), painted(rig, edit, image))


@torch.inference_mode()
def test_an_empty_canvas_is_encoded_only_where_a_run_starts_from_it(rig: Rig, slow_bfloat16: None) -> None:
    family, size = rig.family, (32, 48)
    blank = ImageInputs.blank(48, 4)
    whole = {"template": torch.zeros(*size, 3, dtype=torch.uint8), "mask": torch.ones(*size, dtype=torch.uint8)}
    for steps, start, is_encoded in ((4, None, False), (2, None, True), (2, torch.ones(6, 64), False)):
        options: dict[str, Any] = {"num_inference_steps": 4, "num_denoising_steps": steps, "start": start}
        made = family.encode_image(ImageInputs(**whole, is_empty=True, seed=1, **options))
        assert made.condition.shape == (0, 64)
        clean = made.outside[:, :64]
        assert torch.equal(clean, family.encode_template(whole["template"])) == is_encoded
        assert bool(clean.any()) == is_encoded
    assert len(family.encode_image(blank).condition) == 9, "a black template is one"


@pytest.mark.parametrize(
    "options",
    [{"scheduler": {"stochastic_sampling": True, "shift": 3.0}}, {"scheduler_class": FlowMatchLCMScheduler}],
)
def test_sampler_that_draws_noise_equals_the_pipeline(tmp_path: Path, arena: Arena, options: dict[str, Any]) -> None:
    rig = make_klein_rig(tmp_path / "noisy", arena, **({"scheduler": {}} | options))
    for strength in (1.0, 0.6):
        edit = make_edit(rig, f"noisy-{strength}", (64, 96), strength, 3.0, seed=8, steps=4)
        assert_same(rig.run(edit), rig.expected(edit))
    rig.pages.close()


def test_batch_of_others_at_different_steps_changes_nothing(rig: Rig) -> None:
    """Edits of other sizes, strengths and guidance join and leave; each keeps its bytes, and equals the pipeline's."""
    shapes = [((128, 128), 3, 1.0, 3.0), ((96, 160), 5, 0.5, 1.0), ((64, 64), 2, 1.0, 2.0), ((48, 176), 4, 0.8, 5.0)]
    edits = [
        make_edit(rig, f"mixed-{i}", size, strength, scale, seed=i, steps=steps)
        for i, (size, steps, strength, scale) in enumerate(shapes)
    ]
    edits[1].prompt = "a coat"
    rig.assert_company_changes_nothing(edits, rig.expected)


# ------------------------------------------------------------------------------------------------------------ prompts


@torch.inference_mode()
def encode(rig: Rig, prompt: str, length: int = 80) -> EncodedText:
    return rig.family.encode_text(prompt, length)


@pytest.mark.parametrize(("prompt", "length"), [(PROMPT, 16), ("a hat", 80), ("", 512), ("\n a hat", 64)])
@torch.inference_mode()
def test_an_embedding_equals_the_pipelines(rig: Rig, prompt: str, length: int) -> None:
    """Cut and padded; also the padding's, which the denoiser sees."""
    theirs, _ = rig.pipeline.encode_prompt(prompt, max_sequence_length=length)
    torch.testing.assert_close(encode(rig, prompt, length).prompt_embeds, theirs[0], rtol=1e-4, atol=1e-4)


def test_layers_that_are_not_read_are_dropped(rig: Rig) -> None:
    encoder = rig.family._encoder("text_encoder")  # type: ignore[attr-defined]
    assert len(encoder.layers) == TEXT_LAYERS[-1] <= rig.pipeline.text_encoder.config.num_hidden_layers


def test_the_prompts_own_tokens_are_counted(rig: Rig) -> None:
    """Of single letters; the chat has 6 tokens before the prompt and 32 after it."""
    counts = [(text.num_tokens, text.truncated) for text in (encode(rig, "a red hat", n) for n in (80, 47, 46, 10, 4))]
    assert counts == [(9, False), (9, False), (9, True), (4, True), (0, True)]


@pytest.mark.parametrize("special", ["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
def test_a_prompt_cannot_contain_the_chats_special_tokens(rig: Rig, special: str) -> None:
    assert encode(rig, f"a {special}").num_tokens == len(f"a {special}")


# ----------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.usefixtures("slow_bfloat16")
@torch.inference_mode()
def test_template_latents_are_those_that_the_denoiser_sees(rig: Rig) -> None:
    template = torch.from_numpy(picture(7, (96, 64)))
    image = rig.pipeline.image_processor.preprocess(template.permute(2, 0, 1)[None] / 255.0)
    theirs = rig.pipeline._pack_latents(rig.pipeline._encode_vae_image(image, torch.Generator()))[0]
    clean = rig.family.encode_template(template)
    torch.testing.assert_close(clean, theirs, rtol=1e-4, atol=1e-5)
    mask = torch.zeros(64, 96, dtype=torch.uint8)
    inputs = ImageInputs(template=template, mask=mask, seed=0, num_inference_steps=4, num_denoising_steps=4)
    made = rig.family.encode_image(inputs)
    assert torch.equal(made.condition, clean)
    assert torch.equal(rig.family.prime_inputs(clean, torch.zeros_like(clean), torch.tensor(0.5))[1], clean)


@torch.inference_mode()
def test_a_copy_of_the_vae_in_bfloat16_scales_alike(rig: Rig) -> None:
    family = rig.family
    assert isinstance(family, Flux2Klein)
    vae = family._vae
    twin, image = vae.in_bfloat16(None), torch.rand(1, 3, 64, 96) * 2 - 1
    assert twin is not vae
    torch.testing.assert_close(twin.encode(image), vae.encode(image), rtol=0.05, atol=0.05)
    ones = torch.ones(1, 16, 8, 12)
    assert torch.equal(twin._scaled(ones), vae._scaled(ones))


@pytest.mark.parametrize("tokens", [6, 1024, 4096, 4300, 4301, 16384])
@pytest.mark.parametrize("steps", [1, 4, 50, 200])
def test_noise_levels_are_shifted_as_in_the_pipelines(tokens: int, steps: int) -> None:
    assert empirical_shift(tokens, steps) == compute_empirical_mu(tokens, steps)


# -------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_can_do(tmp_path: Path, kind: str) -> None:
    card = describe(str(make_klein(tmp_path / kind, **KINDS[kind])))
    is_guided = kind == "base"
    info = card.info
    assert (info.family, info.has_guidance, info.is_guidance_cfg) == ("flux2-klein", is_guided, is_guided)
    assert (info.default_num_inference_steps, info.default_guidance_scale) == ((50, 4.0) if is_guided else (4, 1.0))
    assert (info.num_condition_tokens(9, has_template=True), info.num_condition_tokens(9, has_template=False)) == (9, 0)
    assert (card.layout.num_blocks, card.layout.rows_per_token) == (4, 2) if card.layout else False
    assert set(card.parameters) == {"text_encoder", "vae", "transformer"}


def opened(path: Path) -> None:
    make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"guidance_embeds": True}, "a denoiser with guidance_embeds is not supported"),
        ({"in_channels": 128}, "a denoiser of 128 channels and patches of 1 is not supported"),
        ({"patch_size": 2}, "a denoiser of 64 channels and patches of 2 is not supported"),
        ({"joint_attention_dim": 64}, "the text encoder gives 48 numbers per token, and the denoiser reads 64"),
        ({"text_layers": 26}, "a text encoder of 26 layers is not supported: 27 are read"),
        (
            {"scheduler": {}, "scheduler_class": FlowMatchHeunDiscreteScheduler},
            "which FlowMatchHeunDiscreteScheduler does not take",
        ),
    ],
)
def test_parts_of_other_models_are_refused(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        opened(make_klein(tmp_path / "other", **options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", ["", "{{ nothing.of_this }}", "{% for", "no place for a prompt"])
def test_a_chat_template_that_cannot_be_used_is_refused(tmp_path: Path, template: str) -> None:
    path = make_klein(tmp_path / "mute")
    file = path / "tokenizer" / "chat_template.jinja"
    assert file.is_file()
    file.unlink()
    if template:
        file.write_text(template)
    with pytest.raises(ConfigError, match="the tokenizer's chat template cannot be used") as caught:
        opened(path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_cannot_fill_prompts_up_is_refused(tmp_path: Path) -> None:
    """diffusers' pipeline fails at every prompt."""
    path = make_klein(tmp_path / "unfilled")
    file = path / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": None}))
    with pytest.raises(ConfigError, match=r"cannot load tokenizer of .*: it has no pad_token") as caught:
        opened(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Flux2Pipeline", "Flux2KleinKVPipeline"])
def test_other_models_of_flux_2_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = make_klein(tmp_path / "other")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"_class_name": name}))
    with pytest.raises(ConfigError, match=f"pipeline class {name} is not supported"):
        opened(path)
