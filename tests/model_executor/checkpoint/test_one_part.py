"""Checkpoints of one part, as transformers saves them: how they are opened, loaded and downloaded, and what is said
about damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import REPO, hub
from safetensors.torch import load_file, save_file
from transformers.models.sam2.modeling_sam2 import Sam2Model

from core.config import ModelConfig
from core.errors import ConfigError
from model_executor.checkpoint import loader
from model_executor.checkpoint.loader import ONE_PART, ModelCheckpoint
from model_executor.models.parts import SEGMENTERS
from model_executor.models.registry import make_family
from tools.random_segmenter_checkpoints import make_clipseg, make_grounding_dino, make_sam2, make_sam3

MAKERS: dict[str, Any] = {
    "CLIPSegForImageSegmentation": make_clipseg,
    "GroundingDinoForObjectDetection": make_grounding_dino,
    "MMGroundingDinoForObjectDetection": lambda path: make_grounding_dino(path, is_mm=True),
    "Sam2Model": lambda path: make_sam2(path, is_video=True),
    "Sam3Model": lambda path: make_sam3(path, is_video=True),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_sam2(tmp_path / "sam2")


def open_it(model: Path | str, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint.open(ModelConfig(model=str(model), **{"dtype": "float32", "device": "cpu"} | options))


def refused(model: Path | str, words: str, **options: Any) -> None:
    """Opening, checking or loading fails with one line."""
    with pytest.raises(ConfigError, match=words) as raised:
        load(model, **options)
    assert "\n" not in str(raised.value)


def load(model: Path | str, **options: Any) -> Any:
    checkpoint = open_it(model, **options)
    checkpoint.check_formats()
    checkpoint.expected_bytes(ONE_PART)
    return checkpoint.load(ONE_PART)


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | entries))


def test_there_is_a_checkpoint_of_each_class() -> None:
    assert MAKERS.keys() == set(SEGMENTERS.values())


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_each_class(tmp_path: Path, name: str, dtype: Any) -> None:
    checkpoint = open_it(MAKERS[name](tmp_path), dtype=dtype)
    assert checkpoint.index == {"_class_name": name, ONE_PART: ["transformers", name]}
    assert checkpoint.folder(ONE_PART) == tmp_path
    assert checkpoint.has(ONE_PART)
    checkpoint.check_formats()
    module, outline = checkpoint.load(ONE_PART), checkpoint.outline(ONE_PART)
    assert type(module).__name__ == type(outline).__name__ == name
    assert {parameter.dtype for parameter in module.parameters()} == {checkpoint.dtype}
    assert not module.training
    real = {key for key, each in outline.named_parameters() if not each.is_meta}
    assert real <= {"model.level_embed"}  # Grounding DINO makes this small one on the CPU in any case
    shapes = {key: tensor.shape for key, tensor in module.state_dict().items()}
    assert {key: tensor.shape for key, tensor in outline.state_dict().items()} == shapes
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    assert nbytes <= checkpoint.expected_bytes(ONE_PART) < 1.01 * nbytes


def test_it_is_opened_again_as_it_was(folder: Path) -> None:
    """By a process that keeps weights."""
    checkpoint = open_it(folder, dtype="bfloat16")
    again = ModelCheckpoint.open(checkpoint.config_as_opened)
    assert (again.index, again.path, again.dtype) == (checkpoint.index, checkpoint.path, checkpoint.dtype)


def test_its_weights_are_transformers(folder: Path) -> None:
    ours, theirs = load(folder).state_dict(), Sam2Model.from_pretrained(folder).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_single_weights(folder: Path) -> None:
    name = "no_memory_embedding"
    assert torch.equal(open_it(folder).tensors(ONE_PART, [name])[name], load(folder).state_dict()[name])


def test_auto_counts_its_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 is preferred, it is bfloat16 for weights without room in it."""
    monkeypatch.setattr(loader, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(loader, "cpu_has_amx", lambda: True)
    monkeypatch.setattr(loader, "has_tiles", lambda: False)
    size = open_it(folder).expected_bytes(ONE_PART)
    config = ModelConfig(model=str(folder), dtype="auto", device="cpu")
    dtypes = [ModelCheckpoint.open(config, model_bytes=limit).dtype for limit in (size, size - 1)]
    assert dtypes == [torch.float32, torch.bfloat16]


def test_shards_and_variants(folder: Path) -> None:
    before = load(folder)
    (folder / "model.safetensors").unlink()
    before.save_pretrained(folder, max_shard_size="200KB")
    before.half().save_pretrained(folder, variant="fp16")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    assert load(folder).no_memory_embedding.dtype == torch.float32
    assert open_it(folder, variant="fp16").variant_of(ONE_PART) == "fp16"
    load(folder, variant="fp16")
    refused(folder, "has no weights of the variant bf16; there: fp16$", variant="bf16")
    next(folder.glob("model-*-of-*.safetensors")).unlink()
    refused(folder, "cannot load segmenter of .*is missing; is the checkpoint complete")


def test_defaults_of_language_models_are_not_read(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert open_it(folder).defaults == loader.Defaults()


def test_a_folder_named_like_a_denoiser(folder: Path) -> None:
    """Its weights are not those that are quantised."""
    other = folder.rename(folder.with_name("transformer"))
    sizes = {open_it(other, quantization=wish).expected_bytes(ONE_PART) for wish in ("none", "torchao-int8")}
    assert len(sizes) == 1


def test_it_is_no_model_that_edits(folder: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline class Sam2Model is not supported; supported: "):
        make_family(open_it(folder))


def test_a_truncated_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(folder, "cannot read .*model.safetensors")
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged or cut short"):
        open_it(folder).load(ONE_PART)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "cannot load segmenter of .*it has no safetensors weights")


def test_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    refused(folder, "only safetensors weights are read, as unpickling pytorch_model.bin could run code")


def test_a_weight_that_is_missing_or_of_another_shape(folder: Path) -> None:
    file, name = folder / "model.safetensors", "mask_decoder.iou_token.weight"
    tensors = load_file(file)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file, {"format": "pt"})
    refused(folder, f"the weights lack {name}$")
    save_file(tensors | {name: torch.zeros(1, 7)}, file, {"format": "pt"})
    refused(folder, rf"{name} in model.safetensors is of shape \[1, 7\] where config.json asks for \[1, 32\]")


def test_weights_of_another_class(folder: Path) -> None:
    edit(folder / "config.json", model_type="clipseg")
    refused(folder, "cannot load segmenter of .*the weights lack ")


@pytest.mark.parametrize("content", ["", "[", "[]", "3", "{}", '{"model_type": []}', '{"model_type": "bert"}', None])
def test_a_config_that_names_no_such_class(folder: Path, content: str | None) -> None:
    """As before there were checkpoints of one part."""
    if content is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(content)
    refused(folder, r"sam2 has no model_index.json; --model takes a diffusers directory or a hub id$")


@pytest.mark.parametrize("vision", [3, "x", [], {"backbone_config": 5}, {"fpn_hidden_size": -1}])
def test_a_config_of_nonsense(folder: Path, vision: Any) -> None:
    edit(folder / "config.json", vision_config=vision)
    refused(folder, "cannot (load|make) segmenter of ")


def test_an_index_comes_first(folder: Path) -> None:
    """A folder with both is a diffusers checkpoint."""
    (folder / "model_index.json").write_text("{}")
    refused(folder, "model_index.json names no _class_name; is this a diffusers checkpoint")


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return monkeypatch


def visit(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


def with_others(folder: Path) -> Path:
    """Add files that repositories have beside those that are needed."""
    for name in ("pytorch_model.bin", "sam2.pt", "README.md", "model.fp16.safetensors", "flax_model.msgpack"):
        (folder / name).write_bytes(b"never read")
    (folder / "onnx").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "onnx" / "model.safetensors")
    (folder / "onnx" / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", MAKERS)
def test_download(empty_cache: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """What is needed is fetched, once, and nothing else; afterwards no hub is needed."""
    folder = MAKERS[name](tmp_path / "repository")
    if name.startswith("CLIPSeg"):
        (folder / "things.json").write_text('["hat"]')
    needed = sorted(path.name for path in folder.iterdir())
    with_others(folder)
    with hub(folder) as (url, fetched):
        visit(empty_cache, url)
        load(REPO)
        assert sorted(fetched) == needed
    load(REPO)


def test_download_of_a_variant(empty_cache: pytest.MonkeyPatch, folder: Path) -> None:
    half = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(half, folder / "model.fp16.safetensors", {"format": "pt"})
    with hub(folder) as (url, fetched):
        visit(empty_cache, url)
        load(REPO, variant="fp16")
        assert [name for name in fetched if name.endswith(".safetensors")] == ["model.fp16.safetensors"]


def test_download_of_another_class(empty_cache: pytest.MonkeyPatch, folder: Path) -> None:
    """Of a repository that cannot be used, no weights are fetched."""
    edit(folder / "config.json", model_type="bert")
    with hub(folder) as (url, fetched):
        visit(empty_cache, url)
        refused(REPO, f"{REPO} has no model_index.json: single files and GGUF are not read")
        assert fetched == ["config.json"]
