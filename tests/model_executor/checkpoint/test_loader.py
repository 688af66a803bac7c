"""A checkpoint that cannot be served gives a ConfigError of one line that names the cause."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler
from safetensors.torch import load_file, save_file

from core.config import ModelConfig
from core.errors import ConfigError
from model_executor.checkpoint import loader
from model_executor.checkpoint.loader import ModelCheckpoint, resolve_dtype
from model_executor.models.families.flux import FluxFill
from model_executor.models.parts import CONTROLNETS, FLOW_SCHEDULERS, MODULES, SEGMENTERS
from model_executor.models.registry import FAMILIES, make_family
from model_executor.worker.loading.resident import ResidentModels, edit_once
from tools.random_checkpoints import make_flux, make_flux_fill, make_qwen, make_qwen_edit, make_sd3

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def load(path: Path | str, **settings: str) -> ResidentModels:
    models = ResidentModels.open([ModelConfig(model=str(path), served_model_name="tiny", **settings)])  # type: ignore[arg-type]
    models.load_all()
    return models


def assert_refused(path: Path | str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_info_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    path = make_flux_fill(
        tmp_path / "model",
        text_tokens=9,
        native_size=96,
        guidance_embeds=True,
        generation_config={"num_inference_steps": 8, "guidance_scale": 2.5},
    )
    (info,) = load(path, dtype="bfloat16", device="cpu").ready(0).models
    assert (info.name, info.family, info.device, info.dtype) == ("tiny", "flux-fill", "cpu", "bfloat16")
    assert (info.native_size, info.token_size, info.latent_width, info.max_text_tokens) == (96, 16, 64, 9)
    assert (info.default_num_inference_steps, info.default_guidance_scale) == (8, 2.5)
    assert (info.has_guidance, info.has_true_cfg) == (True, False)


def test_defaults_are_the_pipelines(tiny_checkpoint: Path) -> None:
    info = make_family(ModelCheckpoint.open(ModelConfig(model=str(tiny_checkpoint)))).info("tiny")
    assert (info.default_num_inference_steps, info.default_guidance_scale) == (50, 30.0)


def test_info_of_flux(tmp_path: Path) -> None:
    """dev has distilled guidance, schnell has none; both also support classifier-free guidance."""
    for guidance_embeds in (True, False):
        path = make_flux(tmp_path / str(guidance_embeds), guidance_embeds=guidance_embeds)
        info = make_family(ModelCheckpoint.open(ModelConfig(model=str(path)))).info("tiny")
        assert (info.family, info.has_guidance, info.has_true_cfg, info.is_guidance_cfg) == (
            "flux",
            guidance_embeds,
            True,
            False,
        )
        assert (info.default_num_inference_steps, info.default_guidance_scale) == (28, 7.0)


def test_info_of_sd3(tmp_path: Path) -> None:
    """Guidance is classifier-free, positions are limited, and Heun's method calls the model twice per step."""
    path = make_sd3(tmp_path / "sd3", scheduler_class=FlowMatchHeunDiscreteScheduler, text_tokens=9)
    (info,) = load(path, dtype="float32").ready(0).models
    assert (info.family, info.has_guidance, info.has_true_cfg, info.is_guidance_cfg) == ("sd3", True, False, True)
    assert (info.native_size, info.max_side, info.max_text_tokens, info.solver_order) == (128, 24, 9, 2)
    assert (info.default_num_inference_steps, info.default_guidance_scale) == (50, 7.0)


@pytest.mark.parametrize(("make", "extra"), [(make_flux, 0), (make_sd3, 12)])
def test_all_text_tokens_are_reported(tmp_path: Path, make: Any, extra: int) -> None:
    """SD3's CLIP tokens, 12 in these checkpoints, come before T5's, and are counted also for a prompt that is cut."""
    models = load(make(tmp_path / "model"), dtype="float32")
    (info,) = models.ready(0).models
    assert info.extra_text_tokens == extra
    for length in (None, 5):
        text = models.families[info.name].encode_text("a red hat", length or info.max_text_tokens)
        assert len(text.prompt_embeds) == info.num_text_tokens(length)


