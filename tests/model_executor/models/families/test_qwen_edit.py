"""Qwen-Image-Edit, its successors 2509 and 2511, and Qwen-Image: whole edits through the runner against diffusers'
pipelines, float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchHeunDiscreteScheduler,
    FlowMatchLCMScheduler,
    QwenImageInpaintPipeline,
)
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE, calculate_dimensions
from edits import Edit, picture
from family_rigs import allow_size, make_qwen_edit_plus_rig, make_qwen_edit_rig, unmasked_plus
from PIL import Image
from pipeline_rig import Rig, assert_same
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from core.config import ModelConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from core.vision_tokens import VisionTokens
from model_executor.checkpoint.describe import describe
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import EncodedText
from model_executor.models.families.qwen import QwenEditPlus
from model_executor.models.registry import make_family
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.stores.prompt_cache import PromptCache
from tools.random_checkpoints import make_qwen, make_qwen_edit, make_qwen_edit_plus

PROMPT = "a red hat"
NEGATIVE_PROMPT = "blue"


def make_plain_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    return Rig(make_qwen(path, **options), arena, QwenImageInpaintPipeline)


make_2511_rig = partial(make_qwen_edit_plus_rig, zero_cond_t=True)

MAKE = {"edit": make_qwen_edit_rig, "plain": make_plain_rig, "2511": make_2511_rig}


@pytest.fixture(scope="module", params=MAKE)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    rig = MAKE[request.param](tmp_path_factory.mktemp("model") / request.param, arena)
    yield rig
    rig.pages.close()


def make_edit(rig: Rig, name: str, size: tuple[int, int], strength: float, scale: float, **options: int) -> Edit:
    """An edit. scale: of guidance away from NEGATIVE_PROMPT; 1 for none."""
    edit = rig.edit(name, size=size, prompt=PROMPT, **options)
    edit.strength, edit.true_cfg_scale = strength, scale
    edit.negative_prompt = NEGATIVE_PROMPT if scale > 1 else None
    return edit


def expected(rig: Rig, edit: Edit) -> Any:
    """The pipeline's picture at the edit's size."""
    with pytest.MonkeyPatch.context() as patch:
        allow_size(patch, edit.size)
        return rig.expected(edit, true_cfg_scale=edit.true_cfg_scale, negative_prompt=edit.negative_prompt)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("size", [(128, 128), (96, 160)])
def test_edit_equals_the_pipeline(rig: Rig, size: tuple[int, int], strength: float, scale: float) -> None:
    edit = make_edit(rig, f"{size}-{strength}-{scale}", size, strength, scale, seed=3, steps=5)
    assert_same(rig.run(edit), expected(rig, edit))


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize(
    "options",
    [{"scheduler": {"stochastic_sampling": True, "shift": 3.0}}, {"scheduler_class": FlowMatchLCMScheduler}],
)
def test_sampler_that_draws_noise_equals_the_pipeline(
    tmp_path: Path, arena: Arena, options: dict[str, Any], strength: float
) -> None:
    rig = make_qwen_edit_rig(tmp_path / "stochastic", arena, **({"scheduler": {}} | options))
    edit = make_edit(rig, "noisy", (64, 96), strength, 3.0, seed=8, steps=5)
    assert_same(rig.run(edit), expected(rig, edit))
    rig.pages.close()


def test_batch_of_others_at_different_steps_changes_nothing(rig: Rig) -> None:
    """Edits of other sizes, strengths, prompts and guidance join and leave; each keeps its own bytes, and equals the
    pipeline's.
    """
    shapes = [((128, 128), 4, 1.0, 3.0), ((96, 160), 7, 0.5, 1.0), ((64, 64), 2, 1.0, 2.0), ((48, 176), 5, 0.8, 5.0)]
    edits = [
        make_edit(rig, f"mixed-{i}", size, strength, scale, seed=i, steps=steps)
        for i, (size, steps, strength, scale) in enumerate(shapes)
    ]
    edits[1].prompt = "a plain coat"
    rig.assert_company_changes_nothing(edits, lambda edit: expected(rig, edit))


@pytest.mark.parametrize(
    "options",
    [{}, {"zero_cond_t": True, "scheduler": {"stochastic_sampling": True, "shift": 3.0}}],
    ids=["2509", "2511-noisy"],
)
def test_an_unmasked_edit_equals_the_pipeline_of_the_successors(
    tmp_path: Path, arena: Arena, options: dict[str, Any]
) -> None:
    """With guidance, at a size that is not that of the picture that the text encoder sees."""
    rig = make_qwen_edit_plus_rig(tmp_path / "plus", arena, **options)
    edit = make_edit(rig, "whole", (96, 160), 1.0, 4.0, seed=3, steps=5)
    edit.mask = edit.share(np.ones((160, 96), np.uint8))
    pipeline, generator = unmasked_plus(rig), torch.Generator("cpu").manual_seed(3)
    scheduler = pipeline.scheduler
    with pytest.MonkeyPatch.context() as patch:
        allow_size(patch, edit.size)
        patch.setattr(scheduler, "step", partial(type(scheduler).step, scheduler, generator=generator))
        (theirs,) = pipeline(
            image=Image.fromarray(picture(3, edit.size)),
            prompt=PROMPT,
            negative_prompt=NEGATIVE_PROMPT,
            true_cfg_scale=4.0,
            width=96,
            height=160,
            num_inference_steps=5,
            generator=generator,
        ).images
    assert_same(rig.run(edit), np.asarray(theirs))
    rig.pages.close()


@torch.inference_mode()
def encode(rig: Rig, prompt: str, length: int = 64, seed: int = 0, size: tuple[int, int] = (96, 64)) -> EncodedText:
    return rig.family.encode_text(prompt, length, (torch.from_numpy(picture(seed, size)),))


@pytest.fixture(scope="module", params=["edit", "2511"])
def edit_rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    rig = MAKE[request.param](tmp_path_factory.mktemp("model") / request.param, arena)
    yield rig
    rig.pages.close()


@torch.inference_mode()
@pytest.mark.parametrize("size", [(128, 128), (48, 96)])
def test_an_embedding_equals_the_pipelines(rig: Rig, size: tuple[int, int]) -> None:
    image = {"image": Image.fromarray(picture(0, size))} if rig.family.text_sees_template else {}
    theirs, _ = rig.pipeline.encode_prompt(PROMPT, **image)
    torch.testing.assert_close(encode(rig, PROMPT, 512, size=size).prompt_embeds, theirs[0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_newline_at_the_beginning_of_a_prompt_is_encoded_as_in_the_pipeline(tmp_path: Path, arena: Arena) -> None:
    """The published tokenizer has a token for two newlines: here the chat's and the prompt's."""
    path = make_qwen(tmp_path / "plain")
    file = path / "tokenizer/tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["ĊĊ"] = content["model"]["vocab"].pop("Ń")  # a byte that is in no prompt here
    content["model"]["merges"] = [["Ċ", "Ċ"]]
    file.write_text(json.dumps(content))
    rig = Rig(path, arena, QwenImageInpaintPipeline)
    theirs, _ = rig.pipeline.encode_prompt("\nhat")
    text = encode(rig, "\nhat", 512)
    torch.testing.assert_close(text.prompt_embeds, theirs[0], rtol=1e-4, atol=1e-4)
    assert text.num_tokens == len("hat")
    rig.pages.close()


@pytest.mark.parametrize("size", [(128, 128), (16, 256), (400, 32), (32, 48)])
def test_the_number_of_text_tokens_is_predicted(edit_rig: Rig, size: tuple[int, int]) -> None:
    """For any size of the picture and any length of the prompt."""
    info = edit_rig.family.info("tiny")
    for prompt in ("", "hat"):
        text = encode(edit_rig, prompt, size=size)
        assert len(text.prompt_embeds) == len(prompt) + info.text_tokens_beside(*size)


def test_a_picture_is_as_many_tokens_as_its_processor_makes() -> None:
    for most, tokens in ((1280, 35 * 35), (16384, 37 * 37)):
        vision = VisionTokens(side=28, min_pixels=56 * 56, max_pixels=28 * 28 * most)
        for size in ((1024, 1024), (768, 1360), (48, 48), (16, 3200), (3200, 320), (4096, 4096)):
            high, wide = smart_resize(size[1], size[0], max_pixels=vision.max_pixels)
            assert vision.size(*size) == (wide, high)
        assert vision.count(1024, 1024) == tokens


def test_a_picture_of_a_given_area_has_the_sides_that_the_pipeline_gives_it() -> None:
    """Also the longest that is taken, of 200 tokens."""
    vision = VisionTokens(side=28, min_pixels=56 * 56, max_pixels=28 * 28 * 1280, area=QwenEditPlus.seen_area)
    assert vision.area == CONDITION_IMAGE_SIZE
    for size in ((1024, 1024), (768, 1360), (48, 64), (16, 3200), (3200, 16), (4096, 3072), (1008, 1040)):
        wide, high = vision.fitted(*size)
        assert (wide, high) == calculate_dimensions(CONDITION_IMAGE_SIZE, size[0] / size[1])
        assert vision.size(*size)[::-1] == smart_resize(high, wide, max_pixels=vision.max_pixels)


def test_a_long_prompt_is_cut_and_the_chat_goes_on(edit_rig: Rig) -> None:
    whole, cut = encode(edit_rig, "a red hat", 5), encode(edit_rig, "a red")
    assert torch.equal(whole.prompt_embeds, cut.prompt_embeds)
    assert (whole.num_tokens, whole.truncated) == (5, True)
    assert (cut.num_tokens, cut.truncated) == (5, False)


def test_a_plain_models_prompt_is_cut_as_in_the_pipeline(tmp_path: Path, arena: Arena) -> None:
    rig = make_plain_rig(tmp_path / "plain", arena)
    edit = make_edit(rig, "long", (64, 64), 1.0, 1.0, seed=1, steps=2)
    edit.prompt = "a person wearing the red striped shirt, and more words than fit"
    assert_same(rig.run(edit), expected(rig, edit))
    text = encode(rig, edit.prompt, 16)
    assert (len(text.prompt_embeds), text.num_tokens, text.truncated) == (16, 16, True)
    rig.pages.close()


@pytest.mark.parametrize("special", ["<|image_pad|>", "<|im_end|>", "<|vision_start|>", "<|endoftext|>"])
def test_a_prompt_cannot_contain_the_chats_special_tokens(rig: Rig, special: str) -> None:
    text = encode(rig, f"a {special}")
    assert text.num_tokens == len(f"a {special}")


def test_an_embedding_belongs_to_its_picture(edit_rig: Rig) -> None:
    """And is cached with it."""
    cache = PromptCache(edit_rig.family)
    pictures = [torch.from_numpy(picture(seed)) for seed in range(2)]
    with torch.inference_mode():
        one, other, again = (cache.encode("hat", 16, str(i), pictures[i : i + 1]) for i in (0, 1, 0))
    assert again is one
    assert not torch.allclose(one.prompt_embeds[-1], other.prompt_embeds[-1], atol=1e-3)
    with pytest.raises(ValueError, match="sees the picture"):
        edit_rig.family.encode_text("hat", 16)


@torch.inference_mode()
@pytest.mark.parametrize("active", [[0], [77], [119], [34, 35, 44, 45], list(range(120))])
@pytest.mark.usefixtures("slow_bfloat16")
def test_a_region_is_decoded_as_in_the_whole(edit_rig: Rig, active: list[int]) -> None:
    """For a picture much larger than the area that a region depends on."""
    width, height = 160, 192
    latents = torch.randn(120, 64, generator=torch.Generator().manual_seed(0))
    whole = edit_rig.family.decode(latents, width, height)
    region, (left, top, right, bottom) = edit_rig.family.decode_region(latents, torch.tensor(active), width, height)
    difference = region.int() - whole[top:bottom, left:right].int()
    assert region.float().std() > 10
    assert difference.abs().max() <= 1
    assert (difference != 0).float().mean() < 0.001


def test_the_templates_own_tokens_are_cached_too(tmp_path: Path) -> None:
    card = describe(str(make_qwen_edit(tmp_path / "qwen")))
    plus = describe(str(make_qwen_edit_plus(tmp_path / "plus", zero_cond_t=True)))
    plain = describe(str(make_qwen(tmp_path / "plain")))
    assert (card.info.family, plus.info.family) == ("qwen-image-edit", "qwen-image-edit-plus")
    for each in (card, plus):
        assert each.layout.entry_bytes(64) == plain.layout.entry_bytes(2 * 64)
        assert (each.info.default_true_cfg_scale, each.info.min_inference_steps) == (4.0, 2)
        assert set(each.parameters) == {"text_encoder", "vae", "transformer"}
    assert plain.info.family == "qwen-image"


def test_checkpoints_of_equal_weights_share_neither_prompts_nor_pages(tmp_path: Path) -> None:
    """If they are of other pipelines, whose chats differ."""
    edit = make_qwen_edit(tmp_path / "edit")
    plus = Path(shutil.copytree(edit, tmp_path / "plus"))
    index = plus / "model_index.json"
    index.write_text(index.read_text().replace("QwenImageEditPipeline", "QwenImageEditPlusPipeline"))
    models = ResidentModels.open(
        [ModelConfig(model=str(path), served_model_name=path.name, dtype="float32") for path in (edit, plus)]
    )
    models.load_all()
    one, other = (models.families[name] for name in ("edit", "plus"))
    assert one.text_recipe != other.text_recipe
    infos = models.ready(0).models
    assert infos[0].components == infos[1].components
    schemes = [info.page_scheme for info in infos]
    assert schemes[0] is not None
    assert schemes[1] is not None
    assert schemes[0].template_key("picture") != schemes[1].template_key("picture")


@pytest.mark.parametrize("option", ["use_additional_t_cond", "use_layer3d_rope"])
def test_denoisers_of_other_pipelines_are_refused(tmp_path: Path, option: str) -> None:
    path = make_qwen_edit_plus(tmp_path / "other", **{option: True})
    with pytest.raises(ConfigError, match=f"a denoiser with {option} is not supported"):
        make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))


def test_scheduler_that_takes_no_noise_levels_is_refused(tmp_path: Path) -> None:
    path = make_qwen_edit(tmp_path / "heun", scheduler={}, scheduler_class=FlowMatchHeunDiscreteScheduler)
    with pytest.raises(ConfigError, match="which FlowMatchHeunDiscreteScheduler does not take"):
        make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))
