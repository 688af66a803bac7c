"""A base model and a refiner: the families' parts of a run against diffusers' pipelines with `denoising_end` and
`denoising_start`, float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler
from PIL import Image
from pipeline_rig import PROMPT, assert_same
from refined_rig import GUIDANCE, SEED, SOLVERS, Asked, Composition, arguments, pixels
from torch import Tensor

from core.config import ModelConfig
from model_executor.models.base import Family, Row, SamplingState
from model_executor.worker.loading.resident import ResidentModels
from tools.random_checkpoints import make_flux, make_flux_fill, make_flux_kontext, make_sd3
from tools.random_unet_checkpoints import make_sdxl


def opened(*paths: Path) -> list[Family]:
    """The families of checkpoints, loaded."""
    configs = [
        ModelConfig(model=str(path), served_model_name=str(number), dtype="float32")
        for number, path in enumerate(paths)
    ]
    models = ResidentModels.open(configs)
    models.load_all()
    return list(models.families.values())


@torch.inference_mode()
def denoised(family: Family, asked: Asked, part: tuple[float, float], latents: Tensor | None) -> Tensor:
    """Latents after a part of a run. latents: that it goes on with; None: it begins."""
    image, grid = family.encode_image(asked.inputs(part)), family.grid(*asked.size)
    info = family.info("")
    texts = [family.encode_text(prompt, info.max_text_tokens) for prompt in (PROMPT, "")]
    is_guided = info.is_guidance_cfg
    current, state = image.latents if latents is None else latents, image.state
    for step in range(len(image.sigmas) - 1):
        sample = SamplingState(
            latents=current, outside=image.outside, sigmas=image.sigmas, state=state, step=step, grid=grid
        )
        seen = family.denoiser_input(sample)
        rows = [
            Row(
                latents=seen,
                condition=image.condition,
                grid=grid,
                prompt_embeds=text.prompt_embeds,
                pooled_prompt_embeds=text.pooled_prompt_embeds,
                sigma=image.sigmas[step],
                guidance_scale=GUIDANCE,
                is_negative=number > 0 and family.tells_negative,
            )
            for number, text in enumerate(texts if is_guided else texts[:1])
        ]
        current, state = family.advance(sample, family.combine_guidance(family.predict(rows), GUIDANCE))
    return current


def refined(base: Family, refiner: Family, asked: Asked) -> npt.NDArray[np.uint8]:
    latents = denoised(base, asked, (0.0, asked.start), None)
    latents = denoised(refiner, asked, (asked.start, 1.0), latents)
    with torch.inference_mode():
        return base.decode(latents, *asked.size).numpy()


def alone(family: Family, asked: Asked) -> npt.NDArray[np.uint8]:
    with torch.inference_mode():
        return family.decode(denoised(family, asked, (0.0, 1.0), None), *asked.size).numpy()


# ------------------------------------------------------------------------------------------------- SDXL, diffusers


class Pair:
    """Our families of a base model and a refiner."""

    def __init__(self, composed: Composition) -> None:
        self.composed = composed
        self.base, self.refiner = opened(*composed.paths)


@pytest.fixture(scope="module", params=SOLVERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    options = SOLVERS[request.param]
    return Pair(Composition(tmp_path_factory.mktemp("pair"), options, options))


@pytest.mark.parametrize(("steps", "start", "is_edit"), [(7, 0.8, False), (7, 0.8, True), (5, 0.5, True)])
def test_a_refined_picture_equals_diffusers_composition(pair: Pair, steps: int, start: float, is_edit: bool) -> None:
    asked = Asked(steps, start, is_edit)
    assert_same(refined(pair.base, pair.refiner, asked), pair.composed.picture(asked))


@pytest.mark.parametrize("pair", ["dpm"], indirect=True)
def test_an_edit_of_less_strength_equals_it_too(pair: Pair) -> None:
    asked = Asked(8, 0.7, is_edit=True, strength=0.75)
    assert_same(refined(pair.base, pair.refiner, asked), pair.composed.picture(asked))


def test_latents_of_a_base_that_sees_the_mask_go_on_as_they_are(tmp_path: Path) -> None:
    """diffusers' refiner would take them for a clean picture, and add noise to them again outside the mask. So its
    pipeline is given the template as its picture here, and the latents as those that it begins with."""
    euler = SOLVERS["euler"]
    pair = Pair(Composition(tmp_path, euler | {"in_channels": 9}, euler))
    asked = Asked(5, 0.6, is_edit=True)
    image, second = Image.fromarray(asked.template), pair.composed.refiner
    first = pair.composed.base(**arguments(asked), image=image, denoising_end=asked.start, strength=1.0).images
    generators = [torch.Generator("cpu").manual_seed(SEED) for _ in range(2)]
    with torch.inference_mode():
        clean = second._encode_vae_image(second.image_processor.preprocess(image), generators[0])
    noise = torch.randn(clean.shape, generator=generators[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second, "prepare_latents", lambda *_, **__: (first, noise, clean))
        pictures = second(**arguments(asked, "np"), image=image, denoising_start=asked.start).images
    assert_same(refined(pair.base, pair.refiner, asked), pixels(pictures))


@pytest.mark.parametrize("pair", ["euler"], indirect=True)
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_a_refiner_alone_edits_as_the_inpainting_pipeline(pair: Pair, strength: float) -> None:
    asked = Asked(6, 0.5, is_edit=True, strength=strength)
    image = Image.fromarray(asked.template)
    pictures = pair.composed.refiner(**arguments(asked, "np"), image=image, strength=strength).images
    assert_same(alone(pair.refiner, asked), pixels(pictures))


# ------------------------------------------------------------------------------------------------- one model twice


def make_heun_sd3(path: Path) -> Path:
    return make_sd3(path, scheduler_class=FlowMatchHeunDiscreteScheduler, scheduler={})


def make_euler_sdxl(path: Path) -> Path:
    return make_sdxl(path, in_channels=9, **SOLVERS["euler"])


MAKERS = {
    "flux": make_flux,
    "flux-fill": make_flux_fill,
    "flux-kontext": make_flux_kontext,
    "sd3": make_heun_sd3,
    "sdxl-inpaint": make_euler_sdxl,
}
STARTS = [("flux", 0.4), ("flux-fill", 0.8), ("flux-kontext", 0.4), ("sd3", 0.5), ("sdxl-inpaint", 0.3)]


@pytest.mark.parametrize("is_edit", [False, True], ids=["generation", "edit"])
@pytest.mark.parametrize(("kind", "start"), STARTS)
def test_a_model_that_refines_itself_changes_nothing(tmp_path: Path, kind: str, start: float, is_edit: bool) -> None:
    """With solvers that keep nothing from step to step: Euler, and SD3 with Heun, which is cut between two steps of two
    calls each."""
    (family,) = opened(MAKERS[kind](tmp_path / kind))
    asked = Asked(5, start, is_edit)
    assert np.array_equal(refined(family, family, asked), alone(family, asked))


def test_a_plain_sdxl_that_refines_itself_changes_no_generation(tmp_path: Path) -> None:
    """Outside the mask of an edit the refiner's first step sees the clean picture, as in diffusers."""
    (family,) = opened(make_sdxl(tmp_path / "sdxl", **SOLVERS["euler"]))
    asked = Asked(7, 0.8, is_edit=False)
    assert np.array_equal(refined(family, family, asked), alone(family, asked))


def test_two_flow_models_share_a_run(tmp_path: Path) -> None:
    """Other weights make another picture, of the same beginning."""
    base, refiner = opened(make_flux(tmp_path / "base", seed=1), make_flux_fill(tmp_path / "refiner", seed=2))
    asked = Asked(6, 0.5, is_edit=True)
    both, plain = refined(base, refiner, asked), alone(base, asked)
    assert both.std() > 10
    assert (both != plain).mean() > 0.5
