"""LoRA adapters: edits through the runner against diffusers' pipelines with the same adapter, and files that are
refused.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import peft
import pytest
import torch
from adapters import make_kohya_lora, make_kohya_unet_lora, make_lora, make_peft_lora
from diffusers import (
    Flux2KleinInpaintPipeline,
    FluxFillPipeline,
    FluxInpaintPipeline,
    QwenImageInpaintPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
    ZImageInpaintPipeline,
)
from edits import Edit
from family_rigs import KontextAtSize
from pipeline_rig import Rig, assert_same
from safetensors.torch import load_file, save_file

from core.config import AdapterConfig, ModelConfig
from core.errors import ConfigError
from core.handles import TensorKey
from core.ipc.shared_array import Arena
from core.patches import Patch, patch_set
from model_executor.worker.loading.resident import ResidentModels
from tools.random_checkpoints import (
    make_flux,
    make_flux_fill,
    make_flux_kontext,
    make_klein,
    make_qwen,
    make_sd3,
    make_z_image,
)
from tools.random_unet_checkpoints import make_sd, make_sdxl

FAMILIES: dict[str, tuple[Callable[[Path], Path], Any]] = {
    "flux-fill": (lambda path: make_flux_fill(path, guidance_embeds=True), FluxFillPipeline),
    "flux": (make_flux, FluxInpaintPipeline),
    "flux-kontext": (make_flux_kontext, KontextAtSize),
    "klein": (make_klein, Flux2KleinInpaintPipeline),
    "sd3": (make_sd3, StableDiffusion3InpaintPipeline),
    "qwen-image": (make_qwen, QwenImageInpaintPipeline),
    "z-image": (make_z_image, ZImageInpaintPipeline),
    "sd-inpaint": (lambda path: make_sd(path, in_channels=9), StableDiffusionInpaintPipeline),
    "sdxl": (make_sdxl, StableDiffusionXLInpaintPipeline),
}
UNETS: dict[Any, dict[str, Any]] = {
    StableDiffusionInpaintPipeline: {"safety_checker": None, "requires_safety_checker": False},
    StableDiffusionXLInpaintPipeline: {"add_watermarker": False},
}
TEXT_PARTS = {"sd-inpaint": ("text_encoder",), "sdxl": ("text_encoder", "text_encoder_2")}


Scales = Mapping[str, float]
"""Adapter's name -> its scale."""


class AdaptedEdit(Edit):
    scales: Scales


