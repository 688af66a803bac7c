"""FLUX.1 Kontext: whole edits and generations through the runner against diffusers' two pipelines for it, float32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import FlowMatchLCMScheduler, FluxKontextPipeline
from edits import Edit, picture
from family_rigs import make_flux_kontext_rig
from PIL import Image
from pipeline_rig import Rig, assert_same

from core.config import ModelConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from model_executor.checkpoint.describe import describe
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.registry import make_family
from tools.random_checkpoints import make_flux, make_flux_fill, make_flux_kontext

SIZES = [(128, 128), (96, 160)]
NOISY = {"scheduler": {"stochastic_sampling": True, "shift": 3.0}}
GUIDED = {"true_cfg_scale": 3.0, "negative_prompt": "a plain blue hat"}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    """A checkpoint as the published one: guidance embedding, dynamic shifting."""
    path = tmp_path_factory.mktemp("model") / "kontext"
    rig = make_flux_kontext_rig(path, arena, guidance_embeds=True, scheduler={"use_dynamic_shifting": True})
    yield rig
    rig.pages.close()


def make_edit(rig: Rig, name: str, size: tuple[int, int], *, seed: int = 3, steps: int = 5, **options: Any) -> Edit:
    edit = rig.edit(name, seed=seed, steps=steps, size=size)
    edit.guidance_scale = 2.5
    for field, value in options.items():
        setattr(edit, field, value)
    return edit


def unmask(edit: Edit) -> Edit:
    edit.mask = edit.share(np.ones(edit.size[::-1], np.uint8))
    return edit


def make_of_nothing(edit: Edit) -> Edit:
    """The edit as a generation."""
    edit.template = edit.mask = None  # type: ignore[assignment]
    return edit


def unmasked(rig: Rig, edit: Edit, **options: Any) -> npt.NDArray[np.uint8]:
    """The picture of the pipeline that has no mask; of nothing, if the edit has no template."""
    pipeline, (width, height) = FluxKontextPipeline(**rig.pipeline.components), edit.size
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(edit.seed)
    scheduler = pipeline.scheduler
    with pytest.MonkeyPatch.context() as patch:  # the pipeline passes the scheduler no generator
        patch.setattr(scheduler, "step", partial(type(scheduler).step, scheduler, generator=generator))
        (image,) = pipeline(
            image=None if edit.template is None else Image.fromarray(picture(edit.seed, edit.size)),
            prompt=edit.prompt,
            width=width,
            height=height,
            max_area=width * height,
            _auto_resize=False,
            num_inference_steps=edit.steps,
            guidance_scale=edit.guidance_scale,
            max_sequence_length=16,
            generator=generator,
            **options,
        ).images
    return np.asarray(image)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_a_masked_edit_equals_the_inpainting_pipeline(rig: Rig, size: tuple[int, int], strength: float) -> None:
    edit = make_edit(rig, f"masked-{size}-{strength}", size, strength=strength)
    assert_same(rig.run(edit), rig.expected(edit))


def test_guidance_away_from_a_prompt_equals_the_pipelines(rig: Rig) -> None:
    edit = make_edit(rig, "guided", (96, 64), **GUIDED)
    assert_same(rig.run(edit), rig.expected(edit, **GUIDED))
    whole = unmask(make_edit(rig, "guided-whole", (96, 64), **GUIDED))
    assert_same(rig.run(whole), unmasked(rig, whole, **GUIDED))


@pytest.mark.parametrize("size", SIZES)
def test_pictures_without_a_mask_equal_the_other_pipeline(rig: Rig, size: tuple[int, int]) -> None:
    """Edits and generations; these two differ, so the denoiser sees the template, and none where there is none."""
    edits = unmask(make_edit(rig, f"whole-{size}", size)), make_of_nothing(make_edit(rig, f"nothing-{size}", size))
    pictures = [rig.run(edit) for edit in edits]
    for edit, ours in zip(edits, pictures, strict=True):
        assert_same(ours, unmasked(rig, edit))
    assert (pictures[0] != pictures[1]).mean() > 0.2


@pytest.mark.parametrize("options", [NOISY, {"scheduler_class": FlowMatchLCMScheduler}])
def test_a_sampler_that_draws_noise_draws_as_either_pipeline(
    tmp_path: Path, arena: Arena, options: dict[str, Any]
) -> None:
    """With a mask it continues after noise for the masked picture, else after the noise for the first latents."""
    rig = make_flux_kontext_rig(tmp_path / "stochastic", arena, **options)
    edit = make_edit(rig, "noisy", (64, 96), strength=0.6)
    assert_same(rig.run(edit), rig.expected(edit))
    for whole in (unmask(make_edit(rig, "whole", (64, 96))), make_of_nothing(make_edit(rig, "nothing", (64, 96)))):
        assert_same(rig.run(whole), unmasked(rig, whole))
    rig.pages.close()


def test_batch_of_others_at_different_steps_changes_nothing(rig: Rig) -> None:
    """Masked, whole, of nothing and guided, of other sizes and strengths: each keeps its bytes, and equals its
    pipeline's picture."""
    edits = [
        make_edit(rig, "mixed-0", (128, 128), seed=0),
        unmask(make_edit(rig, "mixed-1", (96, 160), steps=7)),
        make_of_nothing(make_edit(rig, "mixed-2", (64, 64), steps=2)),
        make_edit(rig, "mixed-3", (48, 176), strength=0.5, **GUIDED),
    ]
    of_edit = {edits[0]: rig.expected, edits[3]: partial(rig.expected, **GUIDED)}
    rig.assert_company_changes_nothing(edits, lambda edit: of_edit.get(edit, partial(unmasked, rig))(edit))


def test_what_the_checkpoint_tells(tmp_path: Path) -> None:
    card = describe(str(make_flux_kontext(tmp_path / "kontext", guidance_embeds=True)))
    plain = describe(str(make_flux(tmp_path / "plain")))
    assert (card.info.family, card.info.has_guidance, card.info.has_true_cfg) == ("flux-kontext", True, True)
    assert (card.info.default_num_inference_steps, card.info.default_guidance_scale) == (28, 3.5)
    assert card.layout.entry_bytes(64) == plain.layout.entry_bytes(2 * 64)
    assert [card.info.num_condition_tokens(64, has_template=is_edit) for is_edit in (True, False)] == [64, 0]


def test_a_denoiser_that_sees_a_mask_is_refused(tmp_path: Path) -> None:
    path = make_flux_fill(tmp_path / "fill")
    index = path / "model_index.json"
    index.write_text(index.read_text().replace("FluxFillPipeline", "FluxKontextPipeline"))
    with pytest.raises(ConfigError, match="384 input channels is not supported under FluxKontextPipeline") as caught:
        make_family(ModelCheckpoint.open(ModelConfig(model=str(path))))
    assert "\n" not in str(caught.value)
