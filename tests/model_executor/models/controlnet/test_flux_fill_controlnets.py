"""ControlNets of FLUX.1 Fill: whole edits through the runner against diffusers' modules in FluxFillPipeline, float32.
The library has no pipeline for both; one among its community examples draws and adds in this order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from control_rig import ControlledEdit, Steered, lines
from diffusers import FluxControlNetModel, FluxFillPipeline
from PIL import Image
from pipeline_rig import Rig, assert_same

from core.config import ControlNetConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from tools.random_checkpoints import make_flux_fill
from tools.random_controlnets import make_flux_controlnet

SIZE = (96, 64)
LATENTS = 64  # channels of the denoiser's input that are no condition
NETS: dict[str, dict[str, Any]] = {"edges": {}, "singles": {"layers": (0, 1), "seed": 4}}
CASES = {
    "edges": Steered(lines(1, SIZE), "edges"),
    "a single block alone": Steered(lines(1, SIZE), "singles", scale=0.8),
    "window": Steered(lines(1, SIZE), "edges", start=0.3, end=0.8),
}


class FillRig(Rig):
    def __init__(self, folder: Path, arena: Arena) -> None:
        paths = {
            name: make_flux_controlnet(folder / name, guidance_embeds=False, **options)
            for name, options in NETS.items()
        }
        nets = [ControlNetConfig(name, str(path)) for name, path in paths.items()]
        self.checkpoint = make_flux_fill(folder / "fill")
        super().__init__(self.checkpoint, arena, FluxFillPipeline, controlnets=nets)
        self.nets = {name: FluxControlNetModel.from_pretrained(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[FillRig]:
    rig = FillRig(tmp_path_factory.mktemp("fill"), arena)
    yield rig
    rig.pages.close()


@pytest.mark.parametrize("name", CASES)
def test_edit_equals_the_pipeline_with_the_controlnet(rig: FillRig, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steered = CASES[name]
    edited = ControlledEdit(rig.edit(name, seed=3, steps=4, size=SIZE), [steered])
    ours = edited.run(rig)
    edited.edit.num_controls = 0
    assert not np.array_equal(ours, rig.run(edited.edit)), "the ControlNet changes nothing"
    steer(rig, steered, monkeypatch)
    assert_same(ours, rig.expected(edited.edit))


def steer(rig: FillRig, steered: Steered, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the pipeline sample the control picture's latents before all others, and add what the ControlNet gives."""
    pipeline, net = rig.pipeline, rig.nets[steered.net]
    forward, prepare = pipeline.transformer.forward, pipeline.prepare_latents
    pixels = pipeline.image_processor.preprocess(Image.fromarray(steered.picture), height=SIZE[1], width=SIZE[0])
    control: list[torch.Tensor] = []
    steps: list[float] = []

    def prepare_latents(*arguments: Any, **options: Any) -> Any:
        (generator,) = (each for each in (*arguments, *options.values()) if isinstance(each, torch.Generator))
        vae = pipeline.vae
        sample = vae.encode(pixels).latent_dist.sample(generator)
        scaled = (sample - vae.config.shift_factor) * vae.config.scaling_factor
        control.append(pipeline._pack_latents(scaled, *scaled.shape))
        return prepare(*arguments, **options)

    def forward_steered(hidden_states: Any, **options: Any) -> Any:
        scale = steered.scale * steered.control.steers(len(steps), 4)
        steps.append(scale)
        seen = {name: options[name] for name in options if name not in ("guidance", "joint_attention_kwargs")}
        latents = hidden_states[..., :LATENTS]
        blocks, singles = net(latents, control[0], conditioning_scale=scale, **seen)
        added = {"controlnet_block_samples": blocks, "controlnet_single_block_samples": singles}
        return forward(hidden_states, **options, **added)

    monkeypatch.setattr(pipeline, "prepare_latents", prepare_latents)
    monkeypatch.setattr(pipeline.transformer, "forward", forward_steered)


def test_one_that_sees_the_condition_too_is_refused(rig: FillRig, tmp_path: Path, arena: Arena) -> None:
    net = ControlNetConfig("net", str(make_flux_controlnet(tmp_path / "net", in_channels=384)))
    with pytest.raises(ConfigError, match=r"net: .*in_channels is 384, and 64 of the transformer's are latents"):
        Rig(rig.checkpoint, arena, FluxFillPipeline, controlnets=[net])
