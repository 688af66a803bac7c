"""ControlNets of Stable Diffusion XL: whole edits through the runner against diffusers' pipelines, float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from control_rig import ControlledEdit, Steered, assert_kept_as_predicted, expected, lines, run_together
from diffusers import (
    ControlNetModel,
    ControlNetUnionModel,
    EulerDiscreteScheduler,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLControlNetUnionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
)
from pipeline_rig import Rig, assert_same

from core.config import ControlNetConfig, ModelConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from model_executor.worker.loading.resident import ResidentModels
from tools.random_controlnets import make_sdxl_controlnet
from tools.random_unet_checkpoints import make_sdxl

SIZE, NATIVE = (64, 96), (128, 128)
TYPES = {"union": {"canny": 1, "depth map": 3}}


class ControlRig(Rig):
    def __init__(self, folder: Path, arena: Arena) -> None:
        paths = {name: make_sdxl_controlnet(folder / name, seed=seed) for seed, name in enumerate(("edges", "depth"))}
        paths["union"] = make_sdxl_controlnet(folder / "union", seed=4, num_modes=4)
        self.union = paths["union"]
        nets = [ControlNetConfig(name, str(path), TYPES.get(name, {})) for name, path in paths.items()]
        checkpoint = make_sdxl(folder / "sdxl", scheduler_class=EulerDiscreteScheduler)
        super().__init__(checkpoint, arena, StableDiffusionXLInpaintPipeline, controlnets=nets, add_watermarker=False)
        self.nets = {name: ControlNetModel.from_pretrained(paths[name]) for name in ("edges", "depth")}
        self.nets["union"] = ControlNetUnionModel.from_pretrained(paths["union"])

    def steered(self, name: str, controls: Sequence[Steered], *, scale: float = 3.0, **options: Any) -> ControlledEdit:
        """scale: of guidance."""
        strength = options.pop("strength", 1.0)
        edit = self.edit(name, size=options.pop("size", SIZE), **options)
        edit.strength, edit.guidance_scale, edit.true_cfg_scale = strength, scale, scale
        edit.negative_prompt = "a plain blue hat" if scale > 1 else None
        return ControlledEdit(edit, controls)

    def expected(self, edited: ControlledEdit) -> Any:  # type: ignore[override]
        edit, modes = edited.edit, [each.mode for each in edited.controls]
        options: dict[str, Any] = {"negative_prompt": edit.negative_prompt, "guidance_scale": edit.guidance_scale}
        nets = [self.nets[each.net] for each in edited.controls]
        kind: Any = StableDiffusionXLControlNetInpaintPipeline
        if modes[0] is not None:
            kind, nets = StableDiffusionXLControlNetUnionInpaintPipeline, nets[:1]
            options["control_mode"] = modes
        parts = self.pipeline.components | {"controlnet": nets[0] if len(nets) == 1 else nets}
        return expected(self, kind(**parts, add_watermarker=False), edited, **options)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[ControlRig]:
    rig = ControlRig(tmp_path_factory.mktemp("control"), arena)
    yield rig
    rig.pages.close()


EDGES = Steered(lines(1, SIZE), "edges")
CASES: dict[str, tuple[list[Steered], dict[str, Any]]] = {
    "one": ([EDGES], {}),
    "two": ([EDGES, Steered(lines(2, SIZE), "depth", scale=0.7, end=0.6)], {"strength": 0.75}),
    "union": ([Steered(EDGES.picture, "union", scale=0.8, end=0.7, mode=3)], {}),
    "union of two": ([Steered(EDGES.picture, "union", 0.6, mode=1), Steered(lines(2, SIZE), "union", mode=3)], {}),
    "union of windows": (
        [Steered(EDGES.picture, "union", end=0.5, mode=1), Steered(lines(2, SIZE), "union", start=0.3, mode=3)],
        {"scale": 1.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_edit_equals_the_pipeline(rig: ControlRig, name: str) -> None:
    controls, options = CASES[name]
    edited = rig.steered(name, controls, seed=3, steps=4, **options)
    ours = edited.run(rig)
    assert_same(ours, rig.expected(edited))
    assert not np.array_equal(ours, rig.run(edited.edit)), "the ControlNet changes nothing"


def test_what_is_kept_is_predicted(rig: ControlRig) -> None:
    controls = [Steered(lines(1, NATIVE), "union", mode=number) for number in range(4)]
    assert_kept_as_predicted(rig, rig.steered("kept", controls, seed=2, steps=2, size=NATIVE))


def test_company_changes_nothing(rig: ControlRig) -> None:
    edits = [rig.steered(f"mixed-{name}", CASES[name][0], seed=2, steps=2) for name in ("one", "two", "union of two")]
    alone = [each.run(rig) for each in edits]
    for before, after in zip(alone, run_together(rig, edits), strict=True):
        assert np.array_equal(before, after)


def test_a_union_goes_with_no_unet_that_sees_the_mask(rig: ControlRig, tmp_path: Path) -> None:
    checkpoint = make_sdxl(tmp_path / "inpaint", in_channels=9)
    net = ControlNetConfig("union", str(rig.union), {"canny": 0})
    with pytest.raises(ConfigError, match=r"controlnets: union: .* sees the mask"):
        ResidentModels.open([ModelConfig(model=str(checkpoint), controlnets=(net,), dtype="float32")])
