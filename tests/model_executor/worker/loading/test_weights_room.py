"""Weights that cannot fit are refused before they are read, and none that fit are."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.gpu.local_engine import open_offloaded
from core.config import CacheConfig, ModelConfig
from core.errors import ConfigError, OutOfMemoryError
from core.handles import ModelKey
from core.ipc.limits import memory_limit
from core.memory_budget import Room, total_bytes
from core.messages.worker import ModelFailed, ModelLoaded
from model_executor.worker import start
from model_executor.worker.loading.component_loader import ComponentLoader
from model_executor.worker.loading.loader_thread import LoaderThread
from model_executor.worker.loading.resident import ResidentModels, weight_bytes
from model_executor.worker.loading.weights_room import WeightsRoom
from tools.random_checkpoints import make_flux, make_flux_fill, make_klein
from tools.random_unet_checkpoints import make_sd


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"fill": make_flux_fill(folder / "fill"), "dev": make_flux(folder / "dev")}


def opened(paths: dict[str, Path], **settings: Any) -> ResidentModels:
    settings = {"dtype": "float32", "device": "cpu"} | settings
    return ResidentModels.open(
        [ModelConfig(model=str(path), served_model_name=name, **settings) for name, path in paths.items()]
    )


def refusal(models: ResidentModels, nbytes: int) -> str:
    """Why these models may not take that many bytes each."""
    with pytest.raises(ConfigError) as caught:
        WeightsRoom(models, Room(nbytes, "a test")).check_models()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def kept_bytes(models: ResidentModels, name: str) -> int:
    """Loads a model, and counts what is in use of its weights."""
    total = 0
    for key in models.needs(name):
        module, nbytes = models.read(key)
        models.install(key, module, nbytes)
        part: Any = models.families[name]._parts[models.origin(key)[1]]  # type: ignore[attr-defined]
        total += weight_bytes(part.plain) if key.component == "text_encoder" else nbytes
    return total


@pytest.mark.parametrize(
    ("make", "dtype"), [(make_flux_fill, "float32"), (make_klein, "bfloat16"), (make_sd, "bfloat16")]
)
def test_a_model_is_let_into_the_bytes_that_it_takes(make: Callable[[Path], Path], dtype: str, tmp_path: Path) -> None:
    """Also where files are float32, have tied weights twice, more layers than the family keeps, or others beside."""
    path = make(tmp_path / "model")
    for file in path.glob("text_encoder*/*.safetensors"):
        tensors = load_file(file)
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        others = {"head.of.another.weight": max(tensors.values(), key=torch.numel).clone()}
        if "shared.weight" in tensors:
            others["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
        save_file(tensors | others, file, {"format": "pt"})
    models = opened({"one": path}, dtype=dtype)
    least = sum(map(models.least_bytes, models.needs("one")))
    WeightsRoom(models, Room(least, "a test")).check_models()
    assert "one does not fit: its weights take" in refusal(models, least - 1)
    assert not models.loaded
    assert 0.9 * kept_bytes(models, "one") < least <= kept_bytes(models, "one")


def test_a_file_larger_than_memory_is_refused_by_its_header(tmp_path: Path) -> None:
    path = make_flux_fill(tmp_path / "large")
    config, file = path / "text_encoder/config.json", path / "text_encoder/model.safetensors"
    settings = json.loads(config.read_text())
    width = settings["hidden_size"]
    words = memory_limit() // width
    config.write_text(json.dumps(settings | {"vocab_size": words}))
    (name,) = (name for name in load_file(file) if name.endswith("token_embedding.weight"))
    size = 4 * words * width
    header = json.dumps({name: {"dtype": "F32", "shape": [words, width], "data_offsets": [0, size]}}).encode()
    with file.open("wb") as sparse:
        sparse.write(len(header).to_bytes(8, "little") + header)
        sparse.truncate(sparse.tell() + size)
    with pytest.raises(ConfigError, match=r"large does not fit: .*\(all memory here\); quantise the denoiser"):
        WeightsRoom(opened({"large": path}), start._room(None, CacheConfig())).check_models()


def test_quantised_weights_count_as_they_are_quantised(paths: dict[str, Path]) -> None:
    pytest.importorskip("torchao")
    models = opened({"fill": paths["fill"]}, quantization="torchao-int8")
    least = sum(map(models.least_bytes, models.needs("fill")))
    plain = opened({"fill": paths["fill"]})
    assert least < sum(map(plain.least_bytes, plain.needs("fill")))
    WeightsRoom(models, Room(least, "a test")).check_models()
    models.load_all()
    assert 0.8 * total_bytes(models.loaded) < least <= total_bytes(models.loaded), "scales are not in the headers"


class Loader:
    """Loads and drops components in a room of so many bytes."""

    def __init__(self, models: ResidentModels, nbytes: int, *, is_shared_in_turns: bool) -> None:
        self._answers: queue.SimpleQueue[ModelLoaded | ModelFailed] = queue.SimpleQueue()
        room = WeightsRoom(models, Room(nbytes, "a test"), is_shared_in_turns=is_shared_in_turns)
        self._loader = ComponentLoader(0, models, room, self._answers.put, LoaderThread(models.device))
        self._models = models

    def load(self, *keys: ModelKey) -> list[str]:
        """Why each could not be loaded; "": it is."""
        for key in keys:
            self._loader.load(key)
        answers = [self._answers.get(timeout=20) for _ in keys]
        failures = [answer.failure for answer in answers if isinstance(answer, ModelFailed)]
        assert all(failure.kind == "out_of_memory" for failure in failures)
        return [answer.failure.message if isinstance(answer, ModelFailed) else "" for answer in answers]

    def unload(self, *keys: ModelKey) -> None:
        for key in keys:
            self._loader.unload(key)


def test_what_models_share_counts_once(paths: dict[str, Path]) -> None:
    models = opened(paths)
    loader = Loader(models, total_bytes(models.sizes), is_shared_in_turns=False)
    for name in paths:
        assert not any(loader.load(*models.needs(name)))


def test_models_take_turns_in_a_room_for_one(paths: dict[str, Path]) -> None:
    """A component is loaded also while the room for the rest of its model is not free yet."""
    models = opened(paths)
    loader = Loader(models, total_bytes(models.sizes) - 1000, is_shared_in_turns=True)
    fill, dev = (models.keys[name]["transformer"] for name in ("fill", "dev"))
    assert not any(loader.load(*models.needs("fill")))
    for held, wanted in ((fill, dev), (dev, fill)):
        (why,) = loader.load(wanted)
        name = "dev" if wanted == dev else "fill"
        assert f"{name} does not fit: its weights take " in why
        assert " GiB), and models hold " in why
        assert models.find(wanted) is None
        loader.unload(held)
        assert loader.load(wanted) == [""]


def test_of_a_model_that_cannot_become_whole_nothing_is_loaded(paths: dict[str, Path], tmp_path: Path) -> None:
    models = opened(paths | {"sd": make_sd(tmp_path / "sd")})
    first = [*models.needs("fill"), *models.needs("dev")]
    nbytes = sum(map(models.least_bytes, dict.fromkeys([*first, *models.needs("sd")])))
    loader = Loader(models, nbytes - 1, is_shared_in_turns=False)
    assert not any(loader.load(*first))
    for why in loader.load(*models.needs("sd")):
        assert "sd does not fit: its weights take" in why
        assert " (transformer " in why
    assert {each.key for each in models.loaded} == {*first}


def test_of_weights_in_host_memory_the_largest_set_counts(paths: dict[str, Path]) -> None:
    models = open_offloaded(
        [ModelConfig(model=str(paths["fill"]), served_model_name="fill", dtype="float32", device="cpu")]
    )
    nbytes = {part: models.least_bytes(key) for part, key in models.keys["fill"].items()}
    text, vae = nbytes["text_encoder"] + nbytes["text_encoder_2"], nbytes["vae"]
    on_device = nbytes["transformer"] + max(text, vae)
    host = Room.of_offloaded(2 * (text + vae), 2)
    WeightsRoom(models, Room(on_device, "a test"), host).check_models()
    with pytest.raises(
        ConfigError, match=r"while \d+\.\d+ GiB are in host memory \(--offload host\), and there may be"
    ):
        WeightsRoom(models, Room(on_device - 1, "a test"), host).check_models()
    with pytest.raises(ConfigError, match=r"of the host, shared by 3 workers\); .* or leave --offload host out$"):
        WeightsRoom(models, Room(on_device, "a test"), Room.of_offloaded(3 * (text + vae) - 1, 3)).check_models()
    models.load_all()
    WeightsRoom(models, Room(on_device, "a test"), host).check_models()


def test_beside_a_model_the_denoiser_of_another_counts(paths: dict[str, Path]) -> None:
    """The two share text encoders and VAE."""
    models = open_offloaded(
        [
            ModelConfig(model=str(path), served_model_name=name, dtype="float32", device="cpu")
            for name, path in paths.items()
        ]
    )
    models.load_all(["fill"])
    nbytes = {part: models.least_bytes(key) for part, key in models.keys["dev"].items()}
    largest = max(nbytes["text_encoder"] + nbytes["text_encoder_2"], nbytes["vae"])
    wanted = models.keys["dev"]["transformer"]
    enough = models.least_bytes(models.keys["fill"]["transformer"]) + nbytes["transformer"] + largest
    WeightsRoom(models, Room(enough, "a test")).check_next(wanted)
    with pytest.raises(OutOfMemoryError, match=r"^dev does not fit: its weights take .* and models hold .* of"):
        WeightsRoom(models, Room(enough - 1, "a test")).check_next(wanted)


def test_the_room_is_a_share_of_the_gpu_or_all_memory_of_a_cpu() -> None:
    gauge: Any = SimpleNamespace(total=80_000_000_000)
    assert start._room(gauge, CacheConfig(gpu_memory_utilization=0.5)).nbytes == 40_000_000_000
    assert start._room(None, CacheConfig()) == Room.of_host(memory_limit())