def test_sd3_of_another_form_is_refused(tmp_path: Path) -> None:
    path = make_sd3(tmp_path / "sd3")
    edit_json(path / "transformer/config.json", patch_size=4)
    assert_refused(path, "a denoiser of 16 channels and patches of 4 is not supported")


@pytest.mark.parametrize("name", ["FluxPipeline", "FluxInpaintPipeline"])
def test_fill_under_another_name_is_refused(copy: Path, name: str) -> None:
    edit_json(copy / "model_index.json", _class_name=name)
    assert_refused(copy, f"a denoiser of 384 input channels is not supported under {name}")


def test_missing_directory(tmp_path: Path) -> None:
    assert_refused(tmp_path / "missing", "no model directory")


def test_directory_without_index(tmp_path: Path) -> None:
    assert_refused(tmp_path, r"has no model_index\.json")


def test_unsupported_pipeline_names_the_supported(copy: Path) -> None:
    edit_json(copy / "model_index.json", _class_name="KandinskyPipeline")
    assert_refused(copy, "KandinskyPipeline is not supported; supported: DiTPipeline, Flux2KleinInpaintPipeline, ")


def test_unsupported_part(copy: Path) -> None:
    edit_json(copy / "model_index.json", scheduler=["diffusers", "LMSDiscreteScheduler"])
    assert_refused(copy, f"scheduler is of class LMSDiscreteScheduler; supported: {', '.join(FLOW_SCHEDULERS)}$")


def test_scheduler_of_unets(copy: Path) -> None:
    edit_json(copy / "model_index.json", scheduler=["diffusers", "DDIMScheduler"])
    assert_refused(copy, f"scheduler is of class DDIMScheduler; supported: {', '.join(FLOW_SCHEDULERS)}$")


@pytest.mark.parametrize("part", FluxFill.classes)
@pytest.mark.parametrize("name", ["AutoencoderKLQwenImage", "CLIPTextModelWithProjection", "Qwen2Tokenizer"])
def test_a_part_of_a_class_that_the_family_does_not_use(copy: Path, part: str, name: str) -> None:
    """The error lists the classes that are possible."""
    edit_json(copy / "model_index.json", **{part: ["diffusers", name]})
    assert_refused(copy, f"copy: {part} is of class {name}; supported: {', '.join(FluxFill.classes[part])}$")


def test_families_name_the_classes_that_can_be_loaded() -> None:
    named = {name for family in FAMILIES.values() for names in family.classes.values() for name in names}
    assert named | {*SEGMENTERS.values(), *CONTROLNETS} == set(MODULES)


def test_families_name_the_classes_of_all_their_parts() -> None:
    for family in FAMILIES.values():
        parts = {"scheduler", "vae", family.denoiser_part}
        texts = {part for part in family.classes if part.startswith("text_encoder")}
        tokenizers = {part.replace("text_encoder", "tokenizer") for part in texts}
        assert set(family.classes) - {"processor"} == parts | texts | tokenizers


@pytest.mark.parametrize("entry", ["AutoencoderKL", ["AutoencoderKL"], 7, [], ["diffusers", 7], {"a": 1}])
def test_an_index_entry_that_names_no_class(copy: Path, entry: object) -> None:
    edit_json(copy / "model_index.json", vae=entry)
    assert_refused(copy, "names no vae, which FluxFillPipeline cannot do without")


