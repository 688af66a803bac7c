"""FLUX.1 dev and schnell: whole edits through the runner against diffusers' FluxInpaintPipeline, float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from diffusers import FlowMatchLCMScheduler, FluxInpaintPipeline
from edits import Edit
from pipeline_rig import Rig, assert_same

from core.ipc.shared_array import Arena
from tools.random_checkpoints import make_flux


def make_rig(path: Path, arena: Arena, **options: Any) -> Rig:
    return Rig(make_flux(path, **options), arena, FluxInpaintPipeline)


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    """A checkpoint with guidance embedding and dynamic shifting."""
    path = tmp_path_factory.mktemp("model") / "dev"
    rig = make_rig(path, arena, guidance_embeds=True, scheduler={"use_dynamic_shifting": True})
    yield rig
    rig.pages.close()


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[Rig]:
    """A checkpoint without either."""
    rig = make_rig(tmp_path_factory.mktemp("model") / "schnell", arena, seed=1)
    yield rig
    rig.pages.close()


def check(rig: Rig, edit: Edit, **options: Any) -> None:
    assert_same(rig.run(edit), rig.expected(edit, **options))


@pytest.mark.parametrize("size", [(128, 128), (96, 160)])
@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("name", ["dev", "schnell"])
def test_edit_equals_the_pipeline(
    request: pytest.FixtureRequest, name: str, size: tuple[int, int], strength: float
) -> None:
    rig: Rig = request.getfixturevalue(name)
    edit = rig.edit(f"{size}-{strength}", seed=3, steps=5, size=size)
    edit.strength, edit.guidance_scale = strength, 7.0
    check(rig, edit)


def test_classifier_free_guidance_equals_the_pipeline(dev: Rig) -> None:
    """In addition to the distilled guidance."""
    edit = dev.edit("guided", seed=5, steps=4, size=(96, 64))
    edit.true_cfg_scale, edit.negative_prompt = 3.0, "a plain blue hat"
    check(dev, edit, true_cfg_scale=3.0, negative_prompt="a plain blue hat")


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize(
    "options",
    [{"scheduler": {"stochastic_sampling": True, "shift": 3.0}}, {"scheduler_class": FlowMatchLCMScheduler}],
)
def test_sampler_that_draws_noise_equals_the_pipeline(
    tmp_path: Path, arena: Arena, options: dict[str, Any], strength: float
) -> None:
    """At every step, from the request's own generator, after the noise for the first latents."""
    rig = make_rig(tmp_path / "stochastic", arena, **options)
    edit = rig.edit("noisy", seed=8, steps=5, size=(64, 96))
    edit.strength = strength
    check(rig, edit)
    rig.pages.close()


def test_batch_of_others_at_different_steps_changes_nothing(dev: Rig) -> None:
    """Edits of other sizes, strengths and guidance join and leave; each keeps its bytes, and equals the pipeline's."""
    shapes = [((128, 128), 4, 1.0), ((96, 160), 7, 0.5), ((64, 64), 2, 1.0), ((48, 176), 5, 0.8)]
    edits = [dev.edit(f"mixed-{i}", seed=i, steps=steps, size=size) for i, (size, steps, _) in enumerate(shapes)]
    for edit, (_, _, strength) in zip(edits, shapes, strict=True):
        edit.strength = strength
    edits[1].true_cfg_scale, edits[1].negative_prompt = 2.0, ""

    def expected(edit: Edit) -> Any:
        guided = {"true_cfg_scale": 2.0, "negative_prompt": ""} if edit.negative_prompt is not None else {}
        return dev.expected(edit, **guided)

    dev.assert_company_changes_nothing(edits, expected)
