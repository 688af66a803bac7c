"""Weights in formats that are not read are refused in one line that says what to give instead; others are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import ModelConfig
from core.errors import ConfigError
from model_executor.checkpoint import loader
from model_executor.checkpoint.describe import describe
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.worker.loading.resident import ResidentModels

Tensors = dict[str, torch.Tensor]

INSTEAD = "; give the bfloat16 checkpoint in the diffusers layout; --quantization torchao-int8"


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to change."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def open_it(path: Path | str) -> None:
    ModelCheckpoint.open(ModelConfig(model=str(path), device="cpu", dtype="bfloat16")).check_formats()


def refusal(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        open_it(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def weights(path: Path, part: str = "transformer") -> Path:
    (file,) = (path / part).glob("*.safetensors")
    return file


def change(file: Path, make: Callable[[Tensors], Tensors]) -> Path:
    save_file(make(load_file(file)), file, {"format": "pt"})
    return file


def in_fp8(tensors: Tensors) -> Tensors:
    return {name: each.to(torch.float8_e4m3fn) if each.ndim == 2 else each for name, each in tensors.items()}


def scaled(tensors: Tensors) -> Tensors:
    """As ComfyUI's files, with weights in integers."""
    matrices = {name: each for name, each in tensors.items() if each.ndim == 2}
    scales = {name.replace(".weight", ".weight_scale"): torch.ones(()) for name in matrices}
    return tensors | {name: each.to(torch.int8) for name, each in matrices.items()} | scales


def with_plain_scales(tensors: Tensors) -> Tensors:
    return tensors | {"logit_scale": torch.ones(()), "blocks.0.layer_scale.weight": torch.ones(2)}


def test_a_transformer_in_8_bit_floats_is_refused(copy: Path) -> None:
    """diffusers would widen them without a word, and leave out the scales."""
    file = change(weights(copy), in_fp8)
    why = refusal(copy)
    assert why.startswith(f"{file} holds 8-bit floats (")
    assert " is F8_E4M3), which are not read" + INSTEAD in why


@pytest.mark.parametrize("part", ["transformer", "text_encoder_2"])
def test_scales_of_quantised_weights_are_refused(copy: Path, part: str) -> None:
    file = change(weights(copy, part), scaled)
    why = refusal(copy)
    assert why.startswith(f"{file} holds quantised weights and their scales (")
    assert ".weight_scale), which are not read" + INSTEAD in why


def test_it_is_refused_before_anything_is_loaded(copy: Path) -> None:
    """By servers, and by what describes checkpoints."""
    change(weights(copy), in_fp8)
    with pytest.raises(ConfigError, match="holds 8-bit floats"):
        ResidentModels.open([ModelConfig(model=str(copy), device="cpu")])
    with pytest.raises(ConfigError, match="holds 8-bit floats"):
        describe(str(copy))


def test_gguf_is_refused(copy: Path, tmp_path: Path) -> None:
    """As the model, in a folder, in place of the transformer."""
    inside = weights(copy).rename(copy / "transformer" / "flux-Q4_K_S.gguf")
    alone = Path(shutil.copy(inside, tmp_path / "flux.gguf"))
    folder = Path(shutil.copytree(copy / "transformer", tmp_path / "folder"))
    for given, named in ((copy, inside), (alone, alone), (folder, folder / inside.name)):
        assert refusal(given).startswith(f"{named} is GGUF, which is not read" + INSTEAD)


def test_a_single_file_is_refused_with_how_to_convert_it(copy: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(weights(copy), tmp_path / "flux1.safetensors"))
    assert refusal(file).startswith(
        f"{file} is a single file; --model takes a diffusers directory or a hub id: convert"
    )
    change(file, in_fp8)
    assert refusal(file).startswith(f"{file} holds 8-bit floats")
    file.write_bytes(b"short")
    assert refusal(file).startswith(f"cannot read {file}: ")
    other = Path(shutil.copy(file, tmp_path / "flux1.ckpt"))
    assert refusal(other) == f"{other} is a file; --model takes a diffusers directory or a hub id"


def test_a_repository_of_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "download", lambda model, variant: tmp_path)
    why = refusal("somebody/flux-gguf")
    assert why.startswith("somebody/flux-gguf has no model_index.json: single files and GGUF are not read" + INSTEAD)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: change(weights(path), with_plain_scales),
        lambda path: change(weights(path, "text_encoder_2"), in_fp8),  # is widened, which is exact
        lambda path: (path / "transformer" / "flux-Q4_K_S.gguf").write_bytes(b"GGUF"),  # beside what is read
        lambda path: change(Path(shutil.copy(weights(path), weights(path).with_suffix(".fp8.safetensors"))), in_fp8),
    ],
    ids=["plain-scales", "text-encoder", "gguf-beside", "other-variant"],
)
def test_what_is_not_loaded_or_sound_is_let_in(copy: Path, make: Callable[[Path], object]) -> None:
    make(copy)
    open_it(copy)


def test_8_bit_floats_of_a_package_are_left_to_it(copy: Path) -> None:
    change(weights(copy), in_fp8)
    config = copy / "transformer" / "config.json"
    stored = {"quantization_config": {"quant_method": "torchao"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | stored))
    open_it(copy)
