"""Stable Diffusion 3: whole edits through the runner against diffusers' StableDiffusion3InpaintPipeline, float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from diffusers import FlowMatchHeunDiscreteScheduler, FlowMatchLCMScheduler
from edits import Edit
from family_rigs import make_sd3_rig
from pipeline_rig import Rig, assert_same

from core.ipc.shared_array import Arena

KINDS: dict[str, dict[str, Any]] = {
    "3": {"qk_norm": None, "dual_attention_layers": ()},
    "3.5-large": {"dual_attention_layers": ()},
    "3.5-medium": {"dual_attention_layers": (0, 1)},
    "without-t5": {"has_t5": False},
}


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    rig = make_sd3_rig(tmp_path_factory.mktemp("model") / request.param, arena, **KINDS[request.param])
    yield rig
    rig.pages.close()


def guide(edit: Edit, scale: float, negative_prompt: str = "") -> dict[str, Any]:
    """Add guidance to the edit; returns the further arguments for the pipeline."""
    edit.guidance_scale = edit.true_cfg_scale = scale
    edit.negative_prompt = negative_prompt if scale > 1 else None
    return {"negative_prompt": negative_prompt} if negative_prompt else {}


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
    edit = rig.edit(f"{size}-{strength}", seed=3, steps=5, size=size)
    edit.strength = strength
    options = guide(edit, scale, negative_prompt)
    assert_same(rig.run(edit), rig.expected(edit, **options))


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize(
    "options",
    [
        {"scheduler_class": FlowMatchHeunDiscreteScheduler},
        {"scheduler_class": FlowMatchLCMScheduler},
        {"scheduler": {"stochastic_sampling": True, "shift": 3.0}},
        {"scheduler": {"use_dynamic_shifting": True}},
    ],
)
def test_every_sampler_equals_the_pipeline(
    tmp_path: Path, arena: Arena, options: dict[str, Any], strength: float
) -> None:
    """A second-order sampler takes two steps per noise level; one that draws noise draws it in the shape of the
    pipeline's latents.
    """
    rig = make_sd3_rig(tmp_path / "sampler", arena, **options)
    edit = rig.edit("sampled", seed=8, steps=5, size=(64, 96))
    edit.strength, edit.solver_order = strength, rig.family.info("tiny").solver_order
    extra = guide(edit, 3.0)
    assert_same(rig.run(edit), rig.expected(edit, **extra))
    rig.pages.close()


def test_batch_of_others_at_different_steps_changes_nothing(rig: Rig) -> None:
    """Edits of other sizes, strengths and guidance join and leave; each keeps its bytes, and equals the pipeline's."""
    shapes = [((128, 128), 4, 1.0, 3.0), ((96, 160), 7, 0.5, 1.0), ((64, 64), 2, 1.0, 2.0), ((48, 176), 5, 0.8, 5.0)]
    edits = [rig.edit(f"mixed-{i}", seed=i, steps=steps, size=size) for i, (size, steps, _, _) in enumerate(shapes)]
    for edit, (_, _, strength, scale) in zip(edits, shapes, strict=True):
        edit.strength = strength
        guide(edit, scale)
    rig.assert_company_changes_nothing(edits, rig.expected)
