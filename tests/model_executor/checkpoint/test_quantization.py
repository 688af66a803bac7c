"""Quantisation that is not available gives an error of one line with the cause. Needs no package for quantisation."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.config import ModelConfig
from core.errors import ConfigError, InvalidRequestError
from model_executor.checkpoint import quantization
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.checkpoint.quantization import QUANTIZED, check_method, check_quantized, stored_method
from model_executor.models.registry import FAMILIES
from model_executor.worker.loading.resident import ResidentModels
from tools.random_unet_checkpoints import make_sd

GPU = torch.device("cuda", 0)


def refused(path: Path, why: str, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        ResidentModels.open([ModelConfig(model=str(path), device="cpu", **settings)])
    assert "\n" not in str(caught.value)


@pytest.fixture
def stored(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint whose transformer's configuration claims the given quantisation."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "stored"))


def say_stored(path: Path, part: str = "transformer", /, **config: Any) -> None:
    file = path / part / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


def test_an_unknown_quantization() -> None:
    with pytest.raises(InvalidRequestError, match=r"'int9'. Supported values are: 'none', 'torchao-int8', 'bitsandb"):
        ModelConfig(quantization="int9")  # type: ignore[arg-type]


def test_a_missing_package_is_named_with_how_to_get_it(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    why = r"--quantization torchao-int8: the package torchao is not installed; pip install 'stencil-serve\[quantiz"
    refused(tiny_checkpoint, why, quantization="torchao-int8")
    with pytest.raises(ConfigError, match="package bitsandbytes is not installed; pip install bitsandbytes"):
        check_method("bitsandbytes", "--quantization bitsandbytes-4bit", GPU)


@pytest.mark.parametrize("wish", ["bitsandbytes-8bit", "bitsandbytes-4bit"])
def test_bitsandbytes_without_a_gpu(tiny_checkpoint: Path, wish: str) -> None:
    refused(
        tiny_checkpoint, f"--quantization {wish}: bitsandbytes needs a GPU, and the device is cpu", quantization=wish
    )


def test_checkpoints_with_another_stored_quantization_are_refused(stored: Path) -> None:
    say_stored(stored, quant_method="gguf")
    refused(
        stored, "transformer of .* is quantised with gguf, which is not supported; supported: torchao, bitsandbytes"
    )
    say_stored(stored, quant_method="bitsandbytes", load_in_4bit=True)
    refused(stored, "is quantised with bitsandbytes: bitsandbytes needs a GPU")


def test_a_quantised_checkpoint_is_not_quantised_again(stored: Path, tmp_path: Path) -> None:
    why = "the checkpoint's {} is quantised with torchao already"
    say_stored(stored, quant_method="torchao")
    refused(stored, why.format("transformer"), quantization="torchao-int8")
    unet = make_sd(tmp_path / "sd")
    say_stored(unet, "unet", quant_method="torchao")
    refused(unet, why.format("unet"), quantization="torchao-int8")


def test_quantised_layers_cannot_be_batch_invariant_on_a_gpu(stored: Path) -> None:
    """On a CPU, where the option changes nothing, they may be quantised."""
    say_stored(stored, quant_method="torchao")
    on_cpu = ModelCheckpoint.open(ModelConfig(model=str(stored), device="cpu", batch_invariant=True))
    with pytest.raises(ConfigError, match=r"transformer is quantised; serve it unquantised, or leave --batch-inv"):
        replace(on_cpu, device=GPU).check_quantization()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(quantization, "find_spec", lambda name: name)
        on_cpu.check_quantization()


def test_quantised_unets_cannot_be_batch_invariant_on_a_gpu_either(tmp_path: Path) -> None:
    """Stored so: their own products would never meet the operators that refuse them."""
    path = make_sd(tmp_path / "sd")
    say_stored(path, "unet", quant_method="torchao")
    on_cpu = ModelCheckpoint.open(ModelConfig(model=str(path), device="cpu", batch_invariant=True))
    with pytest.raises(ConfigError, match="the unet is quantised; serve it unquantised"):
        replace(on_cpu, device=GPU).check_quantization()


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_a_wish_to_quantise_is_refused_with_the_flags(device: str) -> None:
    with pytest.raises(ConfigError, match=r"--quantization torchao-int8.*give --quantization none"):
        ModelConfig(batch_invariant=True, quantization="torchao-int8", device=device)
    ModelConfig(batch_invariant=True, quantization="torchao-int8", device="cpu")


def test_the_denoiser_of_every_family_is_quantised() -> None:
    assert {family.denoiser_part for family in FAMILIES.values()} == set(QUANTIZED)


def test_a_quantization_that_changed_no_layer_is_an_error() -> None:
    """For whatever reason: the flag must not be ignored silently."""
    with pytest.raises(ValueError, match="--quantization torchao-int8 has changed none of its layers"):
        check_quantized(nn.Sequential(nn.Linear(2, 2), nn.Conv2d(2, 2, 1)), "torchao-int8")


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "torchao"}}, "torchao"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {}}, "an unknown method"),
    ],
)
def test_how_weights_are_stored(config: dict[str, Any], method: str | None) -> None:
    assert stored_method(config) == method