@pytest.mark.parametrize(
    ("file", "entries"),
    [
        ("vae/config.json", {"block_out_channels": None}),
        ("vae/config.json", {"latent_channels": "x"}),
        ("transformer/config.json", {"num_layers": "x"}),
        ("transformer/config.json", {"attention_head_dim": None}),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": None}),
        ("text_encoder/config.json", {"hidden_size": "x"}),
        ("tokenizer/tokenizer_config.json", {"model_max_length": "x"}),
    ],
)
def test_an_invalid_configuration_is_refused(copy: Path, file: str, entries: dict[str, object]) -> None:
    edit_json(copy / file, **entries)
    assert_refused(copy, str(copy))
    assert torch.get_default_dtype() == torch.float32, "what is made afterwards has the usual dtype"


@pytest.mark.parametrize("make", [make_flux_fill, make_sd3, make_qwen])
def test_noise_levels_that_rise_are_refused(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path / "model")
    edit_json(path / "scheduler/scheduler_config.json", invert_sigmas=True)
    assert_refused(path, "FlowMatchEulerDiscreteScheduler with invert_sigmas is not supported")


def test_a_scheduler_without_its_configuration(copy: Path) -> None:
    (copy / "scheduler/scheduler_config.json").unlink()
    assert_refused(copy, r"cannot load scheduler of .*: it has no scheduler_config\.json; is the checkpoint complete")
    (copy / "scheduler/scheduler_config.json").write_text('{"shift": ')
    assert_refused(copy, r"cannot load scheduler of .*: scheduler_config\.json cannot be read .*; fetch it again")


def test_a_processor_without_its_configuration(tmp_path: Path) -> None:
    path = make_qwen_edit(tmp_path / "model")
    file = path / "processor/processor_config.json"
    file.write_text("{}")
    assert_refused(path, "cannot load processor of .*describes no Qwen2VLImageProcessorPil; fetch it again")
    file.unlink()
    assert_refused(path, r"it has no preprocessor_config\.json or processor_config\.json; is the checkpoint complete")


def test_scheduler_that_takes_no_noise_levels(copy: Path) -> None:
    """FLUX's pipelines give them; diffusers refuses at the first edit."""
    edit_json(copy / "model_index.json", scheduler=["diffusers", "FlowMatchHeunDiscreteScheduler"])
    assert_refused(copy, "flux-fill chooses its noise levels itself, which FlowMatchHeunDiscreteScheduler")


def test_torn_index(copy: Path) -> None:
    (copy / "model_index.json").write_text('{"_class_name": "FluxFill')
    assert_refused(copy, "cannot read .*model_index.json")


def test_unknown_default(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"steps": 8}')
    assert_refused(copy, "generation_config.json: .*steps")


def test_torn_weights(copy: Path) -> None:
    weights = copy / WEIGHTS
    for size in (-1000, 100, 0):
        weights.write_bytes(weights.read_bytes()[:size])
        assert_refused(
            copy, rf"cannot load transformer of .*: {weights.name} is damaged or cut short .*; fetch it again"
        )


def test_missing_weight(copy: Path) -> None:
    """diffusers only warns, and continues with uninitialised memory."""
    tensors = load_file(copy / WEIGHTS)
    del tensors["proj_out.bias"]
    save_file(tensors, copy / WEIGHTS, metadata={"format": "pt"})
    assert_refused(copy, r"cannot load transformer of .*: the weights lack proj_out\.bias")


@pytest.mark.parametrize(
    ("part", "entries", "weight"),
    [
        ("transformer", {"joint_attention_dim": 48}, r"context_embedder\.weight .* \[64, 64\] .* \[64, 48\]"),
        ("vae", {"norm_num_groups": 2, "block_out_channels": [16] * 4}, r".* is of shape \[8.* asks for \[16"),
        ("text_encoder", {"hidden_size": 32}, r".* is of shape \[.*64.*\] .* asks for \[.*32"),
        ("text_encoder_2", {"d_ff": 96}, r".* is of shape \[.*128.*\] .* asks for \[.*96"),
    ],
)
def test_weights_of_another_shape(copy: Path, part: str, entries: dict[str, object], weight: str) -> None:
    edit_json(copy / part / "config.json", **entries)
    assert_refused(copy, rf"cannot load {part} of .*: {weight}.*; are both of one checkpoint\?$")


