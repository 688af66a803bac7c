"""Adapters read in a thread beside a worker's computing: the order is kept, and a bad file is an answer."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_lora
from safetensors.torch import load_file, save_file
from user_classes import Panic

from core.config import AdapterConfig, ModelConfig
from core.messages.worker import AdapterLoaded, DropAdapter, LoadAdapter
from core.patches import Patch
from core.sampler_defaults import SamplerDefaults
from model_executor.patches.adapters import Adapter
from model_executor.worker.loading.adapter_loader import AdapterLoader, adapter_bytes
from model_executor.worker.loading.loader_thread import LoaderThread
from model_executor.worker.loading.resident import ResidentModels, edit_once
from tools.random_checkpoints import make_flux
from tools.random_unet_checkpoints import make_sd


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"flux": make_flux(folder / "flux"), "sd": make_sd(folder / "sd")}


@pytest.fixture(params=["flux", "sd"])
def models(request: pytest.FixtureRequest, paths: dict[str, Path]) -> ResidentModels:
    """The same checkpoint under two names: they share all components."""
    configs = [ModelConfig(model=str(paths[request.param]), served_model_name=n, dtype="float32") for n in ("a", "b")]
    models = ResidentModels.open(configs)
    models.load_all()
    return models


@pytest.fixture
def file(models: ResidentModels, paths: dict[str, Path], tmp_path: Path) -> Path:
    is_unet = "unet" in models.keys["a"]
    text_parts = ("text_encoder",) if is_unet else ()
    return make_lora(tmp_path / "hat.safetensors", paths["sd" if is_unet else "flux"], text_parts=text_parts)


class Loader:
    def __init__(self, models: ResidentModels, max_bytes: int = 1_000_000_000) -> None:
        self.answers: queue.SimpleQueue[AdapterLoaded] = queue.SimpleQueue()
        self.loader = AdapterLoader(3, models, self.answers.put, LoaderThread(models.device), max_bytes)

    def load(self, file: Path, model: str = "a", patch: str = "") -> AdapterLoaded:
        self.loader.load(LoadAdapter("load", model, "hat", str(file), patch))
        return self.answers.get(timeout=20)

    def drop(self, model: str, patch: Patch) -> None:
        self.loader.drop(DropAdapter(model, patch.id))
        self.loader.wait()


@pytest.fixture
def loader(models: ResidentModels) -> Loader:
    return Loader(models)


def picture(models: ResidentModels, model: str, *ids: str) -> torch.Tensor:
    torch.manual_seed(0)
    return edit_once(models.families[model], 64, 12, tuple(map(Patch, ids)))


def test_it_is_as_one_that_was_loaded_at_the_start(
    loader: Loader, models: ResidentModels, paths: dict[str, Path], file: Path
) -> None:
    plain = picture(models, "a")
    file.with_suffix(".json").write_text('{"num_inference_steps": 4}')
    answer = loader.load(file)
    assert (answer.rank, answer.request_id, answer.failure) == (3, "load", None)
    assert answer.defaults == SamplerDefaults(num_inference_steps=4)
    (checkpoint,) = {config.model for config in models._configs.values()}
    configured = ModelConfig(
        model=checkpoint, served_model_name="a", dtype="float32", adapters=(AdapterConfig("x", str(file)),)
    )
    others = ResidentModels.open([configured])
    others.load_all()
    painted = picture(models, "a", answer.patch)
    assert torch.equal(painted, picture(others, "a", answer.patch))
    assert torch.equal(picture(models, "a"), plain)
    assert not torch.equal(painted, plain)
    key = models.keys["a"]["transformer" if "transformer" in models.keys["a"] else "unet"]
    models.unload(key)
    models.load(key)
    assert torch.equal(picture(models, "a", answer.patch), painted), "a component loaded again has it too"


def test_a_component_is_loaded_again_without_an_adapter_whose_file_is_gone(
    loader: Loader, models: ResidentModels, file: Path
) -> None:
    """Requests with the adapter fail, and no others."""
    plain, patch = picture(models, "a"), loader.load(file).patch
    file.unlink()
    key = models.keys["a"]["transformer" if "transformer" in models.keys["a"] else "unet"]
    models.unload(key)
    models.load(key)
    assert models.families["a"].lacking((Patch(patch),))
    assert torch.equal(picture(models, "a"), plain)


def test_one_of_a_model_that_is_not_loaded_is_read_once(loader: Loader, models: ResidentModels, file: Path) -> None:
    keys = dict.fromkeys(models.keys["a"].values())
    for key in keys:
        models.unload(key)
    patch = loader.load(file).patch
    file.unlink()
    for key in keys:
        models.load(key)
    assert not models.families["a"].lacking((Patch(patch),))
    assert not torch.equal(picture(models, "a", patch), picture(models, "a"))


def test_it_is_dropped_from_shared_components_with_its_last_model(
    loader: Loader, models: ResidentModels, file: Path
) -> None:
    hat = Patch(loader.load(file, "a").patch)
    assert models.families["b"].lacking((hat,))
    assert loader.load(file, "b").patch == hat.id
    painted = picture(models, "b", hat.id)
    loader.drop("a", hat)
    assert models.families["a"].lacking((hat,))
    assert torch.equal(picture(models, "b", hat.id), painted)
    loader.drop("b", hat)
    plain = picture(models, "b")
    models.families["b"].put_adapter(hat.id, {})  # accepted, but nothing is left of it
    assert torch.equal(picture(models, "b", hat.id), plain)


def test_bad_files_are_answers(
    loader: Loader, models: ResidentModels, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = loader.load(tmp_path / "nowhere")
    assert missing.failure is not None
    assert (missing.failure.kind, missing.failure.param) == ("invalid_request", "lora_path")
    assert "there is no such file" in missing.failure.message
    changed = loader.load(file, patch="another")
    assert changed.failure is not None
    assert "the file has changed since it was loaded" in changed.failure.message
    unknown = loader.load(file, "c")
    assert unknown.failure is not None
    assert unknown.failure.kind == "engine"

    def panic(*given: object) -> object:
        raise Panic("unwrap on None")

    with monkeypatch.context() as patch:
        patch.setattr(models, "add_adapter", panic)
        panicked = loader.load(file)
    assert panicked.failure is not None
    assert panicked.failure.message == "Panic: unwrap on None"
    assert loader.load(file).failure is None


def test_adapters_take_no_more_memory_than_they_may(models: ResidentModels, file: Path, tmp_path: Path) -> None:
    """What is loaded again under another name counts once, what is dropped no more."""
    tensors = load_file(file)
    nbytes = 4 * sum(tensor.numel() for tensor in tensors.values())
    loader = Loader(models, 5 * nbytes // 2)
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, path in enumerate(files):
        save_file(tensors, path, {"number": str(number)})
    first, again, second, third = [loader.load(path) for path in (files[0], files[0], *files[1:])]
    assert (first.failure, again.failure, second.failure) == (None, None, None)
    assert loader.load(files[0]).failure is None, "what is loaded takes no more, and little is left"
    assert third.failure is not None
    assert (third.failure.kind, third.failure.param) == ("invalid_request", "lora_path")
    assert "are left for adapters" in third.failure.message
    loader.drop("a", Patch(first.patch))
    assert loader.load(files[2]).failure is None


def test_the_machines_memory_is_shared_by_its_workers() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < adapter_bytes(4) <= memory // 16


def test_the_worker_computes_meanwhile_and_waits_when_told(
    models: ResidentModels, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read = threading.Event(), models.add_adapter

    def slow(*arguments: Any) -> Adapter:
        assert gate.wait(20)
        return read(*arguments)

    monkeypatch.setattr(models, "add_adapter", slow)
    loader = Loader(models)
    for number in range(3):
        loader.loader.load(LoadAdapter(str(number), "a", "hat", str(file)))
    picture(models, "a")
    assert loader.answers.empty()
    threading.Timer(0.1, gate.set).start()
    loader.loader.wait()
    assert [loader.answers.get(timeout=20).request_id for _ in range(3)] == ["0", "1", "2"]
