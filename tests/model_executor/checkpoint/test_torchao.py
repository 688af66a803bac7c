"""Denoisers quantised by torchao: against diffusers' pipelines with the same quantisation, with adapters, and loaded
from quantised checkpoints.

Skipped if the extra `quantization` is not installed; the extra `test` includes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import make_lora
from diffusers import (
    EulerAncestralDiscreteScheduler,
    Flux2KleinInpaintPipeline,
    FluxInpaintPipeline,
    PipelineQuantizationConfig,
    StableDiffusion3InpaintPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
    TorchAoConfig,
    ZImageInpaintPipeline,
)
from edits import Edit
from pipeline_rig import Rig, assert_same
from torch import nn

from core.config import AdapterConfig, ModelConfig
from core.ipc.shared_array import Arena
from core.patches import Patch, PatchSet, patch_set
from model_executor.checkpoint import quantization
from model_executor.checkpoint.fingerprint import fingerprint
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.checkpoint.parameter_count import count_parameters
from model_executor.checkpoint.quantization import Int8Linear, for_device, pack_int8
from model_executor.kernels.cpu_kernels import best_kernels
from model_executor.kernels.linear import fused_linear
from model_executor.kernels.linear_groups import ProductGroup
from model_executor.kernels.low_rank import LowRank, Segment
from model_executor.worker.loading.resident import ResidentModels, edit_once
from tools.random_checkpoints import make_flux, make_klein, make_sd3, make_z_image
from tools.random_unet_checkpoints import make_sd, make_sdxl

torchao = pytest.importorskip("torchao.quantization")

FAMILIES: dict[str, tuple[Callable[[Path], Path], Any]] = {
    "flux": (lambda path: make_flux(path, guidance_embeds=True), FluxInpaintPipeline),
    "klein": (make_klein, Flux2KleinInpaintPipeline),
    "sd3": (make_sd3, StableDiffusion3InpaintPipeline),
    "z-image": (make_z_image, ZImageInpaintPipeline),
    "sd": (lambda path: make_sd(path, in_channels=9), StableDiffusionInpaintPipeline),
    "sdxl": (
        lambda path: make_sdxl(path, scheduler_class=EulerAncestralDiscreteScheduler),
        StableDiffusionXLInpaintPipeline,
    ),
}


def config() -> TorchAoConfig:
    return TorchAoConfig(torchao.Int8WeightOnlyConfig(set_inductor_config=False))


class QuantizedRig(Rig):
    """Our runner and the pipeline, quantised alike, with an adapter for every layer."""

    def __init__(self, checkpoint: Path, arena: Arena, pipeline: Any, lora: Path) -> None:
        self.part = "unet" if (checkpoint / "unet").is_dir() else "transformer"
        wanted = PipelineQuantizationConfig(quant_mapping={self.part: config()})
        adapters = [AdapterConfig("shirt", str(lora))]
        parts: dict[str, Any] = {"quantization_config": wanted, "dtype": torch.float32}  # by default bfloat16
        unsafe = {"safety_checker": None, "requires_safety_checker": False}
        self.others = unsafe if pipeline is StableDiffusionInpaintPipeline else {}
        super().__init__(checkpoint, arena, pipeline, adapters, "torchao-int8", **parts, **self.others)
        self.checkpoint, self.lora = checkpoint, lora
        if pipeline is StableDiffusion3InpaintPipeline:  # which forgets the shift, up to 0.42
            vae = self.pipeline.vae
            decode, shift = vae.decode, vae.config.shift_factor
            vae.decode = lambda latents, **options: decode(latents + shift, **options)

    def make(self, name: str, size: tuple[int, int], steps: int = 4, *, is_adapted: bool = False) -> Edit:
        edit = self.edit(name, seed=steps, steps=steps, size=size, prompt="a red hat")
        edit.patches = patches_of(self.models) if is_adapted else ()
        if self.part == "unet":
            edit.strength = 1.0
        if self.family.info("tiny").is_guidance_cfg:
            edit.guidance_scale = edit.true_cfg_scale = 3.0
            edit.negative_prompt = ""
        return edit

    def check(self, edit: Edit, ours: Any) -> None:
        if edit.patches:
            self.pipeline.load_lora_weights(str(self.lora))
        assert_same(ours, self.expected(edit))
        if edit.patches:
            self.pipeline.unload_lora_weights()


def patches_of(models: ResidentModels) -> PatchSet:
    """All adapters."""
    return patch_set(Patch(info.patch) for info in models.ready(0).models if info.parent)


@pytest.fixture(scope="module", params=FAMILIES)
def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arena: Arena
) -> Iterator[QuantizedRig]:
    make, pipeline = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("quantized")
    checkpoint = make(folder / request.param)
    rig = QuantizedRig(checkpoint, arena, pipeline, make_lora(folder / "shirt.safetensors", checkpoint))
    yield rig
    rig.pages.close()


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("size", [(128, 128), (96, 64)])  # multiples of a token of any of them
def test_edit_equals_the_pipeline(rig: QuantizedRig, size: tuple[int, int], is_adapted: bool) -> None:
    edit = rig.make(f"{is_adapted}-{size}", size, is_adapted=is_adapted)
    rig.check(edit, rig.run(edit))


def test_batch_of_others_at_different_steps_changes_nothing(rig: QuantizedRig) -> None:
    sizes = [(96, 64), (64, 64), (32, 96), (96, 64)]
    edits = [rig.make(f"mixed-{i}", size, 3 + i, is_adapted=i % 2 == 1) for i, size in enumerate(sizes)]
    alone = [rig.run(edit) for edit in edits]
    for before, together in zip(alone, rig.run_together(edits), strict=True):
        assert np.array_equal(together, before)


def module_of(rig: QuantizedRig, **settings: Any) -> nn.Module:
    model = ModelConfig(model=str(rig.checkpoint), dtype="float32", device="cpu", **settings)
    return ModelCheckpoint.open(model).load(rig.part)  # type: ignore[no-any-return]


def num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def test_weights_take_a_byte_each(rig: QuantizedRig) -> None:
    plain, quantized = module_of(rig), module_of(rig, quantization="torchao-int8")
    layers = [layer for layer in quantized.modules() if isinstance(layer, Int8Linear)]
    assert len(layers) == sum(type(layer) is nn.Linear for layer in plain.modules())
    saved = num_bytes(plain) - num_bytes(quantized)
    weights = sum(layer.qdata.numel() for layer in layers)
    assert saved >= 3 * weights - 4 * sum(layer.out_features for layer in layers)


def test_quantised_weights_have_their_own_pages_and_costs(rig: QuantizedRig, tmp_path: Path) -> None:
    prints = [
        fingerprint(ModelCheckpoint.open(ModelConfig(model=str(rig.checkpoint), quantization=wish)), tmp_path)
        for wish in ("none", "torchao-int8")
    ]
    assert prints[0] != prints[1]


@pytest.fixture
def stored(rig: QuantizedRig, tmp_path: Path) -> Path:
    """The checkpoint with a quantised denoiser, as diffusers saves it."""
    path = Path(shutil.copytree(rig.checkpoint, tmp_path / "stored"))
    shutil.rmtree(path / rig.part)
    getattr(rig.pipeline, rig.part).save_pretrained(path / rig.part)
    assert ModelCheckpoint.open(ModelConfig(model=str(path))).config(rig.part)["quantization_config"]
    return path


def test_a_checkpoint_that_is_stored_quantised_paints_the_same(rig: QuantizedRig, stored: Path, arena: Arena) -> None:
    again = Rig(stored, arena, type(rig.pipeline), **rig.others)
    size = (96, 64)
    painted = again.run(rig.make("stored", size))
    again.pages.close()
    assert np.array_equal(painted, rig.run(rig.make("now", size)))


def test_a_quantised_checkpoint_has_as_many_parameters_as_the_plain_one(rig: QuantizedRig, stored: Path) -> None:
    assert count_parameters(stored / rig.part) == count_parameters(rig.checkpoint / rig.part)


def test_it_runs_in_another_dtype_too(rig: QuantizedRig, stored: Path) -> None:
    """With and without an adapter of every layer."""
    adapters = (AdapterConfig("shirt", str(rig.lora)),)
    model = ModelConfig(model=str(stored), served_model_name="tiny", dtype="bfloat16", device="cpu", adapters=adapters)
    models = ResidentModels.open([model])
    models.load_all()
    painted = [edit_once(models.families["tiny"], 64, 16, each).float() for each in ((), patches_of(models))]
    assert all(picture.std() > 10 for picture in painted)
    assert not torch.equal(*painted)


# ------------------------------------------------------------------------------------------------------------- layers


@pytest.fixture(params=[True, False])
def layer(request: pytest.FixtureRequest) -> nn.Linear:
    """A layer as torchao quantises it. param: whether it has a bias."""
    torch.manual_seed(0)
    linear = nn.Linear(96, 160, bias=request.param).requires_grad_(False)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    return linear


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01), (torch.float16, 0.002)])
def test_our_product_equals_torchaos(layer: nn.Linear, dtype: torch.dtype, limit: float) -> None:
    layer.to(dtype)
    x = torch.randn(2, 7, 96).to(dtype)
    ours, theirs = Int8Linear(layer)(x), layer(x)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert (ours - theirs).float().norm() / theirs.float().norm() < limit


def test_a_row_does_not_depend_on_the_others(layer: nn.Linear) -> None:
    ours, x = Int8Linear(layer), torch.randn(65, 96)
    whole = ours(x)
    for number in (1, 2, 3, 17):
        assert torch.equal(ours(x[:number]), whole[:number])


@torch.inference_mode()
def test_in_bfloat16_with_amx_a_row_keeps_its_bits_packed_and_with_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN multiplies few rows otherwise there. Packed weights take no more memory, and give the same numbers."""
    kernels = best_kernels()
    if kernels is None or not kernels.has_tiles:
        pytest.skip("no AMX on this machine")
    torch.manual_seed(0)
    linear, x = nn.Linear(12288, 256).bfloat16(), torch.randn(200, 12288).bfloat16()
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    layer = Int8Linear(linear)
    plain, nbytes = layer(x), layer.qdata.nbytes
    pack_int8(nn.Sequential(layer), kernels)
    pack_int8(nn.Sequential(layer), kernels)  # as by a worker that takes it from the keeper
    torch.testing.assert_close(layer(x), plain)
    assert layer.qdata.nbytes == nbytes
    group = ProductGroup([layer], fused_linear, kernels)
    low = LowRank(torch.randn(64, 12288) / 100, torch.randn(256, 64) / 8)
    group.put("a", group.addition([low.to(x.device, x.dtype)]))
    whole = group(x, (Segment("a", (0, 200), None),))
    assert not torch.equal(whole, plain)
    for number in (16, 33, 100):
        assert torch.equal(group(x[:number], (Segment("a", (0, number), None),)), whole[:number])
    monkeypatch.setattr(quantization, "best_kernels", lambda: None)
    with pytest.raises(RuntimeError, match="packed for tiles"):
        layer(x)


def test_other_layers_of_torchao_run_as_they_are() -> None:
    linear = nn.Linear(96, 160).requires_grad_(False)
    torchao.quantize_(linear, torchao.Float8WeightOnlyConfig())
    module = for_device(nn.Sequential(linear, nn.Linear(2, 2)), torch.device("cpu"))
    assert module[0] is linear  # type: ignore[index]
