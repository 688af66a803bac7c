"""One server with several models: the embedded one, a UNet, SD3, and two FLUX families that share text encoders and
VAE; with room for all, and with less."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from pictures import Pixels
from served_edits import ALPHA, PHOTO, client_of, edit
from server_process import ServerProcess, fork

from core.config import EMBEDDED_MODEL, ModelConfig
from core.ipc.process import spawn
from core.sampling_params import SamplingParams
from engine.client.processes import keeper_process
from entrypoints.image_engine import Edit, ImageEngine
from tools.random_checkpoints import make_flux, make_flux_fill, make_sd3
from tools.random_unet_checkpoints import make_sd

NAMES = ("embedded", "fill", "dev", "sd", "sd3")
SHARED = {"text_encoder": ["fill", "dev"], "vae": ["fill", "dev"]}
LACKING = 64 * 1024
"""Bytes: fewer than any component takes, and more than predicted sizes are off."""

ROUNDS = 2
"""Edits of each model that each client sends."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    makers = {"fill": make_flux_fill, "dev": make_flux, "sd": make_sd, "sd3": make_sd3}
    return {"embedded": EMBEDDED_MODEL} | {name: str(make(folder / name)) for name, make in makers.items()}


@contextmanager
def serving(folder: Path, paths: Mapping[str, str], *flags: str) -> Iterator[ServerProcess]:
    catalog = folder / "models.toml"
    given = {name: "" if name == "embedded" else f'path = "{path}"\n' for name, path in paths.items()}
    catalog.write_text("".join(f'[[model]]\nname = "{name}"\n{path}' for name, path in given.items()))
    common = ("--catalog", str(catalog), "--threads", "1", "--dtype", "float32", "--no-playground")
    server = fork(folder / "scratch", *common, *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture(scope="module")
def server(paths: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("server"), paths) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def states(client: openai.OpenAI) -> dict[str, tuple[str, str]]:
    """Model -> (modality, state)."""
    return {m.id: (m.modality, m.state) for m in client.models.list()}  # type: ignore[attr-defined]


def resident(server: ServerProcess) -> list[dict[str, Any]]:
    """The components that the only engine has loaded."""
    (engine,) = httpx.get(f"{server.base_url}/engine/stats").json()["engines"]
    loaded: list[dict[str, Any]] = engine["resident_models"]
    return loaded


def until(is_so: Callable[[], bool]) -> None:
    """Wait until the engine's next reports say so."""
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wanted(name: str, index: int) -> dict[str, Any]:
    """Fields of an edit; exact and mask-aware ones in turn."""
    return {
        "model": name,
        "seed": index,
        "prompt": "a red hat" if index % 2 else "a blue coat",
        "mask_aware": index != 1,
    }


@pytest.fixture(scope="module")
def expected(paths: Mapping[str, str]) -> dict[str, list[Pixels]]:
    """The edits of each model by an engine that serves it alone."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(NAMES, pool.map(alone, map(paths.get, NAMES), NAMES), strict=True))


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


def of_three_clients(client: openai.OpenAI) -> list[dict[str, list[Pixels]]]:
    """The same edits of all models by each of three clients, which begin with different models."""

    def one_client(turn: int) -> dict[str, list[Pixels]]:
        names = [*NAMES[turn:], *NAMES[:turn]]
        answers: dict[str, list[Pixels]] = {name: [] for name in names}
        for index in range(ROUNDS):
            for name in names:
                fields = wanted(name, index)
                answers[name].append(edit(client, prompt=fields.pop("prompt"), **fields)[0])
        return answers

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one_client, range(3)))


def check_equal(clients: list[dict[str, list[Pixels]]], expected: Mapping[str, list[Pixels]]) -> None:
    for name in NAMES:
        for answers in clients:
            for picture, own in zip(answers[name], expected[name], strict=True):
                np.testing.assert_array_equal(picture[..., :3], own[..., :3], name)


def test_three_clients_get_the_pictures_of_each_model_served_alone(
    client: openai.OpenAI, expected: Mapping[str, list[Pixels]]
) -> None:
    clients = of_three_clients(client)  # the last models are being loaded meanwhile
    check_equal(clients, expected)
    firsts = [clients[0][name][0] for name in NAMES]
    assert len({picture.tobytes() for picture in firsts}) == len(NAMES), "another model paints another picture"


def test_pictures_are_the_same_when_models_take_each_others_place(
    server: ServerProcess,
    client: openai.OpenAI,
    expected: Mapping[str, list[Pixels]],
    paths: Mapping[str, str],
    tmp_path: Path,
) -> None:
    """In a budget for the embedded model, by far the largest, and half of the others."""
    until(lambda: states(client) == dict.fromkeys(NAMES, ("image", "loaded")))
    of_all, of_one = (
        sum(each["bytes"] for each in resident(server) if each["models"] == names or not names)
        for names in ([], ["embedded"])
    )
    budget = (of_all + of_one) // 2
    with serving(tmp_path, paths, "--model-bytes", str(budget)) as small, client_of(small) as its:
        check_equal(of_three_clients(its), expected)
        assert sum(each["bytes"] for each in resident(small)) <= budget
        until(lambda: "unloaded" in {state for _, state in states(its).values()})


def test_a_request_is_computed_on_two_ranks_neither_of_which_has_all_of_its_model(
    server: ServerProcess, client: openai.OpenAI, paths: Mapping[str, str], tmp_path: Path
) -> None:
    """Each has the first model, and room for the denoiser of the second, which shares all the rest, but for LACKING
    bytes: one of them drops a text encoder for it, and the other one encodes the prompt. An exact edit, since priming
    embeds its prompt itself. The picture is that of an engine of one rank with room for all.
    """
    until(lambda: states(client) == dict.fromkeys(NAMES, ("image", "loaded")))
    two, exact = {name: paths[name] for name in ("fill", "dev")}, {"model": "dev", "mask_aware": False}
    room = sum(each["bytes"] for each in resident(server) if not two.keys().isdisjoint(each["models"])) - LACKING
    flags = ("--workers-per-engine", "2", "--model-bytes", str(room))
    with serving(tmp_path, two, *flags) as parted, client_of(parted) as its:
        np.testing.assert_array_equal(edit(its, **exact)[0], edit(client, **exact)[0])
        until(lambda: any("dev" in parts for parts in parts_of_ranks(parted, "transformer")))
        denoisers, encoders = (parts_of_ranks(parted, each) for each in ("transformer", "text_encoder"))
        assert {*zip(map(tuple, denoisers), map(len, encoders), strict=True)} == {(("fill",), 2), (("fill", "dev"), 1)}


def parts_of_ranks(server: ServerProcess, component: str) -> list[list[str]]:
    """By rank: the models of each of its components of a kind."""
    (engine,) = httpx.get(f"{server.base_url}/engine/stats").json()["engines"]
    return [
        [" ".join(each["models"]) for each in rank["resident_models"] if each["component"] == component]
        for rank in engine["ranks"]
    ]


def test_models_are_listed_with_their_state(client: openai.OpenAI) -> None:
    until(lambda: states(client) == dict.fromkeys(NAMES, ("image", "loaded")))
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        edit(client, model="no-such-model")


def test_what_models_share_is_loaded_once(server: ServerProcess) -> None:
    loaded = resident(server)
    assert len(loaded) == 4 + 4 + 1 + 3 + 5, "embedded, fill with two text encoders, the transformer of dev, sd, sd3"
    for component, names in SHARED.items():
        assert any(each["component"] == component and each["models"] == names for each in loaded)
    assert sorted({name for each in loaded for name in each["models"]}) == sorted(NAMES)
    assert all(each["bytes"] > 0 for each in loaded)


def test_without_a_model_the_first_is_meant(client: openai.OpenAI) -> None:
    default, named = (edit(client, **fields)[0] for fields in ({}, {"model": "embedded"}))
    np.testing.assert_array_equal(default, named)


def test_a_template_of_one_model_can_be_edited_with_another(server: ServerProcess, client: openai.OpenAI) -> None:
    made = httpx.post(f"{server.base_url}/templates", files={"image": PHOTO}, data={"model": "sd"}).json()
    for model in ("sd", "fill"):
        picture, _ = edit(client, template_id=made["id"], model=model)
        np.testing.assert_array_equal(picture, edit(client, model=model)[0])


def test_an_offline_engine_takes_several_models(paths: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a keeper of weights that is spawned, where other tests fork it."""
    monkeypatch.setattr(keeper_process, "spawn", spawn)
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
