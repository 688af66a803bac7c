"""Adapters that are loaded and unloaded while a server runs: over HTTP, on several engines and ranks, after deaths."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import openai
import pytest
from adapters import make_lora
from fault_kit import Told, make_input, processes, run, start, until
from safetensors.torch import load_file, save_file
from served_edits import client_of, edit, serving
from server_process import ServerProcess

from core.errors import InvalidRequestError, OverloadedError
from core.lora import Lora
from engine.client.async_engine import AsyncEngine
from tools.random_checkpoints import make_flux_fill, make_sd3


def wild(path: Path, checkpoint: Path) -> Path:
    """An adapter whose weights are finite and so large that no picture is made with them."""
    tensors = load_file(make_lora(path, checkpoint))
    save_file({name: 1e30 * tensor for name, tensor in tensors.items()}, path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint, two adapters for it, and what is none."""
    folder = tmp_path_factory.mktemp("model")
    checkpoint = make_sd3(folder / "sd3")
    other = make_flux_fill(folder / "flux")
    (folder / "pickle.pt").write_bytes(b"\x80\x04")
    (folder / "torn.safetensors").write_bytes(b"\x00" * 100)
    return {
        "checkpoint": checkpoint,
        "shirt": make_lora(folder / "shirt.safetensors", checkpoint),
        "hat": make_lora(folder / "hat.safetensors", checkpoint, r".*attn\..*", seed=2),
        "other": make_lora(folder / "other.safetensors", other, "single_transformer_blocks.*"),
        "pickle": folder / "pickle.pt",
        "torn": folder / "torn.safetensors",
        "wild": wild(folder / "wild.safetensors", checkpoint),
        "nothing": folder / "nothing.safetensors",
    }


@pytest.fixture(scope="module")
def server(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--lora", f"shirt={files['shirt']}", "--allow-runtime-lora", "--workers-per-engine", "2")
    with serving(files["checkpoint"], tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def post(server: ServerProcess, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.base_url}/{route}", json=body, timeout=60)


def load(server: ServerProcess, name: str, path: Path, **more: Any) -> httpx.Response:
    return post(server, "load_lora_adapter", lora_name=name, lora_path=str(path), **more)


def unload(server: ServerProcess, name: str) -> httpx.Response:
    return post(server, "unload_lora_adapter", lora_name=name)


def test_a_loaded_adapter_paints_until_it_is_unloaded(
    server: ServerProcess, client: openai.OpenAI, files: dict[str, Path]
) -> None:
    """As one of the command line does, with which it shares pages; a running edit ends as it began."""
    painted, _ = edit(client, lora="shirt")
    answer = load(server, "coat", files["shirt"])
    assert answer.json() == {"id": "coat", "object": "model", "parent": "tiny", "ignored": []}
    again, report = edit(client, lora="coat")
    np.testing.assert_array_equal(again, painted)
    assert report["cache"] == "hit"
    parents = {model.id: model.parent for model in client.models.list()}  # type: ignore[attr-defined]
    assert parents == {"tiny": None, "shirt": "tiny", "coat": "tiny"}
    assert "coat" in httpx.get(f"{server.url}/metrics").text
    assert load(server, "hat", files["hat"]).status_code == 200
    slow, _ = edit(client, lora="hat", num_inference_steps=60)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(edit, client, lora="hat", num_inference_steps=60)
        while httpx.get(f"{server.base_url}/engine/stats").json()["queue"]["running"] == 0:
            pass
        for name in ("hat", "coat"):
            assert unload(server, name).json() == {"id": name, "object": "model", "deleted": True, "ignored": []}
            with pytest.raises(openai.BadRequestError, match="Supported values are: 'shirt'"):
                edit(client, lora=name)
        np.testing.assert_array_equal(running.result()[0], slow)
    np.testing.assert_array_equal(edit(client, lora="shirt")[0], painted)
    files["hat"].with_suffix(".json").write_text('{"num_inference_steps": 60}')
    assert load(server, "hat", files["hat"]).status_code == 200
    np.testing.assert_array_equal(edit(client, lora="hat", num_inference_steps=openai.omit)[0], slow)
    assert unload(server, "hat").status_code == 200
    files["hat"].with_suffix(".json").unlink()


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("nothing", "there is no such file"),
        ("pickle", "only safetensors weights are read"),
        ("torn", "cannot use adapter"),
        ("other", "which is no linear layer of this transformer"),
        ("checkpoint", "a LoRA is a .safetensors file, or a folder that holds one"),
    ],
)
def test_a_bad_file_fails_the_request_alone(
    server: ServerProcess, client: openai.OpenAI, files: dict[str, Path], file: str, why: str
) -> None:
    answer = load(server, "bad", files[file])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("lora_path", "invalid_value")
    assert why in error["message"]
    assert "bad" not in {model.id for model in client.models.list()}
    edit(client)
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"


