"""Stable Diffusion 1, 2 and XL: whole edits through the runner against diffusers' inpaint pipelines, float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_sd, make_sdxl
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
)
from edits import Edit
from pipeline_rig import Rig, assert_same

from core.ipc.shared_array import Arena

V = {"prediction_type": "v_prediction"}
KINDS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "sd1": (make_sd, {"scheduler_class": PNDMScheduler, "scheduler": {"skip_prk_steps": True}}),
    "sd1-inpaint": (make_sd, {"in_channels": 9}),
    "sd2-v": (make_sd, {"scheduler": V, "use_linear_projection": True}),
    "sdxl": (make_sdxl, {"scheduler_class": EulerDiscreteScheduler}),
    "sdxl-inpaint": (make_sdxl, {"in_channels": 9, "scheduler_class": EulerDiscreteScheduler}),
}
SAMPLERS: list[tuple[Any, dict[str, Any]]] = [
    (DDIMScheduler, {"set_alpha_to_one": False}),
    (DDIMScheduler, V | {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}),
    (PNDMScheduler, {"skip_prk_steps": True, "set_alpha_to_one": False}),
    (PNDMScheduler, V | {"skip_prk_steps": True}),
    (EulerDiscreteScheduler, {"timestep_spacing": "leading"}),
    (EulerDiscreteScheduler, V | {"use_karras_sigmas": True}),
    (EulerAncestralDiscreteScheduler, {}),
    (EulerAncestralDiscreteScheduler, V | {"timestep_spacing": "trailing"}),
    (DPMSolverMultistepScheduler, {}),
    (DPMSolverMultistepScheduler, V | {"solver_order": 3}),
    (DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True}),
]


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena.create(1, 1 << 26)
    yield arena
    arena.close()


def make_rig(make: Callable[..., Path], path: Path, arena: Arena, **options: Any) -> Rig:
    if make is make_sdxl:
        return Rig(make(path, **options), arena, StableDiffusionXLInpaintPipeline, add_watermarker=False)
    parts = {"safety_checker": None, "requires_safety_checker": False}
    return Rig(make(path, **options), arena, StableDiffusionInpaintPipeline, **parts)


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    make, options = KINDS[request.param]
    rig = make_rig(make, tmp_path_factory.mktemp("model") / request.param, arena, **options)
    yield rig
    rig.pages.close()


def make_edit(
    rig: Rig, name: str, size: tuple[int, int], strength: float, scale: float, negative_prompt: str = "", **options: int
) -> Edit:
    """scale: of guidance; 1 for none."""
    edit = rig.edit(name, size=size, **options)
    info = rig.family.info("tiny")
    edit.strength, edit.solver_order, edit.extra_steps = strength, info.solver_order, info.extra_steps
    edit.guidance_scale = edit.true_cfg_scale = scale
    edit.negative_prompt = negative_prompt if scale > 1 else None
    return edit


def expected(rig: Rig, edit: Edit) -> Any:
    return rig.expected(edit, negative_prompt=edit.negative_prompt or None)


@pytest.mark.parametrize(
    ("size", "strength", "scale", "negative_prompt"),
    [
        ((128, 128), 1.0, 1.0, ""),
        ((96, 160), 1.0, 4.0, "a plain blue hat"),
        ((96, 160), 0.6, 1.0, ""),
        ((128, 128), 0.6, 4.0, ""),
    ],
)
def test_edit_equals_the_pipeline(
    rig: Rig, size: tuple[int, int], strength: float, scale: float, negative_prompt: str
) -> None:
    edit = make_edit(rig, f"{size}-{strength}", size, strength, scale, negative_prompt, seed=3, steps=5)
    assert_same(rig.run(edit), expected(rig, edit))


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize(("scheduler_class", "scheduler"), SAMPLERS)
def test_every_sampler_equals_the_pipeline(
    tmp_path: Path, arena: Arena, scheduler_class: Any, scheduler: dict[str, Any], strength: float
) -> None:
    """Those that draw noise, draw it after the pipeline's other noise; PNDM calls the model once more."""
    rig = make_rig(make_sd, tmp_path / "sd", arena, scheduler_class=scheduler_class, scheduler=scheduler)
    edit = make_edit(rig, "sampled", (64, 96), strength, 3.0, seed=8, steps=5)
    assert_same(rig.run(edit), expected(rig, edit))
    rig.pages.close()


@pytest.mark.filterwarnings("ignore:The configuration file of this scheduler:FutureWarning")
@pytest.mark.parametrize("scheduler_class", [DDIMScheduler, PNDMScheduler])
def test_an_old_schedulers_configuration_is_put_right_as_the_pipeline_does(
    tmp_path: Path, arena: Arena, scheduler_class: Any
) -> None:
    config = {"steps_offset": 0} | ({"skip_prk_steps": False} if scheduler_class is PNDMScheduler else {})
    rig = make_rig(make_sd, tmp_path / "sd", arena, scheduler_class=scheduler_class, scheduler=config)
    edit = make_edit(rig, "old", (64, 96), 1.0, 3.0, seed=8, steps=5)
    assert_same(rig.run(edit), expected(rig, edit))
    rig.pages.close()


def test_batch_of_others_at_different_steps_changes_nothing(rig: Rig) -> None:
    """Edits of the same and of other sizes, strengths and guidance join and leave; each still equals its own bytes and
    the pipeline's."""
    shapes = [((96, 160), 4, 1.0, 3.0), ((96, 160), 5, 0.6, 1.0), ((64, 64), 2, 1.0, 2.0), ((96, 160), 5, 0.8, 5.0)]
    edits = [
        make_edit(rig, f"mixed-{i}", size, strength, scale, seed=i, steps=steps)
        for i, (size, steps, strength, scale) in enumerate(shapes)
    ]
    edits[1].prompt = "a plain coat"
    alone = [rig.run(edit) for edit in edits]
    for edit, before, together in zip(edits, alone, rig.run_together(edits), strict=True):
        assert np.array_equal(together, before)
        assert_same(together, expected(rig, edit))
    assert len(rig.store) == 0
