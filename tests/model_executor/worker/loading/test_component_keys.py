"""Components are named by their content: equal ones have equal keys wherever their files are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.config import ControlNetConfig, ModelConfig
from core.errors import ConfigError
from core.handles import ModelKey
from model_executor.checkpoint import file_hashes
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.registry import make_family
from model_executor.worker.loading.component_keys import Opened, component_keys, parts_of_models, prompt_twins
from model_executor.worker.loading.resident_controlnets import ResidentControlnets
from tools.random_checkpoints import make_flux, make_flux_fill, make_sd3
from tools.random_controlnets import make_flux_controlnet

Keys = dict[str, dict[str, ModelKey]]


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux_fill(tmp_path_factory.mktemp("fill") / "fill")


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All but its transformer equals the one of `fill`: both are drawn from the same seed."""
    return make_flux(tmp_path_factory.mktemp("dev") / "dev")


@pytest.fixture
def copy(fill: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fill, tmp_path / "copy"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are hashed from here on."""
    files, real = list[Path](), file_hashes._sha256

    def spy(file: Path) -> str:
        files.append(file)
        return real(file)

    monkeypatch.setattr(file_hashes, "_sha256", spy)
    return files


def opened(**paths: Path | ModelConfig) -> dict[str, Opened]:
    configs = {
        name: ModelConfig(model=str(path), dtype="float32", device="cpu") if isinstance(path, Path) else path
        for name, path in paths.items()
    }
    checkpoints = {name: ModelCheckpoint.open(config) for name, config in configs.items()}
    return {name: Opened(checkpoint, make_family(checkpoint)) for name, checkpoint in checkpoints.items()}


def keys_of(models: Mapping[str, Opened], tmp_path: Path) -> Keys:
    return component_keys(parts_of_models(models), tmp_path / "cache")


def shared(keys: Keys) -> set[str]:
    """Parts that models "a" and "b" share."""
    return {part for part, key in keys["a"].items() if keys["b"].get(part) == key}


def test_a_server_with_one_model_hashes_nothing(fill: Path, tmp_path: Path, hashed: list[Path]) -> None:
    (parts,) = keys_of(opened(a=fill), tmp_path).values()
    assert {part: key.component for part, key in parts.items()} == {
        "text_encoder": "text_encoder",
        "text_encoder_2": "text_encoder",
        "vae": "vae",
        "transformer": "transformer",
    }
    assert len({*parts.values()}) == 4
    assert hashed == []
    assert not (tmp_path / "cache").exists()


def test_models_of_two_families_share_what_is_equal(fill: Path, dev: Path, tmp_path: Path, hashed: list[Path]) -> None:
    models = opened(a=fill, b=dev)
    keys = keys_of(models, tmp_path)
    assert shared(keys) == {"text_encoder", "text_encoder_2", "vae"}
    assert {file.parent.name for file in hashed} == shared(keys), "transformers differ in their configuration"
    assert prompt_twins(models, keys) == {"b": "a"}
    hashed.clear()
    assert keys_of(models, tmp_path) == keys
    assert hashed == [], "the next start knows them"


def test_one_folder_under_two_names_is_shared_without_hashing(fill: Path, tmp_path: Path, hashed: list[Path]) -> None:
    keys = keys_of(opened(a=fill, b=fill), tmp_path)
    assert len(shared(keys)) == 4
    assert hashed == []


def test_weights_of_equal_sizes_that_differ_are_not_shared(fill: Path, copy: Path, tmp_path: Path) -> None:
    (weights,) = (copy / "vae").glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert shared(keys_of(opened(a=fill, b=copy), tmp_path)) == {"text_encoder", "text_encoder_2", "transformer"}


@pytest.mark.parametrize(
    ("changes", "is_shared"),
    [
        ({"_name_or_path": "elsewhere", "transformers_version": "0", "architectures": []}, True),
        ({"layer_norm_eps": 1e-3}, False),
    ],
)
def test_only_configuration_that_counts_tells_components_apart(
    fill: Path, copy: Path, tmp_path: Path, changes: dict[str, object], *, is_shared: bool
) -> None:
    file = copy / "text_encoder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert ("text_encoder" in shared(keys_of(opened(a=fill, b=copy), tmp_path))) is is_shared


def test_the_form_of_weights_is_part_of_the_key(fill: Path, tmp_path: Path) -> None:
    half = ModelConfig(model=str(fill), dtype="bfloat16", device="cpu")
    assert shared(keys_of(opened(a=fill, b=half), tmp_path)) == set()
    plain = ModelConfig(model=str(fill), dtype="float32", device="cpu", kernels="torch")
    assert "transformer" not in shared(keys_of(opened(a=fill, b=plain), tmp_path)), "packed for other kernels"


@pytest.mark.parametrize("setting", [{}, {"kernels": "torch"}, {"batch_invariant": True}])
def test_only_models_that_compute_alike_share_a_controlnet(dev: Path, tmp_path: Path, setting: dict[str, Any]) -> None:
    """It has the kernels of its model, and keeps the promises of that one."""
    net = ControlNetConfig("edges", str(make_flux_controlnet(tmp_path / "net")))
    first = ModelConfig(model=str(dev), served_model_name="a", dtype="float32", device="cpu", controlnets=(net,))
    configs = [first, msgspec.structs.replace(first, served_model_name="b", **setting)]
    nets = ResidentControlnets.open(configs, opened(a=configs[0], b=configs[1]), tmp_path / "cache").nets
    one, other = (nets[name]["edges"] for name in "ab")
    assert (one is other) == (not setting)
    settings = [(net.checkpoint.kernels, net.checkpoint.batch_invariant) for net in (one, other)]
    assert settings == [(config.kernels, config.batch_invariant) for config in configs]


def test_a_scheduler_that_counts_in_other_timesteps_makes_another_denoiser(
    fill: Path, copy: Path, tmp_path: Path
) -> None:
    file = copy / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_train_timesteps": 500}))
    assert "transformer" not in shared(keys_of(opened(a=fill, b=copy), tmp_path))


def test_a_file_that_was_written_again_is_another_component(copy: Path, tmp_path: Path) -> None:
    before = keys_of(opened(a=copy), tmp_path)["a"]
    (weights,) = (copy / "vae").glob("*.safetensors")
    os.utime(weights, ns=(1, 1))
    after = keys_of(opened(a=copy), tmp_path)["a"]
    assert {part for part in before if before[part] != after[part]} == {"vae"}


def test_weights_that_cannot_be_read_are_named(
    fill: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(file_hashes, "_sha256", refuse)
    with pytest.raises(ConfigError, match=r"cannot read .*safetensors: Permission denied"):
        keys_of(opened(a=fill, b=copy), tmp_path)


@pytest.mark.parametrize("change", ["tokenizer", "family"])
def test_prompts_are_shared_only_if_all_that_makes_embeddings_is_equal(
    fill: Path, copy: Path, tmp_path: Path, change: str
) -> None:
    other: Callable[[], Path] = {"tokenizer": lambda: copy, "family": lambda: make_sd3(tmp_path / "sd3")}[change]
    path = other()
    if change == "tokenizer":
        file = copy / "tokenizer" / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 9}))
    models = opened(a=fill, b=path)
    keys = keys_of(models, tmp_path)
    assert ("text_encoder" in shared(keys)) is (change == "tokenizer")
    assert prompt_twins(models, keys) == {}