def test_an_adapter_that_makes_no_picture_is_named_and_fails_its_own_edits(
    server: ServerProcess, client: openai.OpenAI, files: dict[str, Path]
) -> None:
    """One that runs in the same steps is as alone."""
    plain, _ = edit(client)
    assert load(server, "wild", files["wild"]).status_code == 200
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(edit, client, **({"lora": "wild"} if number % 2 else {})) for number in range(6)]
    for bad in running[1::2]:
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            bad.result()
        assert (caught.value.code, caught.value.param) == ("adapter_not_finite", "lora")
        assert "'wild'" in str(caught.value)
    for good in running[::2]:
        np.testing.assert_array_equal(good.result()[0], plain)
    assert unload(server, "wild").status_code == 200


def test_names_are_checked(server: ServerProcess, files: dict[str, Path]) -> None:
    def refused(answer: httpx.Response, status: int, param: str, code: str) -> None:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error

    refused(load(server, "shirt", files["hat"]), 400, "lora_name", "name_taken")
    refused(load(server, "tiny", files["hat"]), 400, "lora_name", "name_taken")
    refused(load(server, "a b", files["hat"]), 400, "lora_name", "invalid_value")
    refused(load(server, "hat", files["hat"], model="huge"), 404, "model", "model_not_found")
    refused(load(server, "hat", files["hat"], model="shirt"), 404, "model", "model_not_found")
    refused(post(server, "load_lora_adapter", lora_name="hat"), 400, "lora_path", "missing_required_parameter")
    refused(load(server, "hat", Path("x" * 5000)), 400, "lora_path", "string_above_max_length")
    refused(unload(server, "hat"), 404, "lora_name", "adapter_not_found")
    refused(unload(server, "tiny"), 404, "lora_name", "adapter_not_found")
    assert load(server, "hat", files["hat"], lora_int_id=3).json()["ignored"] == ["lora_int_id"]
    assert unload(server, "hat").status_code == 200


async def run_with(engine: AsyncEngine, request_id: str, *loras: str) -> Told:
    return await run(engine, request_id, make_input(steps=8), tuple(map(Lora, loras)))


async def restart(engine: AsyncEngine) -> None:
    """Kill the engine, and wait until it serves again."""
    (process,) = processes("engine")
    process.kill()
    await until(lambda: not any(engine.alive))
    with pytest.raises(OverloadedError, match="not ready"):
        await engine.load_adapter("early", "early.safetensors")
    await until(lambda: all(engine.alive))


async def begin(engine: AsyncEngine, adapter: str) -> list[asyncio.Task[Told]]:
    """Four edits that run, every second one with the adapter."""
    edits = [run_with(engine, f"{adapter}-{uuid4().hex}", *[adapter] * (number % 2)) for number in range(4)]
    tasks = [asyncio.create_task(edit) for edit in edits]
    await until(lambda: engine.num_requests_running > 0)
    return tasks


async def restart_one_rank(engine: AsyncEngine) -> None:
    """Kill a worker, and wait until another one has taken its place."""
    first, *_ = processes("worker")
    first.kill()
    await until(lambda: len(workers := processes("worker")) == 2 and first not in workers)
    await until(lambda: engine.stats[0] is not None and all(rank.is_up for rank in engine.stats[0].ranks))


async def test_what_is_restarted_loads_them_too(files: dict[str, Path], tmp_path: Path) -> None:
    """A worker, or an engine with its workers, before it gets requests. A file that has changed fails the requests with
    it."""
    hat = Path(shutil.copy(files["hat"], tmp_path / "hat.safetensors"))
    async with start(files["checkpoint"], workers_per_engine=2) as engine:
        (name,) = engine.models
        await engine.load_adapter("hat", str(hat))
        await engine.load_adapter("coat", str(files["shirt"]))
        plain, hatted, coated = [await run_with(engine, "-".join(names), *names) for names in ((), ("hat",), ("coat",))]
        assert len({str(told) for told in (plain, hatted, coated)}) == 3
        running = await begin(engine, "hat")
        await restart_one_rank(engine)
        assert await asyncio.gather(*running) == [plain, hatted] * 2
        processes("worker")[1].kill()  # it runs nothing, so that nothing is blamed; all is left to the restarted one
        await until(lambda: engine.stats[0] is not None and engine.stats[0].ranks[1].deaths > 0)
        assert await asyncio.gather(*await begin(engine, "hat")) == [plain, hatted] * 2
        shutil.copy(files["shirt"], hat)
        running = await begin(engine, "coat")
        await restart(engine)
        assert await asyncio.gather(*running) == [plain, coated] * 2
        with pytest.raises(InvalidRequestError, match="adapter is not loaded any more"):
            await run_with(engine, "changed", "hat")
        for adapter in ("hat", "coat"):
            engine.unload_adapter(adapter)
        assert list(engine.models) == [name]
        with pytest.raises(InvalidRequestError, match="served without adapters"):
            await run_with(engine, "gone", "coat")
