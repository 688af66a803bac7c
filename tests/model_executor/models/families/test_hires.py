"""Edits of two passes in every family, against two calls of diffusers' pipeline with an interpolation of the latents
between them; float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    EulerAncestralDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FluxFillPipeline,
    FluxInpaintPipeline,
    PNDMScheduler,
    QwenImageInpaintPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
)
from edits import box_mask, picture
from family_rigs import (
    make_flux_kontext_rig,
    make_klein_rig,
    make_qwen_edit_plus_rig,
    make_qwen_edit_rig,
    make_sd3_rig,
    make_z_image_rig,
)
from hires_rig import HiresEdit
from pipeline_rig import Rig, assert_same

from core.ipc.shared_array import Arena
from model_executor.models.base import ImageInputs
from model_executor.models.families.vae_family import VaeFamily
from model_executor.models.latents import pack, unpack
from tools.random_checkpoints import make_flux, make_flux_fill, make_qwen
from tools.random_unet_checkpoints import make_sd, make_sdxl

PLAIN = {"safety_checker": None, "requires_safety_checker": False}
UNMARKED = {"add_watermarker": False}
ANCESTRAL = {"scheduler_class": EulerAncestralDiscreteScheduler}
PNDM = {"scheduler_class": PNDMScheduler, "scheduler": {"skip_prk_steps": True}}


def make_rig(make: Callable[..., Path], pipeline: Any, path: Path, arena: Arena, **parts: Any) -> Rig:
    return Rig(make(path), arena, pipeline, **parts)


MAKE: dict[str, Callable[[Path, Arena], Rig]] = {
    "flux-fill": partial(make_rig, make_flux_fill, FluxFillPipeline),
    "flux": partial(make_rig, partial(make_flux, scheduler={"use_dynamic_shifting": True}), FluxInpaintPipeline),
    "flux-kontext": make_flux_kontext_rig,
    "flux2-klein": make_klein_rig,
    "sd3": make_sd3_rig,
    "sd3-heun": partial(make_sd3_rig, scheduler_class=FlowMatchHeunDiscreteScheduler),
    "qwen-image": partial(make_rig, make_qwen, QwenImageInpaintPipeline),
    "qwen-image-edit": make_qwen_edit_rig,
    "qwen-image-edit-2511": partial(make_qwen_edit_plus_rig, zero_cond_t=True),
    "z-image": make_z_image_rig,
    "sd": partial(make_rig, partial(make_sd, **PNDM), StableDiffusionInpaintPipeline, **PLAIN),
    "sd-inpaint": partial(make_rig, partial(make_sd, in_channels=9), StableDiffusionInpaintPipeline, **PLAIN),
    "sdxl": partial(make_rig, partial(make_sdxl, **ANCESTRAL), StableDiffusionXLInpaintPipeline, **UNMARKED),
    "sdxl-inpaint": partial(make_rig, partial(make_sdxl, in_channels=9), StableDiffusionXLInpaintPipeline, **UNMARKED),
}


@pytest.fixture(scope="module", params=MAKE)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    rig = MAKE[request.param](tmp_path_factory.mktemp("model") / request.param, arena)
    yield rig
    rig.pages.close()


def make_edit(rig: Rig, name: str, size: tuple[int, int], scale: float, strength: float) -> HiresEdit:
    hires = HiresEdit(rig, name, seed=3, steps=5, size=size, scale=scale, strength=strength)
    info = rig.family.info("tiny")
    for edit in hires.passes:
        edit.solver_order, edit.extra_steps = info.solver_order, info.extra_steps
        edit.guidance_scale = edit.true_cfg_scale = 3.0 if info.is_guidance_cfg else 1.0
        edit.negative_prompt = "" if info.is_guidance_cfg else None
    return hires


@pytest.mark.parametrize(
    ("size", "scale", "strength"), [((128, 128), 2.0, 0.6), ((128, 192), 1.5, 0.4), ((192, 128), 2.0, 1.0)]
)
def test_two_passes_equal_two_calls_of_the_pipeline(
    rig: Rig, size: tuple[int, int], scale: float, strength: float
) -> None:
    edit = make_edit(rig, f"{size}-{scale}-{strength}", size, scale, strength)
    assert_same(edit.run(), edit.expected())
    assert len(rig.store) == 0


def test_given_latents_change_where_sampling_starts_and_nothing_else(rig: Rig) -> None:
    template, mask = torch.from_numpy(picture(1, (128, 64))), torch.from_numpy(box_mask((128, 64)))
    start = torch.randn(rig.family.encode_template(template).shape, generator=torch.Generator().manual_seed(5))
    for steps, is_changed in ((3, True), (5, False)):  # at full strength sampling starts from noise alone
        inputs = ImageInputs(template=template, mask=mask, seed=7, num_inference_steps=5, num_denoising_steps=steps)
        plain, given = (rig.family.encode_image(each) for each in (inputs, replace(inputs, start=start)))
        assert torch.equal(given.latents, plain.latents) != is_changed
        for name in ("condition", "outside", "sigmas"):
            assert torch.equal(getattr(given, name), getattr(plain, name))
        assert all(torch.equal(one, other) for one, other in zip(given.state, plain.state, strict=True))


def test_enlarged_latents_are_interpolated_channel_by_channel(rig: Rig) -> None:
    """A picture that rises evenly from left to right does so afterwards, but for its repeated edges."""
    family, width = rig.family, rig.family.info("tiny").latent_width
    assert isinstance(family, VaeFamily)
    columns = 4 * family.patch
    slope = torch.arange(columns, dtype=torch.float32).expand(1, width // family.patch**2, 2 * family.patch, columns)
    large = unpack(family.upscale(pack(slope, family.patch), (2, 4), (4, 8)), (4, 8), family.patch)
    assert large.shape == (1, width // family.patch**2, 4 * family.patch, 2 * columns)
    inner = large[..., 1:-1]
    assert torch.allclose(inner.diff(dim=3), torch.tensor(0.5))
    assert torch.equal(large, large[:, :1, :1].expand_as(large))
    half = pack(slope, family.patch).to(torch.bfloat16)
    assert family.upscale(half, (2, 4), (3, 5)).dtype == torch.bfloat16
    assert torch.equal(family.upscale(half, (2, 4), (2, 4)), half)
