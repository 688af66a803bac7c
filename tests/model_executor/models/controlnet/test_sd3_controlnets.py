"""ControlNets of Stable Diffusion 3: generations against diffusers' pipeline, edits against the inpainting pipeline
with the ControlNet put before its transformer, as diffusers has no pipeline of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from control_rig import (
    ControlledEdit,
    Steered,
    assert_kept_as_predicted,
    assert_ranks_share_it_bit_for_bit,
    lines,
    run_together,
)
from diffusers import (
    AutoencoderKL,
    SD3ControlNetModel,
    SD3MultiControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3InpaintPipeline,
)
from family_rigs import correct_sd3
from PIL import Image
from pipeline_rig import Rig, assert_same

from core.config import ControlNetConfig, ModelConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from model_executor.worker.loading.resident import ResidentModels
from tools.random_checkpoints import make_sd3
from tools.random_controlnets import make_sd3_controlnet

SIZE, NATIVE = (96, 64), (128, 128)
GUIDANCE = 3.0
NETS: dict[str, dict[str, Any]] = {
    "edges": {"seed": 1},
    "depth": {"seed": 2, "num_layers": 2},
    "pooled": {"seed": 3, "num_layers": 1, "force_zeros_for_pooled_projection": False},
}


class ControlRig(Rig):
    def __init__(self, folder: Path, arena: Arena) -> None:
        paths = {name: make_sd3_controlnet(folder / name, **options) for name, options in NETS.items()}
        nets = [ControlNetConfig(name, str(path)) for name, path in paths.items()]
        self.checkpoint = make_sd3(folder / "sd3")
        super().__init__(self.checkpoint, arena, StableDiffusion3InpaintPipeline, controlnets=nets)
        correct_sd3(self)
        self.nets = {name: SD3ControlNetModel.from_pretrained(path) for name, path in paths.items()}

    def steered(
        self, name: str, controls: Sequence[Steered], *, strength: float = 1.0, size: tuple[int, int] = SIZE
    ) -> ControlledEdit:
        edit = self.edit(name, size=size, seed=3, steps=5)
        edit.strength, edit.guidance_scale, edit.true_cfg_scale = strength, GUIDANCE, GUIDANCE
        edit.negative_prompt = "a plain blue hat"
        return ControlledEdit(edit, controls)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[ControlRig]:
    rig = ControlRig(tmp_path_factory.mktemp("control"), arena)
    yield rig
    rig.pages.close()


EDGES = Steered(lines(1, SIZE), "edges")
CASES = {
    "one": [EDGES],
    "with the pooled prompt": [Steered(EDGES.picture, "pooled", scale=0.7, start=0.2)],
    "two": [EDGES, Steered(lines(2, SIZE), "depth", scale=0.7, end=0.6)],
}


def vae_of(checkpoint: Path) -> AutoencoderKL:
    """A VAE whose samples are the mode of the posterior."""
    vae = AutoencoderKL.from_pretrained(checkpoint / "vae")
    encode = vae.encode

    def by_mode(image: torch.Tensor) -> Any:
        mode = encode(image).latent_dist.mode()
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: mode))

    vae.encode = by_mode
    return vae


@pytest.mark.parametrize("name", CASES)
def test_a_generation_equals_the_pipeline(rig: ControlRig, name: str) -> None:
    controls = CASES[name]
    edited = rig.steered(f"generation {name}", controls)
    edited.edit.template = edited.edit.mask = None  # type: ignore[assignment]
    ours = edited.run(rig)
    generator, shape = torch.Generator("cpu").manual_seed(3), (1, 16, SIZE[1] // 8, SIZE[0] // 8)
    _, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    nets = [rig.nets[each.net] for each in controls]
    one = len(nets) == 1
    parts = {name: part for name, part in rig.pipeline.components.items() if name not in ("vae", "transformer")}
    net = nets[0] if one else SD3MultiControlNetModel(nets)
    pipeline = StableDiffusion3ControlNetPipeline(
        **parts, vae=vae_of(rig.checkpoint), transformer=rig.pipeline.transformer, controlnet=net
    )
    pipeline.set_progress_bar_config(disable=True)
    values = {
        "control_image": [Image.fromarray(each.picture) for each in controls],
        "controlnet_conditioning_scale": [each.scale for each in controls],
        "control_guidance_start": [each.start for each in controls],
        "control_guidance_end": [each.end for each in controls],
    }
    expected = pipeline(
        prompt=edited.edit.prompt,
        negative_prompt=edited.edit.negative_prompt,
        num_inference_steps=5,
        guidance_scale=GUIDANCE,
        width=SIZE[0],
        height=SIZE[1],
        latents=noise,
        max_sequence_length=16,
        **{name: each[0] if one else each for name, each in values.items()},
    ).images[0]
    assert_same(ours, np.asarray(expected))


def test_an_edit_equals_the_inpainting_pipeline_with_the_controlnet(
    rig: ControlRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = rig.steered("edit", [EDGES], strength=0.8)
    ours = edited.run(rig)
    vae, transformer, net = rig.pipeline.vae, rig.pipeline.transformer, rig.nets["edges"]
    pixels = rig.pipeline.image_processor.preprocess(Image.fromarray(EDGES.picture), height=SIZE[1], width=SIZE[0])
    control = vae.encode(pixels).latent_dist.mode() * vae.config.scaling_factor
    forward = transformer.forward

    def steered(hidden_states: Any, timestep: Any, **options: Any) -> Any:
        seen = {"encoder_hidden_states": options["encoder_hidden_states"], "controlnet_cond": control}
        pooled = torch.zeros_like(options["pooled_projections"])
        common = {"hidden_states": hidden_states, "timestep": timestep}
        (added,) = net(**common, **seen, pooled_projections=pooled, return_dict=False)
        return forward(**common, **options, block_controlnet_hidden_states=added)

    monkeypatch.setattr(transformer, "forward", steered)
    expected = rig.expected(edited.edit, negative_prompt=edited.edit.negative_prompt)
    assert_same(ours, expected)


@pytest.mark.parametrize("net", ["edges", "pooled"])
def test_what_is_kept_is_predicted(rig: ControlRig, net: str) -> None:
    controls = [Steered(lines(1, NATIVE), net)] * 4
    assert_kept_as_predicted(rig, rig.steered("kept", controls, size=NATIVE))


@pytest.mark.parametrize("name", ["one", "with the pooled prompt"])
def test_ranks_share_it_bit_for_bit(rig: ControlRig, name: str) -> None:
    assert_ranks_share_it_bit_for_bit(rig, rig.steered("shared", CASES[name]))


def test_company_changes_nothing(rig: ControlRig) -> None:
    edits = [rig.steered(f"mixed-{name}", controls) for name, controls in CASES.items()]
    alone = [each.run(rig) for each in edits]
    for before, after in zip(alone, run_together(rig, edits), strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize(
    ("options", "scheduler", "said"),
    [
        ({}, {"use_dynamic_shifting": True}, "no pipeline with its dynamic shifting"),
        ({"joint_attention_dim": None}, {}, "it sees no text"),
        ({"extra_conditioning_channels": 1}, {}, "it sees the mask"),
        ({"pooled_projection_dim": 32}, {}, "pooled_projection_dim is 32, and 48"),
    ],
)
def test_one_that_does_not_fit_is_refused(
    rig: ControlRig, tmp_path: Path, options: dict[str, Any], scheduler: dict[str, Any], said: str
) -> None:
    net = ControlNetConfig("net", str(make_sd3_controlnet(tmp_path / "net", **options)))
    checkpoint = make_sd3(tmp_path / "sd3", scheduler=scheduler) if scheduler else rig.checkpoint
    model = ModelConfig(model=str(checkpoint), served_model_name="tiny", controlnets=(net,), dtype="float32")
    with pytest.raises(ConfigError, match=f"tiny: controlnets: net: .*{said}"):
        ResidentModels.open([model])
