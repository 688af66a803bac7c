"""One server with several models: the embedded one, a UNet, and two FLUX families that share text encoders and VAE."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from pictures import Pixels
from served_edits import ALPHA, PHOTO, client_of, edit
from server_process import ServerProcess, start

from core.config import EMBEDDED_MODEL, ModelConfig
from core.sampling_params import SamplingParams
from entrypoints.image_engine import Edit, ImageEngine
from tools.random_checkpoints import make_flux, make_flux_fill
from tools.random_unet_checkpoints import make_sd

NAMES = ("embedded", "fill", "dev", "sd")
SHARED = {"text_encoder": ["fill", "dev"], "vae": ["fill", "dev"]}
ROUNDS = 2
"""Edits of each model that each client sends."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    makers = {"fill": make_flux_fill, "dev": make_flux, "sd": make_sd}
    return {"embedded": EMBEDDED_MODEL} | {name: str(make(folder / name)) for name, make in makers.items()}


@pytest.fixture(scope="module")
def server(paths: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    catalog = folder / "models.toml"
    entries = [f'[[model]]\nname = "{name}"\npath = "{path}"\n' for name, path in paths.items() if name != "embedded"]
    catalog.write_text('[[model]]\nname = "embedded"\n' + "".join(entries))
    flags = ("--catalog", str(catalog), "--threads", "1", "--dtype", "float32", "--no-playground")
    server = start(folder / "scratch", *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def wanted(name: str, index: int) -> dict[str, Any]:
    """Fields of an edit; exact and mask-aware ones in turn."""
    return {
        "model": name,
        "seed": index,
        "prompt": "a red hat" if index % 2 else "a blue coat",
        "mask_aware": index != 1,
    }


def alone(path: str, name: str) -> list[Pixels]:
    """The same edits by an engine with this model only."""
    config = ModelConfig(model=path, served_model_name=name, dtype="float32", threads=1)
    fields = [wanted(name, index) for index in range(ROUNDS)]
    edits = [Edit(prompt=each["prompt"], image=PHOTO, mask=ALPHA) for each in fields]
    params = [
        SamplingParams(seed=each["seed"], num_inference_steps=4, mask_aware=each["mask_aware"]) for each in fields
    ]
    with ImageEngine(models=[config], image_workers=1) as engine:
        results = engine.generate(edits, params, use_tqdm=False)
    return [np.asarray(result.images[0]) for result in results]


def test_three_clients_get_the_pictures_of_each_model_served_alone(
    client: openai.OpenAI, paths: Mapping[str, str]
) -> None:
    def one_client(turn: int) -> dict[str, list[Pixels]]:
        names = [*NAMES[turn:], *NAMES[:turn]]
        answers: dict[str, list[Pixels]] = {name: [] for name in names}
        for index in range(ROUNDS):
            for name in names:
                fields = wanted(name, index)
                answers[name].append(edit(client, prompt=fields.pop("prompt"), **fields)[0])
        return answers

    with ThreadPoolExecutor(3) as pool:
        clients = list(pool.map(one_client, range(3)))
        expected = dict(zip(NAMES, pool.map(alone, map(paths.get, NAMES), NAMES), strict=True))
    for name in NAMES:
        for answers in clients:
            for picture, own in zip(answers[name], expected[name], strict=True):
                np.testing.assert_array_equal(picture[..., :3], own[..., :3], name)
    firsts = [clients[0][name][0] for name in NAMES]
    assert len({picture.tobytes() for picture in firsts}) == len(NAMES), "another model paints another picture"


def test_models_are_listed_with_their_state(client: openai.OpenAI, server: ServerProcess) -> None:
    def states() -> dict[str, tuple[str, str]]:
        return {m.id: (m.modality, m.state) for m in client.models.list()}  # type: ignore[attr-defined]

    deadline = time.monotonic() + 10
    while states() != dict.fromkeys(NAMES, ("image", "loaded")):  # the first report may still be on its way
        assert time.monotonic() < deadline, states()
        time.sleep(0.05)
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        edit(client, model="no-such-model")


def test_what_models_share_is_loaded_once(server: ServerProcess) -> None:
    (engine,) = httpx.get(f"{server.base_url}/engine/stats").json()["engines"]
    resident = engine["resident_models"]
    assert len(resident) == 4 + 4 + 1 + 3, "embedded, fill with two text encoders, the transformer of dev, sd"
    for component, names in SHARED.items():
        assert any(each["component"] == component and each["models"] == names for each in resident)
    assert sorted({name for each in resident for name in each["models"]}) == sorted(NAMES)
    assert all(each["bytes"] > 0 for each in resident)


def test_without_a_model_the_first_is_meant(client: openai.OpenAI) -> None:
    default, named = (edit(client, **fields)[0] for fields in ({}, {"model": "embedded"}))
    np.testing.assert_array_equal(default, named)


def test_a_template_of_one_model_can_be_edited_with_another(server: ServerProcess, client: openai.OpenAI) -> None:
    made = httpx.post(f"{server.base_url}/templates", files={"image": PHOTO}, data={"model": "sd"}).json()
    for model in ("sd", "fill"):
        picture, _ = edit(client, template_id=made["id"], model=model)
        np.testing.assert_array_equal(picture, edit(client, model=model)[0])


def test_an_offline_engine_takes_several_models(paths: Mapping[str, str]) -> None:
    configs = [ModelConfig(model=paths[name], served_model_name=name, dtype="float32") for name in ("fill", "dev")]
    with ImageEngine(models=configs, image_workers=1) as engine:
        assert list(engine.models) == ["fill", "dev"]
        assert engine.model.name == "fill"
        edits = [Edit(prompt="a hat", image=PHOTO, mask=ALPHA, model=name) for name in ("", "fill", "dev")]
        first, named, other = (
            result.images[0]
            for result in engine.generate(edits, SamplingParams(seed=1, num_inference_steps=2), use_tqdm=False)
        )
        assert np.array_equal(np.asarray(first), np.asarray(named))
        assert not np.array_equal(np.asarray(first), np.asarray(other))
        (unknown,) = engine.generate([Edit(prompt="a hat", model="sdxl")], use_tqdm=False)
        assert "sdxl" in str(unknown.error)
