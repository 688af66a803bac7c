"""Checkpoints that are incomplete, have variants, or are on the hub: which files are read, and the error messages."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fake_hub import REPO, hub
from safetensors.torch import load_file, save_file

from core.config import ModelConfig
from core.errors import ConfigError
from entrypoints.model_paths import check_model
from model_executor.checkpoint.describe import describe
from model_executor.checkpoint.fingerprint import fingerprint
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.worker.loading.resident import ResidentModels

STEM = "diffusion_pytorch_model"


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def load(path: Path | str, variant: str = "") -> ResidentModels:
    config = ModelConfig(model=str(path), served_model_name="tiny", variant=variant, dtype="float32", device="cpu")
    models = ResidentModels.open([config])
    models.load_all()
    return models


def assert_refused(path: Path | str, words: str, variant: str = "") -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(path, variant)
    assert "\n" not in str(caught.value)


def bias_of(models: ResidentModels) -> float:
    """The bias of the VAE's last layer, by which `rename` tells variants apart."""
    (family,) = models.families.values()
    return float(family._parts["vae"]._module.decoder.conv_out.bias[0])  # type: ignore[attr-defined]


def add_variant(copy: Path, part: str, variant: str, bias: float | None = None) -> None:
    """Add a variant of the part's weights in half the size. bias: see `bias_of`."""
    (file,) = (path for path in (copy / part).glob("*.safetensors") if path.name.count(".") == 1)
    tensors = {name: tensor.half() for name, tensor in load_file(file).items()}
    if bias is not None:
        tensors["decoder.conv_out.bias"][0] = bias
    save_file(tensors, file.with_name(f"{file.stem}.{variant}.safetensors"), {"format": "pt"})


def shard(copy: Path, part: str, variant: str = "") -> None:
    """Split the part's weights into two files with an index."""
    dot, end = (f".{variant}", f".{variant}.json") if variant else ("", ".json")
    file = copy / part / f"{STEM}{dot}.safetensors"
    tensors = load_file(file)
    names = sorted(tensors)
    parts = {f"{STEM}{dot}-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for name, held in parts.items():
        save_file({key: tensors[key] for key in held}, copy / part / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, held in parts.items() for key in held}}
    (copy / part / f"{STEM}.safetensors.index{end}").write_text(json.dumps(index))
    file.unlink()


# ------------------------------------------------------------------------------------------------------------- missing


@pytest.mark.parametrize("part", ["vae", "transformer", "tokenizer", "text_encoder_2", "scheduler"])
def test_a_part_that_is_not_there(copy: Path, part: str) -> None:
    shutil.rmtree(copy / part)
    assert_refused(copy, f"copy lacks {part}, which its model_index.json names; is the checkpoint complete")


@pytest.mark.parametrize("part", ["vae", "tokenizer_2", "text_encoder"])
def test_a_part_that_the_index_does_not_name(copy: Path, part: str) -> None:
    index = copy / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {part: [None, None]}))
    assert_refused(copy, f"names no {part}, which FluxFillPipeline cannot do without")


def test_a_part_without_weights_or_configuration(copy: Path) -> None:
    (copy / "vae" / f"{STEM}.safetensors").unlink()
    assert_refused(copy, "cannot load vae of .*: it has no safetensors weights; is the checkpoint complete")
    (copy / "vae" / "config.json").unlink()
    assert_refused(copy, r"cannot read .*vae/config\.json")


@pytest.mark.parametrize("variant", ["", "fp16"])
def test_a_shard_that_is_not_there(copy: Path, variant: str) -> None:
    if variant:
        add_variant(copy, "transformer", variant)
    shard(copy, "transformer", variant)
    load(copy, variant)
    (gone,) = (copy / "transformer").glob("*-00002-of-*")
    gone.unlink()
    assert_refused(copy, f"{gone.name} is missing", variant)


@pytest.mark.parametrize("content", ["[]", '{"weight_map": []}', "nonsense"])
def test_a_torn_index_of_shards(copy: Path, content: str) -> None:
    (copy / "vae" / f"{STEM}.safetensors.index.json").write_text(content)
    assert_refused(copy, "cannot load vae")


