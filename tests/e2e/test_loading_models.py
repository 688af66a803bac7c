"""Models that are loaded while others serve: in a budget, with one that cannot be loaded, after the keeper's death."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from served_edits import client_of, edit
from server_process import ServerProcess, fork, spawn_forked

from tools.random_checkpoints import make_flux_fill
from tools.random_unet_checkpoints import make_sd

PATIENCE = 60.0


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"fill": make_flux_fill(folder / "fill"), "sd": make_sd(folder / "sd")}


@pytest.fixture(scope="module")
def five_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("five")
    return {str(seed): make_flux_fill(folder / str(seed), seed=seed) for seed in range(5)}


def weight_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*/*.safetensors"))


@contextmanager
def serving(folder: Path, paths: dict[str, Path], *flags: str) -> Iterator[ServerProcess]:
    models = [flag for name, path in paths.items() for flag in ("--model", f"{name}={path}")]
    server = fork(folder / "scratch", *models, "--threads", "1", "--dtype", "float32", "--no-playground", *flags)
    yield server
    assert server.stop() == 0, server.log.read_text()


def states(client: openai.OpenAI) -> dict[str, str]:
    return {model.id: model.state for model in client.models.list()}  # type: ignore[attr-defined]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_models_take_turns_in_a_budget_for_one(tmp_path: Path, paths: dict[str, Path]) -> None:
    """Pictures do not depend on it, nor on the death of the process that loads weights."""
    budget = max(weight_bytes(path) for path in paths.values())
    with serving(tmp_path, paths, "--model-bytes", str(budget)) as server, client_of(server) as client:
        until(lambda: states(client) == {"fill": "loaded", "sd": "unloaded"})
        first = {name: edit(client, model=name)[0] for name in paths}
        until(lambda: states(client) == {"fill": "unloaded", "sd": "loaded"})
        for name in ("fill", "sd", "fill"):
            np.testing.assert_array_equal(edit(client, model=name)[0], first[name])
        (keeper,) = (child for child in server.children() if "stencil-weights" in " ".join(child.cmdline()))
        keeper.send_signal(signal.SIGKILL)
        np.testing.assert_array_equal(edit(client, model="sd")[0], first["sd"])
        assert "the process that loads weights died" in server.log.read_text()


@pytest.mark.parametrize("room", [3, 1])
def test_five_models_on_two_ranks(tmp_path: Path, five_paths: dict[str, Path], room: int) -> None:
    """With room for some of them on each rank, what a model paints is the same wherever it is, and whatever came
    before. With room for three, each is somewhere, and none is loaded again for a request.
    """
    flags = ("--workers-per-engine", "2", "--model-bytes", str(room * max(map(weight_bytes, five_paths.values()))))
    with serving(tmp_path, five_paths, *flags) as server, client_of(server) as client:
        until(lambda: [*states(client).values()].count("loaded") == (5 if room == 3 else 1))
        first = {name: edit(client, model=name)[0] for name in five_paths}
        before = models_of_ranks(server)

        def run(name: str) -> None:
            for _ in range(3):
                np.testing.assert_array_equal(edit(client, model=name)[0], first[name])

        with ThreadPoolExecutor(len(five_paths)) as pool:
            list(pool.map(run, five_paths))
        after = models_of_ranks(server)
        assert all(len(models) <= room for models in after)
        assert room == 1 or after == before


def models_of_ranks(server: ServerProcess) -> list[set[str]]:
    """By rank: the models of which it has anything."""
    (engine,) = httpx.get(f"{server.url}/v1/engine/stats").json()["engines"]
    return [{name for each in rank["resident_models"] for name in each["models"]} for rank in engine["ranks"]]


def test_two_engines_hold_different_models(tmp_path: Path, five_paths: dict[str, Path]) -> None:
    """Each has room for one: which one that is, requests decide. When an engine dies, its model's requests go on at the
    other one.
    """
    two = {name: five_paths[name] for name in ("0", "1")}
    flags = ("--data-parallel-size", "2", "--model-bytes", str(max(map(weight_bytes, two.values()))))
    with serving(tmp_path, two, *flags) as server, client_of(server) as client:
        until(lambda: states_of_ranks(server) == [{"0": "resident"}] * 2)
        first = {name: edit(client, model=name)[0] for name in two}
        until(lambda: sorted(map(list, states_of_ranks(server))) == [["0"], ["1"]])
        before = models_on_ranks(server)
        for name in (*reversed(two), *two):
            np.testing.assert_array_equal(edit(client, model=name)[0], first[name])
        until(lambda: sum(each["hits"] for each in models_on_ranks(server).values()) >= 6)
        after = models_on_ranks(server)
        assert {place: each["loads"] for place, each in after.items()} == {
            place: each["loads"] for place, each in before.items()
        }, "nothing is loaded again"
        (home,) = (engine for engine, name in after if name == "1")

        def run(name: str) -> None:
            np.testing.assert_array_equal(edit(client, model=name)[0], first[name])

        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(run, name) for name in (*two, *two, *two)]
            kill_engine(server, home)
            for answer in answers:
                answer.result()


def models_on_ranks(server: ServerProcess) -> dict[tuple[int, str], dict[str, Any]]:
    """(engine, model) -> what the only rank of the engine tells of it."""
    engines = httpx.get(f"{server.url}/v1/engine/stats").json()["engines"]
    return {
        (each["index"], of["model"]): of for each in engines for of in (each["ranks"] or [{"models": []}])[0]["models"]
    }


def states_of_ranks(server: ServerProcess) -> list[dict[str, str]]:
    """By engine: model -> state on its only rank."""
    found: list[dict[str, str]] = [{}, {}]
    for (engine, model), of in models_on_ranks(server).items():
        found[engine][model] = of["state"]
    return found


def kill_engine(server: ServerProcess, number: int) -> None:
    (process,) = (child for child in server.children() if f"stencil-engine-{number}" in " ".join(child.cmdline()))
    process.send_signal(signal.SIGKILL)


def test_deaths_change_no_picture_and_leave_nothing(tmp_path: Path, paths: dict[str, Path]) -> None:
    """Of a worker, which takes its models up again, and of the server itself, whose other processes end with it."""
    flags = [flag for name, path in paths.items() for flag in ("--model", f"{name}={path}")]
    server = fork(tmp_path / "scratch", *flags, "--threads", "1", "--dtype", "float32", "--no-playground")
    with client_of(server) as client:
        before = {name: edit(client, model=name)[0] for name in paths}
        (worker,) = (child for child in server.children() if "stencil-worker" in " ".join(child.cmdline()))
        worker.send_signal(signal.SIGKILL)
        for name in paths:
            np.testing.assert_array_equal(edit(client, model=name)[0], before[name])
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL


def test_a_model_that_cannot_be_loaded_fails_its_own_requests(tmp_path: Path, paths: dict[str, Path]) -> None:
    broken = Path(shutil.copytree(paths["fill"], tmp_path / "broken"))
    config = broken / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_single_layers": 3}))
    with serving(tmp_path, paths | {"broken": broken}) as server, client_of(server) as client:
        until(lambda: states(client) == {"fill": "loaded", "sd": "loaded", "broken": "failed"})
        with pytest.raises(openai.APIStatusError) as caught:
            edit(client, model="broken")
        assert caught.value.status_code == 503
        assert caught.value.code == "model_unavailable"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 10
        assert str(broken) not in caught.value.message, "files are named in the log alone"
        assert "the weights lack" in server.log.read_text()
        for name in paths:
            assert edit(client, model=name)[0].any()


def test_a_budget_that_no_order_could_meet_ends_the_start(tmp_path: Path, paths: dict[str, Path]) -> None:
    flags = [flag for name, path in paths.items() for flag in ("--model", f"{name}={path}")]
    process = spawn_forked(tmp_path / "scratch", *flags, "--model-bytes", "100K")
    assert process.wait(PATIENCE) == 1
    process.stdout.close()
    (line,) = (tmp_path / "scratch.log").read_text().splitlines()
    assert line.startswith("stencil: error: --model-bytes 102400: the weights of fill alone take ")
