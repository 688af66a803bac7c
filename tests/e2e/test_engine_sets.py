"""Two engines of one server that serve different models, with one model in common."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from served_edits import PHOTO, client_of, edit
from server_process import ServerProcess, fork

from tools.random_checkpoints import make_flux_fill
from tools.random_segmenter_checkpoints import make_clipseg
from tools.random_unet_checkpoints import make_sd

SETS = {0: ["fill", "twin"], 1: ["sd", "twin"]}
"""Engine -> its models. `twin` has the weights of `fill`."""
PATIENCE = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("sets")
    make_flux_fill(folder / "fill")
    make_sd(folder / "sd")
    make_clipseg(folder / "clipseg", seed=3, things=("hat",))
    paths = {"fill": "fill", "sd": "sd", "twin": "fill"}
    entries = [f'[[model]]\nname = "{name}"\npath = "{path}"\n' for name, path in paths.items()]
    entries[1] += 'segmenter = "clipseg"\n'
    sets = "".join(f"{number} = {names}\n" for number, names in SETS.items())
    catalog = folder / "models.toml"
    catalog.write_text("".join(entries) + f"[engines]\n{sets}")
    common = ("--catalog", str(catalog), "--threads", "1", "--dtype", "float32", "--no-playground")
    server = fork(folder / "scratch", *common, "--data-parallel-size", "2")
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def engines(server: ServerProcess) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = httpx.get(f"{server.base_url}/engine/stats").json()["engines"]
    return listed


def served_by(server: ServerProcess, number: int = 0) -> list[str]:
    """The engines of each answer so far, as the access log names them. number: of answers that there were, each of
    which is there a moment before its line."""
    deadline = time.monotonic() + PATIENCE
    while len(named := re.findall(r" engines=\[([\d ,]*)\]", server.log.read_text())) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return named


def test_each_engine_has_its_models_and_gets_their_requests(server: ServerProcess, client: openai.OpenAI) -> None:
    deadline = time.monotonic() + PATIENCE
    while any({*(each["models"] or {"": ""}).values()} != {"loaded"} for each in engines(server)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [[*each["models"]] for each in engines(server)] == list(SETS.values())
    first, second = ({key["content"] for key in each["resident_models"]} for each in engines(server))
    assert first < second, "only the second one has the weights of sd"
    assert [model.id for model in client.models.list()] == ["fill", "sd", "twin"]
    assert {model.state for model in client.models.list()} == {"loaded"}  # type: ignore[attr-defined]
    for name in ("fill", "sd", "sd", "fill", "sd"):
        edit(client, model=name)
    assert served_by(server, 5) == ["0", "1", "1", "0", "1"]


def test_masks_and_templates_are_where_their_model_is(server: ServerProcess, client: openai.OpenAI) -> None:
    before = len(served_by(server))
    found = {"image": ("p.png", PHOTO)}
    asked = {"model": "sd", "mask_prompt": "the hat"}
    answer = httpx.post(f"{server.base_url}/images/masks", data=asked, files=found, timeout=60)
    assert answer.status_code == 200, answer.text
    made = httpx.post(f"{server.base_url}/templates", data={"model": "sd"}, files=found, timeout=60)
    assert made.status_code == 200, made.text
    edit(client, model="sd", template_id=made.json()["id"])
    edit(client, mask=None, model="sd", mask_prompt="the hat", mask_aware=False)
    assert served_by(server, before + 3)[before:] == ["1"] * 3
    assert httpx.delete(f"{server.base_url}/templates/{made.json()['id']}").status_code == 200


def test_a_model_whose_only_engine_is_down_is_refused_and_comes_back(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    expected, _ = edit(client, model="sd")
    (process,) = (child for child in server.children() if "stencil-engine-1" in " ".join(child.cmdline()))
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while engines(server)[1]["alive"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(openai.InternalServerError) as refused:
        edit(client, model="sd")
    assert refused.value.status_code == 503
    assert float(refused.value.response.headers["retry-after"]) >= 1
    for name in ("fill", "twin"):
        edit(client, model=name)
    while not engines(server)[1]["alive"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    picture, _ = edit(client, model="sd")
    np.testing.assert_array_equal(picture, expected)
