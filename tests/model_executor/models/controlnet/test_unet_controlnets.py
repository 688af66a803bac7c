"""ControlNets of Stable Diffusion 1 and 2: whole edits through the runner against diffusers' pipelines, float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    ControlNetModel,
    PNDMScheduler,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionInpaintPipeline,
)
from pipeline_rig import Rig, assert_same

from core.config import ControlNetConfig, ModelConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from core.messages.worker import Batch, StepPlan
from model_executor.models.controlnet import unet_controlnet
from model_executor.worker.loading.resident import ResidentModels
from tools.random_controlnets import make_sd_controlnet
from tools.random_unet_checkpoints import make_sd

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"scheduler_class": PNDMScheduler, "scheduler": {"skip_prk_steps": True}},
    "inpaint": {"in_channels": 9},
}
NETS = ("edges", "depth")
SIZE, NATIVE = (64, 96), (128, 128)
NO_CHECKER = {"safety_checker": None, "requires_safety_checker": False}


class ControlRig(Rig):
    """A model with two ControlNets."""

    def __init__(self, folder: Path, arena: Arena, **options: Any) -> None:
        paths = {name: make_sd_controlnet(folder / name, seed=seed) for seed, name in enumerate(NETS, 1)}
        controlnets = [ControlNetConfig(name, str(path)) for name, path in paths.items()]
        self.checkpoint = make_sd(folder / "sd", **options)
        super().__init__(self.checkpoint, arena, StableDiffusionInpaintPipeline, controlnets=controlnets, **NO_CHECKER)
        self.nets = {name: ControlNetModel.from_pretrained(path) for name, path in paths.items()}

    def steered(self, name: str, controls: Sequence[Steered], *, scale: float = 3.0, **options: Any) -> ControlledEdit:
        """scale: of guidance."""
        strength, info = options.pop("strength", 1.0), self.family.info("tiny")
        edit = self.edit(name, size=options.pop("size", SIZE), **options)
        edit.strength, edit.solver_order, edit.extra_steps = strength, info.solver_order, info.extra_steps
        edit.guidance_scale = edit.true_cfg_scale = scale
        edit.negative_prompt = "a plain blue hat" if scale > 1 else None
        return ControlledEdit(edit, controls)

    def pipeline_of(self, kind: Any, edited: ControlledEdit) -> Any:
        nets = [self.nets[each.net] for each in edited.controls]
        parts = self.pipeline.components | NO_CHECKER | {"controlnet": nets[0] if len(nets) == 1 else nets}
        return kind(**parts)

    def expected(self, edited: ControlledEdit) -> Any:  # type: ignore[override]
        edit = edited.edit
        options = {"negative_prompt": edit.negative_prompt, "guidance_scale": edit.guidance_scale}
        return expected(self, self.pipeline_of(StableDiffusionControlNetInpaintPipeline, edited), edited, **options)


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[ControlRig]:
    rig = ControlRig(tmp_path_factory.mktemp("control"), arena, **KINDS[request.param])
    yield rig
    rig.pages.close()


EDGES = Steered(lines(1, SIZE), "edges")
CASES: dict[str, tuple[list[Steered], dict[str, Any]]] = {
    "one": ([EDGES], {}),
    "scaled, without guidance": ([Steered(EDGES.picture, "edges", scale=0.5)], {"scale": 1.0}),
    "window and strength": ([Steered(EDGES.picture, "edges", start=0.3, end=0.8)], {"strength": 0.75}),
    "two": ([EDGES, Steered(lines(2, SIZE), "depth", scale=0.7, end=0.6)], {}),
    "one twice": ([EDGES, Steered(lines(2, SIZE), "edges", scale=0.7)], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_edit_equals_the_pipeline(rig: ControlRig, name: str) -> None:
    controls, options = CASES[name]
    edited = rig.steered(name, controls, seed=3, steps=4, **options)
    ours = edited.run(rig)
    assert_same(ours, rig.expected(edited))
    assert not np.array_equal(ours, rig.run(edited.edit)), "the ControlNet changes nothing"


def test_a_step_that_none_steers_says_nothing_of_what_others_take(rig: ControlRig) -> None:
    told = {}
    for name, start in (("late", 0.5), ("early", 0.0)):
        edited = rig.steered(name, [Steered(EDGES.picture, "edges", start=start)], seed=2, steps=2)
        rig.do(edited.encode_plan())
        (result,) = rig.do(StepPlan(seq=0, batches=(Batch(0, "controlnet", (0,), (edited.control_item(0),)),)))
        told[name] = len(result.items[0].tensors), result.items[0].is_usual
        for free in edited.edit.decode_plan().free:
            rig.store.free(free.key)
    assert told == {"late": (1, False), "early": (1, True)}


def test_what_is_kept_is_predicted(rig: ControlRig) -> None:
    assert_kept_as_predicted(
        rig, rig.steered("kept", [Steered(lines(1, NATIVE), "edges")] * 4, seed=2, steps=2, size=NATIVE)
    )


@pytest.mark.parametrize("name", ["one", "one twice"])
def test_ranks_share_it_bit_for_bit(rig: ControlRig, name: str) -> None:
    assert_ranks_share_it_bit_for_bit(rig, rig.steered("shared", CASES[name][0], seed=2, steps=2))


def test_ranks_share_rows_only_where_each_keeps_its_bits(rig: ControlRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in bfloat16 with AMX."""
    net = rig.models.controlnets.nets["tiny"][NETS[0]]
    assert net._is_row_invariant
    monkeypatch.setattr(unet_controlnet, "onednn_keeps_rows", lambda dtype: dtype != torch.float32)
    assert not net._is_row_invariant


def test_company_changes_nothing(rig: ControlRig) -> None:
    edits = [
        rig.steered(f"mixed-{name}", *CASES[name][:1], seed=2, steps=2)
        for name in ("one", "window and strength", "two")
    ]
    alone = [each.run(rig) for each in edits]
    for before, after in zip(alone, run_together(rig, edits), strict=True):
        assert np.array_equal(before, after)
    assert len(rig.store) == 0


def test_one_of_another_unet_is_refused(rig: ControlRig, tmp_path: Path) -> None:
    net = ControlNetConfig("wide", str(make_sd_controlnet(tmp_path / "wide", block_out_channels=(16, 32, 64))))
    model = ModelConfig(model=str(rig.checkpoint), served_model_name="tiny", controlnets=(net,), dtype="float32")
    with pytest.raises(ConfigError, match=r"tiny: controlnets: wide: .*block_out_channels"):
        ResidentModels.open([model])
