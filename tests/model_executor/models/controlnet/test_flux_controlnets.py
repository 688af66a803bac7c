"""ControlNets of FLUX.1: whole edits through the runner against diffusers' pipelines, float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from control_rig import (
    ControlledEdit,
    Steered,
    assert_kept_as_predicted,
    assert_ranks_share_it_bit_for_bit,
    expected,
    lines,
    run_together,
)
from diffusers import (
    FluxControlNetInpaintPipeline,
    FluxControlNetModel,
    FluxInpaintPipeline,
    FluxMultiControlNetModel,
)
from pipeline_rig import Rig, assert_same

from core.config import ControlNetConfig, ModelConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.controlnet.registry import make_controlnet
from tools.random_checkpoints import make_flux
from tools.random_controlnets import make_flux_controlnet

SIZE, NATIVE = (96, 64), (128, 128)
NETS: dict[str, dict[str, Any]] = {
    "edges": {"guidance_embeds": True},
    "depth": {"guidance_embeds": True, "seed": 3},
    "union": {"num_mode": 4, "guidance_embeds": True},
    "doubles": {"layers": (2, 0), "guidance_embeds": False},
}

PARTS = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")


class ControlRig(Rig):
    def __init__(self, folder: Path, arena: Arena) -> None:
        self.paths = {name: make_flux_controlnet(folder / name, **options) for name, options in NETS.items()}
        types = {"union": {"canny": 0, "depth map": 2}}
        nets = [ControlNetConfig(name, str(path), types.get(name, {})) for name, path in self.paths.items()]
        self.checkpoint = make_flux(folder / "flux", guidance_embeds=True)
        super().__init__(self.checkpoint, arena, FluxInpaintPipeline, controlnets=nets)
        self.nets = {name: FluxControlNetModel.from_pretrained(path) for name, path in self.paths.items()}

    def steered(self, name: str, controls: Sequence[Steered], **options: Any) -> ControlledEdit:
        strength = options.pop("strength", 1.0)
        edit = self.edit(name, size=options.pop("size", SIZE), **options)
        edit.strength, edit.guidance_scale = strength, 3.5
        return ControlledEdit(edit, controls)

    def expected(self, edited: ControlledEdit) -> Any:  # type: ignore[override]
        controls = edited.controls
        nets = [self.nets[each.net] for each in controls]
        are_one = len({each.net for each in controls}) == 1 and len(controls) > 1
        several = FluxMultiControlNetModel(nets[:1] if are_one else nets)
        parts = {name: part for name, part in self.pipeline.components.items() if name in PARTS}
        pipeline = FluxControlNetInpaintPipeline(**parts, controlnet=several if len(nets) > 1 else nets[0])
        modes = [each.mode for each in controls]
        mode = {} if modes == [None] else {"control_mode": modes if len(modes) > 1 else modes[0]}
        options = {"guidance_scale": edited.edit.guidance_scale, "max_sequence_length": 16}
        return expected(self, pipeline, edited, **options, **mode)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[ControlRig]:
    rig = ControlRig(tmp_path_factory.mktemp("control"), arena)
    yield rig
    rig.pages.close()


EDGES = Steered(lines(1, SIZE), "edges")
CASES: dict[str, tuple[list[Steered], dict[str, Any]]] = {
    "one": ([EDGES], {}),
    "without single blocks": ([Steered(EDGES.picture, "doubles", scale=0.7)], {}),
    "window and strength": ([Steered(EDGES.picture, "edges", start=0.3, end=0.8)], {"strength": 0.7}),
    "mode": ([Steered(EDGES.picture, "union", mode=2)], {}),
    "two modes": ([Steered(EDGES.picture, "union", mode=0), Steered(lines(2, SIZE), "union", 0.6, mode=2)], {}),
    "two": ([EDGES, Steered(lines(2, SIZE), "depth", scale=0.7, end=0.6)], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_edit_equals_the_pipeline(rig: ControlRig, name: str) -> None:
    controls, options = CASES[name]
    edited = rig.steered(name, controls, seed=3, steps=4, **options)
    ours = edited.run(rig)
    assert_same(ours, rig.expected(edited))
    edited.edit.num_controls = 0
    assert not np.array_equal(ours, rig.run(edited.edit)), "the ControlNet changes nothing"


@pytest.mark.parametrize(("net", "mode"), [("edges", None), ("union", 0), ("doubles", None)])
def test_what_is_kept_is_predicted(rig: ControlRig, net: str, mode: int | None) -> None:
    controls = [Steered(lines(1, NATIVE), net, mode=mode)] * 4
    edited = rig.steered("kept", controls, seed=2, steps=2, size=NATIVE)
    edited.edit.negative_prompt, edited.edit.true_cfg_scale = "a plain blue hat", 2.0
    assert_kept_as_predicted(rig, edited)


@pytest.mark.parametrize("name", ["one", "mode", "two modes"])
def test_ranks_share_it_bit_for_bit(rig: ControlRig, name: str) -> None:
    edited = rig.steered("shared", CASES[name][0], seed=2, steps=2)
    edited.edit.negative_prompt, edited.edit.true_cfg_scale = "a plain blue hat", 2.0
    assert_ranks_share_it_bit_for_bit(rig, edited)


def test_company_changes_nothing(rig: ControlRig) -> None:
    edits = [rig.steered(f"mixed-{name}", CASES[name][0], seed=2, steps=2) for name in ("one", "mode", "two")]
    edits.append(rig.steered("larger", [Steered(lines(1, (128, 96)), "edges")], seed=4, steps=2, size=(128, 96)))
    alone = [each.run(rig) for each in edits]
    for before, after in zip(alone, run_together(rig, edits), strict=True):
        assert np.array_equal(before, after)
    assert len(rig.store) == 0


def test_only_transformers_of_one_depth_share_a_controlnet(rig: ControlRig) -> None:
    """It adds to other blocks of a deeper one."""
    model = rig.family.steered
    assert model is not None
    deeper = replace(model, config={**model.config, "num_layers": model.config["num_layers"] + 1})
    net = ModelCheckpoint.open(ModelConfig(model=str(rig.paths["edges"]), dtype="float32"))
    recipes = [make_controlnet(net, each, ()).recipe for each in (model, replace(model), deeper)]
    assert recipes[0] == recipes[1] != recipes[2]


@pytest.mark.parametrize(
    ("options", "types", "said"),
    [
        ({"num_mode": 4}, {}, "it is for 4 kinds of control pictures, by mode; name them"),
        ({"num_mode": 4}, {"a": 4}, "it has no mode 4, but 0 to 3"),
        ({}, {"a": 0}, "it is for a single kind of control pictures"),
        ({"pooled_projection_dim": 32}, {}, "pooled_projection_dim is 32, and"),
        ({"conditioning_embedding_channels": 16}, {}, "it sees pixels"),
    ],
)
def test_one_that_does_not_fit_is_refused(
    rig: ControlRig, tmp_path: Path, arena: Arena, options: dict[str, Any], types: dict[str, int], said: str
) -> None:
    net = ControlNetConfig("net", str(make_flux_controlnet(tmp_path / "net", **options)), types)
    with pytest.raises(ConfigError, match=f"tiny: controlnets: net: .*{said}"):
        Rig(rig.checkpoint, arena, FluxInpaintPipeline, controlnets=[net])