@pytest.mark.parametrize(("part", "weights"), [("vae", "diffusion_pytorch_model"), ("text_encoder", "model")])
def test_pickled_weights_are_refused(copy: Path, part: str, weights: str) -> None:
    file = copy / part / f"{weights}.safetensors"
    pickled = {"model": "pytorch_model"}.get(weights, weights)
    torch.save(load_file(file), copy / part / f"{pickled}.bin")
    file.unlink()
    assert_refused(copy, f"cannot load {part} of")


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert_refused("nobody/nothing", "nobody/nothing is not in this machine's cache")


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="unknown dtype 'int4'"):
        resolve_dtype("int4", torch.device("cpu"), lambda: 0)


@pytest.mark.parametrize(
    ("device", "has_bfloat16", "has_amx", "has_kernels", "gigabytes", "expected", "why"),
    [
        ("cuda", True, True, False, 1, torch.bfloat16, "runs on a GPU"),
        ("cpu", False, False, False, 1, torch.float32, "does not multiply bfloat16"),
        ("cpu", True, False, False, 1, torch.bfloat16, "multiplies it natively"),  # Zen 5
        ("cpu", True, True, True, 1, torch.bfloat16, "multiplies it natively, with AMX"),
        ("cpu", True, True, False, 1, torch.float32, "a picture in bfloat16 depends on what shares its steps"),
        ("cpu", True, True, False, 66, torch.float32, "without compiled kernels or with several threads"),
        ("cpu", True, True, False, 67, torch.bfloat16, "the weights take 67.0 GB, and 66.7 GB of memory are for them"),
    ],
)
def test_auto_is_a_dtype_in_which_pictures_do_not_depend_on_their_company(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    has_bfloat16: bool,
    has_amx: bool,
    has_kernels: bool,
    gigabytes: int,
    expected: torch.dtype,
    why: str,
) -> None:
    """Where weights fit so. With AMX oneDNN rounds products of few rows in bfloat16 in another way, and our kernels do
    not."""
    monkeypatch.setattr(loader, "cpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(loader, "cpu_has_amx", lambda: has_amx)
    monkeypatch.setattr(loader, "has_tiles", lambda: has_kernels)
    monkeypatch.setattr(loader, "memory_limit", lambda: 100_000_000_000)
    dtype, told = resolve_dtype("auto", torch.device(device), lambda: gigabytes * 1_000_000_000)
    assert dtype is expected
    assert why in told
    assert resolve_dtype("bfloat16", torch.device(device), lambda: 0) == (torch.bfloat16, "")


@pytest.mark.usefixtures("with_amx")
def test_auto_is_float32_with_amx_and_pytorchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which multiply with oneDNN, though ours are there."""
    monkeypatch.setattr(loader, "has_tiles", lambda: True)
    assert resolve_dtype("auto", torch.device("cpu"), lambda: 0)[0] is torch.bfloat16
    dtype, told = resolve_dtype("auto", torch.device("cpu"), lambda: 0, kernels="torch")
    assert dtype is torch.float32
    assert "depends on what shares its steps" in told


@pytest.mark.parametrize("quantization", ["none", "torchao-int8"])
def test_all_weights_count_for_auto(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, quantization: str) -> None:
    """As float32, whatever dtype they are stored in; a quantised denoiser's are as they are quantised."""
    tensors = [
        (folder.name, tensor)
        for folder in tiny_checkpoint.iterdir()
        for file in folder.glob("*.safetensors")
        for tensor in load_file(file).values()
    ]
    is_int8 = quantization == "torchao-int8"
    expected = sum(
        tensor.numel() * (1 if is_int8 and name == "transformer" and tensor.ndim == 2 else 4)
        for name, tensor in tensors
    )
    for memory, dtype in ((expected, torch.bfloat16), (2 * expected, torch.float32)):
        monkeypatch.setattr(loader, "cpu_has_bfloat16", lambda: True)
        monkeypatch.setattr(loader, "cpu_has_amx", lambda: True)
        monkeypatch.setattr(loader, "has_tiles", lambda: False)
        monkeypatch.setattr(loader, "memory_limit", lambda memory=memory: memory)
        config = ModelConfig(model=str(tiny_checkpoint), device="cpu", quantization=quantization)  # type: ignore[arg-type]
        assert ModelCheckpoint.open(config).dtype is dtype


@pytest.fixture
def with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiled kernels."""
    monkeypatch.setattr(loader, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(loader, "cpu_has_amx", lambda: True)
    monkeypatch.setattr(loader, "has_tiles", lambda: False)


@pytest.mark.usefixtures("with_amx")
def test_auto_keeps_to_the_bytes_that_models_may_take(tiny_checkpoint: Path) -> None:
    config = ModelConfig(model=str(tiny_checkpoint), device="cpu")
    needed = loader._float32_bytes(tiny_checkpoint, config)
    assert ModelCheckpoint.open(config, model_bytes=needed).dtype is torch.float32
    assert ModelCheckpoint.open(config, model_bytes=needed - 1).dtype is torch.bfloat16


def test_parts_that_are_stored_quantised_count_as_they_are_stored(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint, tmp_path / "stored"))
    model = ModelConfig(model=str(path), device="cpu")
    plain, (file,) = loader._float32_bytes(path, model), (path / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    packed = {name: tensor.to(torch.uint8) if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    save_file(packed, file)
    config = json.loads((path / "transformer/config.json").read_text())
    stored = config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (path / "transformer/config.json").write_text(json.dumps(stored))
    saved = sum(3 * tensor.numel() for tensor in tensors.values() if tensor.ndim == 2)
    assert loader._float32_bytes(path, model) == plain - saved


@pytest.mark.parametrize("names", ['["x"]', "3", "[3]", "{"])
@pytest.mark.usefixtures("with_amx")
def test_a_damaged_header_is_no_fault_of_auto(tiny_checkpoint: Path, tmp_path: Path, names: str) -> None:
    """Loading reports it."""
    path = Path(shutil.copytree(tiny_checkpoint, tmp_path / "damaged"))
    (file,) = (path / "transformer").glob("*.safetensors")
    save_file(load_file(file), file, {"tensor_names": names})
    assert ModelCheckpoint.open(ModelConfig(model=str(path), device="cpu")).dtype is torch.float32


@pytest.mark.usefixtures("with_amx")
def test_what_auto_is_and_why_is_logged(tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for dtype in ("auto", "float32"):
            load(tiny_checkpoint, device="cpu", dtype=dtype).log_dtypes()
    (line,) = (message for message in caplog.messages if "--dtype" in message)
    assert line.startswith("--dtype auto is float32 for tiny: without compiled kernels")


def test_a_cpu_is_warmed_up_by_one_masked_row(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no kernel that is compiled only for reading between two keyframes."""
    models, rows = load(tiny_checkpoint, dtype="float32"), list[Any]()
    predict = models.families["tiny"].predict

    def count(batch: Any) -> Any:
        rows.append([row.active is not None for row in batch])
        return predict(batch)

    monkeypatch.setattr(models.families["tiny"], "predict", count)
    models.warm_up()
    assert rows == [[False], [True]]


def test_components_can_be_unloaded_and_loaded_again(tiny_checkpoint: Path) -> None:
    """An unloaded component cannot be used, and works again after loading."""
    models = load(tiny_checkpoint, dtype="float32")
    key = models.keys["tiny"]["transformer"]
    models.unload(key)
    assert not models.is_loaded("tiny")
    with pytest.raises(KeyError, match="the transformer is not loaded"):
        edit_once(models.families["tiny"], 64, 8)
    models.load(key)
    assert models.is_loaded("tiny")
    models.warm_up()