@contextmanager
def unreadable(folder: Path) -> Iterator[None]:
    """Makes the folder unreadable; skips the test for root, who can read everything."""
    folder.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


def test_a_folder_without_read_permission(copy: Path) -> None:
    with unreadable(copy):
        for refuse in (lambda: load(copy), lambda: check_model(str(copy))):
            with pytest.raises(ConfigError, match=r"cannot read .*Permission denied"):
                refuse()
    with pytest.raises(ConfigError, match="File name too long"):
        check_model("x" * 300)


# ------------------------------------------------------------------------------------------------------------ variants


def test_a_variant_is_read_if_it_is_requested_or_the_only_one(copy: Path) -> None:
    plain = bias_of(load(copy))
    add_variant(copy, "vae", "fp16", bias=3.0)
    assert bias_of(load(copy)) == plain
    assert bias_of(load(copy, "fp16")) == 3.0, "the other parts have none, and load their plain weights"
    (copy / "vae" / f"{STEM}.safetensors").unlink()
    assert bias_of(load(copy)) == 3.0
    add_variant_of = copy / "vae" / f"{STEM}.bf16.safetensors"
    shutil.copy(copy / "vae" / f"{STEM}.fp16.safetensors", add_variant_of)
    assert_refused(copy, "its weights come as bf16 and fp16: choose one with --variant")
    assert bias_of(load(copy, "bf16")) == 3.0


def test_a_variant_that_no_part_has(copy: Path) -> None:
    assert_refused(copy, "has no weights of the variant fp16; there: none with a name", "fp16")
    add_variant(copy, "vae", "bf16")
    assert_refused(copy, "has no weights of the variant fp16; there: bf16", "fp16")


def test_variants_are_different_checkpoints(copy: Path, tmp_path: Path) -> None:
    """They have separate cache entries, and parameters are counted once."""

    def digest(variant: str = "") -> str:
        return fingerprint(
            ModelCheckpoint.open(ModelConfig(model=str(copy), variant=variant, dtype="float32")), tmp_path
        )

    alone, counted = digest(), describe(str(copy)).parameters
    add_variant(copy, "vae", "fp16", bias=3.0)
    assert digest() == alone
    assert digest("fp16") != alone
    assert describe(str(copy)).parameters == counted
    assert sum(counted.values()) > 0


# ----------------------------------------------------------------------------------------------------------------- hub


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return monkeypatch


def visit(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("GatedRepo", f"{REPO} is gated: accept its terms at https://huggingface.co/{REPO} and log in"),
        ("RepoNotFound", f"the Hugging Face hub has no {REPO}, or it is private"),
    ],
)
def test_a_hub_that_refuses(empty_cache: pytest.MonkeyPatch, code: str, words: str) -> None:
    with hub(None, code) as (url, _):
        visit(empty_cache, url)
        assert_refused(REPO, words)


def test_no_hub_and_nothing_cached(empty_cache: pytest.MonkeyPatch) -> None:
    with hub(None) as (url, _):
        pass
    visit(empty_cache, url)
    assert_refused(REPO, f"{REPO} is not in this machine's cache, and the Hugging Face hub cannot be reached")


def test_of_several_variants_one_is_fetched(empty_cache: pytest.MonkeyPatch, copy: Path) -> None:
    """Parts without that variant are fetched as they are; afterwards everything can be loaded without the hub."""
    for part in ("transformer", "vae"):
        add_variant(copy, part, "fp16")
    add_variant(copy, "transformer", "non_ema")  # as Stable Diffusion 1.5 has one
    (copy / "vae" / f"{STEM}.safetensors").unlink()
    torch.save({}, copy / "vae" / "model.bin")
    with hub(copy) as (url, fetched):
        visit(empty_cache, url)
        load(REPO)
        weights = {name for name in fetched if not name.endswith((".json", ".txt", ".model"))}
        expected = {f"transformer/{STEM}.safetensors", f"vae/{STEM}.fp16.safetensors"}
        assert weights == expected | {f"text_encoder{end}/model.safetensors" for end in ("", "_2")}
        fetched.clear()
        load(REPO, "fp16")
        assert fetched == [f"transformer/{STEM}.fp16.safetensors"]
    load(REPO)