class AdaptedRig(Rig):
    """A rig with adapters, of which diffusers' pipeline uses those that an edit has. files: adapter name -> file."""

    def __init__(self, checkpoint: Path, arena: Arena, pipeline: Any, files: dict[str, Path]) -> None:
        adapters = [AdapterConfig(name, str(path)) for name, path in files.items()]
        super().__init__(checkpoint, arena, pipeline, adapters, **UNETS.get(pipeline, {}))
        self._files_to_load = dict(files)  # by the pipeline, once
        self.patch_ids = {info.name: info.patch for info in self.models.ready(0).models if info.parent}
        self._fix_shift()

    def _fix_shift(self) -> None:
        """diffusers' SD3 pipeline subtracts the shift when it encodes, but up to 0.42 does not add it here."""
        if isinstance(self.pipeline, StableDiffusion3InpaintPipeline):
            vae = self.pipeline.vae
            decode, shift = vae.decode, vae.config.shift_factor
            vae.decode = lambda latents, **options: decode(latents + shift, **options)

    def make(self, name: str, scales: Scales, size: tuple[int, int] = (96, 64), steps: int = 4) -> AdaptedEdit:
        """An edit, with guidance for families with classifier-free guidance."""
        edit = AdaptedEdit(self.arena, self.space, name, seed=steps, steps=steps, size=size, prompt="a red hat")
        edit.scales = scales
        edit.patches = patch_set(Patch(self.patch_ids[adapter], scale) for adapter, scale in scales.items())
        if self.family.info("").is_guidance_cfg:
            edit.guidance_scale = edit.true_cfg_scale = 3.0
            edit.negative_prompt = ""
        return edit

    def check(self, edit: AdaptedEdit, ours: np.ndarray[Any, np.dtype[np.uint8]], steps_without: int = 0) -> None:
        """steps_without: first steps, and text encoders if there are any, that do not have the edit's adapters."""
        with catch_warnings():
            simplefilter("ignore")  # peft asks whether several adapters are meant
            while self._files_to_load:
                name, path = self._files_to_load.popitem()
                self.pipeline.load_lora_weights(str(path), adapter_name=name)
        self._use({} if steps_without else edit.scales)

        def after_step(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step + 1 == steps_without:
                self._use(edit.scales)
            return {}

        assert_same(ours, self.expected(edit, **({"callback_on_step_end": after_step} if steps_without else {})))

    def _use(self, scales: Scales) -> None:
        if scales:
            self.pipeline.enable_lora()
            self.pipeline.set_adapters(list(scales), list(scales.values()))
        else:
            self.pipeline.disable_lora()


@pytest.fixture(scope="module", params=FAMILIES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena) -> Iterator[AdaptedRig]:
    """An adapter of every layer, including a UNet's text encoders, and one of attention only, whose alpha differs from
    its rank.
    """
    make, pipeline = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("adapters")
    checkpoint = make(folder / request.param)
    alpha = 7.0 if request.param.startswith("flux") else None  # diffusers' other loaders know none in this layout
    attention = r".*(attn\d?|attention)\..*"
    files = {
        "whole": make_lora(folder / "whole.safetensors", checkpoint, text_parts=TEXT_PARTS.get(request.param, ())),
        "attention": make_lora(folder / "attention.safetensors", checkpoint, attention, seed=2, alpha=alpha),
    }
    rig = AdaptedRig(checkpoint, arena, pipeline, files)
    yield rig
    rig.pages.close()


CHOICES: dict[str, Scales] = {
    "none": {},
    "one of every layer": {"whole": 1.0},
    "one of attention": {"attention": 1.0},
    "weaker": {"whole": 0.4},
    "reversed": {"attention": -0.5},
    "two": {"whole": 0.7, "attention": 1.2},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_edit_equals_the_pipeline_with_its_adapters(rig: AdaptedRig, choice: str) -> None:
    edit = rig.make(f"alone-{choice}", CHOICES[choice])
    rig.check(edit, rig.run(edit))


def test_edits_of_other_adapters_and_of_none_change_nothing(rig: AdaptedRig) -> None:
    """Up to four share a step. They join and leave at other steps, with other sizes."""
    shapes = [((96, 64), 4), ((64, 64), 3), ((96, 64), 5), ((32, 96), 3), ((96, 64), 4), ((64, 32), 2)]
    each = zip(CHOICES.values(), shapes, strict=True)
    edits = [rig.make(f"mixed-{i}", scales, *shape) for i, (scales, shape) in enumerate(each)]
    alone = [rig.run(edit) for edit in edits]
    for edit, before, together in zip(edits, alone, rig.run_together(edits), strict=True):
        assert np.array_equal(together, before)
        rig.check(edit, together)
    assert len(rig.store) == 0


def test_first_steps_may_have_no_adapters(rig: AdaptedRig) -> None:
    """As while these are loading; also where a rank's death has such steps run again later."""
    edit = rig.make("late", {"whole": 0.7, "attention": 1.2})
    patches, edit.patches = edit.patches, ()
    rig.do(edit.encode_plan())
    for step in (0, 1, 2, 1, 2, *range(3, edit.num_steps)):
        edit.patches = patches if step >= 2 else ()
        rig.do(edit.denoise_plan(step))
    rig.do(edit.decode_plan())
    rig.check(edit, edit.result(), steps_without=2)
    assert len(rig.store) == 0


def test_an_adapter_that_is_not_loaded_fails_its_own_request(rig: AdaptedRig) -> None:
    """No pass leaves it out without a word."""
    good, bad = rig.make("good", {"whole": 1.0}), rig.make("bad", {})
    rig.do(good.encode_plan())
    rig.do(bad.encode_plan())
    bad.patches = (Patch("gone"),)
    for batch in bad.encode_plan().batches[:1], (Edit.denoise_batch([bad, good], {good: 0, bad: 0}),):
        failures = {item.request_id: item.failure for item in rig.runner.run(*batch).items}
        failure = failures.pop("bad")
        assert failure is not None
        assert (failure.kind, failure.param) == ("invalid_request", "lora")
        assert failures in ({}, {"good": None})
    for edit in (good, bad):
        rig.store.free(TensorKey(edit.request_id, "", ""))


def test_prompts_are_embedded_again_only_where_text_encoders_change(rig: AdaptedRig) -> None:
    changes_text = isinstance(rig.pipeline, tuple(UNETS))
    patches = rig.make("text", {"whole": 0.5, "attention": 1.0}).patches
    whole = tuple(patch for patch in patches if patch.id == rig.patch_ids["whole"])
    assert rig.family.patches_of_text(patches) == (whole if changes_text else ())


def test_adapters_are_listed_after_their_model(rig: AdaptedRig) -> None:
    infos = {info.name: info for info in rig.models.ready(0).models}
    assert list(infos) == ["tiny", "whole", "attention"]
    assert [info.parent for info in infos.values()] == ["", "tiny", "tiny"]
    assert [info.patch for info in infos.values()] == ["", *rig.patch_ids.values()]


# ---------------------------------------------------------------------------------------------------- kinds of files


@pytest.fixture
def fill(tiny_checkpoint: Path) -> Path:
    return tiny_checkpoint


@pytest.mark.parametrize("name", ["flux-fill", "klein"])
def test_layers_named_by_kohya_are_found(name: str, tmp_path: Path, arena: Arena) -> None:
    make, pipeline = FAMILIES[name]
    file = make_kohya_lora(tmp_path / "kohya.safetensors", mlp=6 if name == "klein" else 4)
    rig = AdaptedRig(make(tmp_path / "model"), arena, pipeline, {"kohya": file})
    edit = rig.make("kohya", {"kohya": 1.0})
    rig.check(edit, rig.run(edit))
    rig.pages.close()


TEXT = "text_model_encoder_layers_0"
SD_LAYERS = {
    "lora_unet_conv_in": "unet.conv_in",
    "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_out_0": (
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0"
    ),
    "lora_unet_down_blocks_1_attentions_0_proj_in": "unet.down_blocks.1.attentions.0.proj_in",
    "lora_unet_mid_block_attentions_0_transformer_blocks_0_ff_net_0_proj": (
        "unet.mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj"
    ),
    "lora_unet_up_blocks_1_resnets_0_conv1": "unet.up_blocks.1.resnets.0.conv1",
    "lora_unet_up_blocks_1_resnets_0_time_emb_proj": "unet.up_blocks.1.resnets.0.time_emb_proj",
    f"lora_te_{TEXT}_self_attn_q_proj": "text_encoder.text_model.encoder.layers.0.self_attn.q_proj",
    f"lora_te_{TEXT}_self_attn_out_proj": "text_encoder.text_model.encoder.layers.0.self_attn.out_proj",
    f"lora_te_{TEXT}_mlp_fc1": "text_encoder.text_model.encoder.layers.0.mlp.fc1",
}
SDXL_LAYERS = {
    "lora_unet_input_blocks_3_1_transformer_blocks_0_attn2_to_k": (
        "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    ),
    "lora_unet_input_blocks_3_0_in_layers_2": "unet.down_blocks.1.resnets.0.conv1",
    "lora_unet_middle_block_1_transformer_blocks_1_ff_net_2": (
        "unet.mid_block.attentions.0.transformer_blocks.1.ff.net.2"
    ),
    "lora_unet_output_blocks_1_1_proj_out": "unet.up_blocks.0.attentions.1.proj_out",
    f"lora_te1_{TEXT}_self_attn_v_proj": "text_encoder.text_model.encoder.layers.0.self_attn.v_proj",
    f"lora_te1_{TEXT}_self_attn_out_proj": "text_encoder.text_model.encoder.layers.0.self_attn.out_proj",
    f"lora_te2_{TEXT}_mlp_fc2": "text_encoder_2.text_model.encoder.layers.0.mlp.fc2",
}


@pytest.mark.parametrize(
    ("make", "pipeline", "layers"),
    [
        (make_sd, StableDiffusionInpaintPipeline, SD_LAYERS),
        (make_sdxl, StableDiffusionXLInpaintPipeline, SDXL_LAYERS),
    ],
)
def test_kohyas_unets_and_text_encoders_are_found(
    tmp_path: Path, arena: Arena, make: Callable[[Path], Path], pipeline: Any, layers: dict[str, str]
) -> None:
    """SDXL's have the names and numbers of its first implementation."""
    checkpoint = make(tmp_path / "model")
    file = make_kohya_unet_lora(tmp_path / "kohya.safetensors", checkpoint, layers)
    rig = AdaptedRig(checkpoint, arena, pipeline, {"kohya": file})
    edit, plain = rig.make("kohya", {"kohya": 1.0}), rig.make("plain", {})
    rig.check(edit, ours := rig.run(edit))
    assert np.abs(ours.astype(int) - rig.run(plain)).mean() > 1
    rig.pages.close()


def test_an_adapter_of_dev_fits_fill(fill: Path, tmp_path: Path, arena: Arena) -> None:
    """Fill's first layer has more inputs, which the adapter does not cover."""
    dev = make_flux(tmp_path / "dev", guidance_embeds=True)
    rig = AdaptedRig(fill, arena, FluxFillPipeline, {"dev": make_lora(tmp_path / "dev.safetensors", dev)})
    edit = rig.make("dev", {"dev": 1.0})
    rig.check(edit, rig.run(edit))
    rig.pages.close()


def test_a_folder_of_peft_is_read_with_its_scales(fill: Path, tmp_path: Path, arena: Arena) -> None:
    folder = make_peft_lora(tmp_path / "peft", fill, r".*(to_q|proj_mlp)", alpha=6.0)
    config = peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=["to_q", "proj_mlp"], alpha_pattern={"proj_mlp": 12.0})
    rig = AdaptedRig(fill, arena, FluxFillPipeline, {"peft": folder})
    edit = rig.make("peft", {"peft": 1.0})
    ours = rig.run(edit)
    model = peft.PeftModel(rig.pipeline.transformer, config)
    weights = load_file(folder / "adapter_model.safetensors")
    assert peft.set_peft_model_state_dict(model, weights).unexpected_keys == []
    assert_same(ours, rig.expected(edit))
    rig.pages.close()


# ------------------------------------------------------------------------------------------------ what is refused


def load(checkpoint: Path, path: Path) -> None:
    adapter = AdapterConfig("shirt", str(path))
    ResidentModels.open([ModelConfig(model=str(checkpoint), served_model_name="tiny", adapters=(adapter,))]).load_all()


def refused(checkpoint: Path, path: Path, why: str) -> None:
    """Assert that it is refused in one line with adapter, file and reason."""
    with pytest.raises(ConfigError, match=rf"cannot use adapter shirt of {path}.*{why}") as caught:
        load(checkpoint, path)
    assert "\n" not in str(caught.value)


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a pickle was read",)


@pytest.mark.parametrize("name", ["pytorch_lora_weights.bin", "shirt.pt", "shirt.ckpt"])
def test_pickles_are_refused_by_name(fill: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    for path in (tmp_path / name, tmp_path):
        refused(fill, path, f"only safetensors weights are read, as unpickling {name} could run code")


def test_a_pickle_by_another_name_is_not_read(fill: Path, tmp_path: Path) -> None:
    (tmp_path / "shirt.safetensors").write_bytes(pickle.dumps(Bomb()))
    refused(fill, tmp_path / "shirt.safetensors", "")


def test_files_that_are_no_adapter_are_refused(fill: Path, tmp_path: Path) -> None:
    refused(fill, tmp_path / "nowhere.safetensors", "there is no such file")
    refused(fill, tmp_path, "a LoRA is a .safetensors file, or a folder that holds one")
    for name in ("a.safetensors", "b.safetensors"):
        make_lora(tmp_path / name, fill)
    refused(fill, tmp_path, "it holds a.safetensors, b.safetensors; name one of these files")
    shutil.copy(fill / "vae/diffusion_pytorch_model.safetensors", tmp_path / "vae.safetensors")
    refused(fill, tmp_path / "vae.safetensors", "is no part of a LoRA")


def test_an_adapter_for_another_model(fill: Path, tmp_path: Path) -> None:
    sd3, wide = make_sd3(tmp_path / "sd3"), make_flux_fill(tmp_path / "wide", width=96)
    other = make_lora(tmp_path / "other.safetensors", sd3, r".*attn\..*")
    refused(fill, other, "transformer_blocks.*which is no linear layer of this transformer")
    other = make_lora(tmp_path / "wide.safetensors", wide, "context_embedder")
    refused(fill, other, "it takes context_embedder from 96 to 64 numbers, the layer from 64 to 64")
    narrow = load_file(make_lora(tmp_path / "narrow.safetensors", sd3, "context_embedder"))
    narrow = {key: x[:, :48].contiguous() if "lora_A" in key else x for key, x in narrow.items()}
    save_file(narrow, tmp_path / "narrow.safetensors")
    refused(sd3, tmp_path / "narrow.safetensors", "it takes context_embedder from 48 to ")


def test_an_adapter_for_another_unet(tmp_path: Path) -> None:
    """Its layers that read text expect text of another width."""
    sd, sdxl = make_sd(tmp_path / "sd"), make_sdxl(tmp_path / "sdxl")
    other = make_lora(tmp_path / "other.safetensors", sd, r"mid_block.*attn2\.to_k")
    refused(sdxl, other, "attn2.to_k from 24 to 32 numbers, the layer from 48 to 32; it is for another model")
    norm = {
        "unet.conv_norm_out.lora_A.weight": torch.ones(4, 16),
        "unet.conv_norm_out.lora_B.weight": torch.ones(16, 4),
    }
    save_file(norm, tmp_path / "norm.safetensors")
    refused(sd, tmp_path / "norm.safetensors", "conv_norm_out, which is no linear layer or convolution of this model")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("transformer.proj_out.dora_scale", "DoRA"),
        ("transformer.proj_out.lora_magnitude_vector", "DoRA"),
        ("transformer.proj_out.lokr_w1", "LoKr"),
        ("transformer.proj_out.lora_B.bias", "proj_out.lora_B.bias is no part of a LoRA"),
        ("transformer.x_embedder.lora_A.weight", "one of lora_A and lora_B for x_embedder only"),
        ("text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight", "changes the text encoder"),
    ],
)
def test_additions_that_no_layer_can_apply_are_refused(fill: Path, tmp_path: Path, key: str, why: str) -> None:
    path = make_lora(tmp_path / "odd.safetensors", fill, "proj_out")
    tensors = load_file(path)
    save_file(tensors | {key: torch.ones(4, 64)}, path)
    refused(fill, path, why)


def test_kohyas_text_encoder_is_refused_too(fill: Path, tmp_path: Path) -> None:
    refused(fill, make_kohya_lora(tmp_path / "text.safetensors", text=True), "changes the text encoder")


def test_a_norm_that_a_control_lora_replaces(fill: Path, tmp_path: Path) -> None:
    path = make_lora(tmp_path / "control.safetensors", fill, "proj_out")
    norm = {"transformer.transformer_blocks.0.attn.norm_q.weight": torch.ones(32)}
    save_file(load_file(path) | norm, path)
    refused(fill, path, "norm_q.weight is no part of a LoRA")


def test_adapters_need_names_of_their_own() -> None:
    one = AdapterConfig("shirt", "a.safetensors")
    with pytest.raises(ConfigError, match="--lora shirt"):
        ModelConfig(adapters=(one, one))
    with pytest.raises(ConfigError, match="--lora tiny"):
        ModelConfig(served_model_name="tiny", adapters=(AdapterConfig("tiny", "a.safetensors"),))
