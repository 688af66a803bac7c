"""ComfyUI's API on a fake engine: what is asked of the engine, what callers see, and what is refused."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import torch
from comfy_graphs import (
    NEGATIVE,
    PROMPT,
    SEED,
    Draft,
    GraphText,
    img2img,
    inpainting,
    lora,
    masked,
    refined,
    txt2img,
)
from fake_engine import MODEL, FakeEngine
from malformed_comfy_graphs import malformed
from real_server import until

from core.config import EngineConfig, ModelConfig, StencilConfig
from core.errors import InvalidImageError, OverloadedError, RunError
from core.model_choice import ModelChoice
from core.sampling_params import MAX_IMAGES
from engine.client.edit_types import EditInput, ImageOutput
from engine.client.upload import KeptUpload
from entrypoints.comfy_api import jobs as jobs_module
from entrypoints.comfy_api import sockets as sockets_module
from entrypoints.comfy_api.files import FileName, Files, StoredFile
from entrypoints.comfy_api.graph_edits import ReadGraph, check_loaded
from entrypoints.comfy_api.history import History
from entrypoints.comfy_api.job import Job
from entrypoints.comfy_api.jobs import Jobs
from entrypoints.comfy_api.owned_store import StoreLimits
from entrypoints.comfy_api.prompt import Prompt
from entrypoints.comfy_api.sockets import Socket, Sockets
from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.openai.guards.request_owners import RequestOwners

PNG = b"\x89PNG\r\n\x1a\n"
ONE, TWO = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}


def engine_of(payload: bytes = PNG + b"made") -> FakeEngine:
    model = msgspec.structs.replace(MODEL, name="sd", has_guidance=True, is_guidance_cfg=True)
    return FakeEngine(model, payload)


@asynccontextmanager
async def serving(engine: FakeEngine, *keys: str) -> AsyncIterator[httpx.AsyncClient]:
    settings = ServerSettings(api_keys=keys, max_upload_bytes=100_000, comfy_api=True)
    app = create_app(engine, settings)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def queue(
    client: httpx.AsyncClient, graph: GraphText, headers: dict[str, str] | None = None, **members: Any
) -> str:
    answer = await client.post("/prompt", json={"prompt": graph, **members}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["node_errors"] == {}
    id_: str = answer.json()["prompt_id"]
    return id_


async def history_of(client: httpx.AsyncClient, id_: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while not (found := (await client.get(f"/history/{id_}", headers=headers)).json()):
            await asyncio.sleep(0.01)
    entry: dict[str, Any] = found[id_]
    return entry


async def upload(
    client: httpx.AsyncClient, name: str, content: bytes = PNG, path: str = "image", headers: Any = None, **fields: str
) -> httpx.Response:
    return await client.post(f"/upload/{path}", files={"image": (name, content)}, data=fields, headers=headers)


def refused(answer: httpx.Response, status: int = 400) -> tuple[str, dict[str, Any]]:
    """(message, node_errors) of a refusal in ComfyUI's form."""
    assert answer.status_code == status, answer.text
    said = answer.json()
    assert set(said) == {"error", "node_errors"}
    assert set(said["error"]) == {"type", "message", "details", "extra_info"}
    for errors in said["node_errors"].values():
        assert set(errors) == {"errors", "dependent_outputs", "class_type"}
    return said["error"]["details"], said["node_errors"]


async def test_a_prompt_is_made_and_viewed() -> None:
    engine = engine_of()
    async with serving(engine) as client:
        extra_data = {"extra_pnginfo": {"x": 1}, "api_key_comfy_org": "a secret, which nobody is shown"}
        id_ = await queue(client, txt2img(), client_id="me", extra_data=extra_data)
        entry = await history_of(client, id_)
        (node,) = entry["outputs"]
        (image,) = entry["outputs"][node]["images"]
        assert image == {"filename": "ComfyUI_00001_.png", "subfolder": "", "type": "output"}
        assert entry["prompt"] == [0, id_, txt2img(), {"extra_pnginfo": {"x": 1}, "client_id": "me"}, [node]]
        assert (entry["status"]["status_str"], entry["status"]["completed"]) == ("success", True)
        assert [event for event, _ in entry["status"]["messages"]] == [
            "execution_start",
            "execution_cached",
            "execution_success",
        ]
        viewed = await client.get("/view", params=image)
        assert (viewed.status_code, viewed.content) == (200, engine.payload)
        assert viewed.headers["content-type"] == "image/png"
        assert viewed.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/api/history")).json() == {id_: entry}
    edit = engine.last
    assert (edit.prompt, edit.sampling.negative_prompt, edit.sampling.seed) == (PROMPT, NEGATIVE, SEED)
    assert (edit.sampling.num_inference_steps, edit.sampling.guidance_scale) == (4, 3.0)
    assert (edit.canvas_size, edit.image, edit.partial_images, edit.base64) == ((64, 64), None, 0, False)


async def test_all_pictures_of_a_graph_are_made() -> None:
    engine, draft = engine_of(), Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    told = draft.texts(clip)
    for seed in (1, 2):
        latents = draft.sampled(denoiser, told, draft.empty(), seed=seed)
        picture = draft.add("VAEDecode", samples=latents, vae=vae)
        draft.add("SaveImage", images=picture, filename_prefix=f"sub/seed{seed}")
    draft.add("PreviewImage", images=picture)
    draft.add("PreviewImage", images=draft.add("LoadImage", image="seen.png"))
    for node in draft.nodes.values():
        if node["class_type"] == "EmptyLatentImage":
            node["inputs"]["batch_size"] = 2
    async with serving(engine) as client:
        await upload(client, "seen.png", PNG + b"seen")
        entry = await history_of(client, await queue(client, draft.nodes))
        shown = {
            node: [f"{each['subfolder']}/{each['filename']}:{each['type']}" for each in output["images"]]
            for node, output in entry["outputs"].items()
        }
        assert shown == {
            "9": ["sub/seed1_00001_.png:output", "sub/seed1_00002_.png:output"],
            "13": ["sub/seed2_00003_.png:output", "sub/seed2_00004_.png:output"],
            "14": ["/ComfyUI_temp_00005_.png:temp", "/ComfyUI_temp_00006_.png:temp"],
            "16": ["/ComfyUI_temp_00007_.png:temp"],
        }
        for output in entry["outputs"].values():
            for image in output["images"]:
                assert (await client.get("/view", params=image)).status_code == 200
    assert [(edit.sampling.seed, edit.sampling.n) for edit in engine.edits] == [(1, 2), (2, 2)]
    assert engine.brought[0].nodes == engine.brought[1].nodes


async def test_a_prompt_makes_as_many_pictures_as_a_request_may() -> None:
    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    told = draft.texts(clip)
    for seed in (1, 2):
        latents = draft.sampled(denoiser, told, draft.empty(), seed=seed)
        draft.add("SaveImage", images=draft.add("VAEDecode", samples=latents, vae=vae), filename_prefix="x")
    empty = [node for node in draft.nodes.values() if node["class_type"] == "EmptyLatentImage"]
    for node, number in zip(empty, (5, 6), strict=True):
        node["inputs"]["batch_size"] = number
    async with serving(engine_of()) as client:
        answer = await client.post("/prompt", json={"prompt": draft.nodes})
    assert "it makes 11 pictures, and may 10" in refused(answer)[0]


@pytest.mark.parametrize("seed", [2**63 - 1, 2**64 - 5, 2**64 - 1])
async def test_seeds_may_have_64_bits(seed: int) -> None:
    """Also those of the largest batch."""
    engine, graph = engine_of(), txt2img(seed=seed)
    graph["6"]["inputs"]["batch_size"] = MAX_IMAGES
    async with serving(engine) as client:
        await history_of(client, await queue(client, graph))
    sampling = engine.last.sampling
    assert sampling.seed is not None
    assert sampling.n == MAX_IMAGES
    noise = [torch.randn(9, generator=torch.Generator().manual_seed(each)) for each in (sampling.seed, seed)]
    assert torch.equal(*noise)


async def test_previews_are_made_for_those_who_ask() -> None:
    engine = engine_of()
    async with serving(engine) as client:
        await history_of(client, await queue(client, txt2img(), extra_data={"preview_method": "auto"}))
        assert engine.last.partial_images == 3
        await history_of(client, await queue(client, txt2img(steps=2), extra_data={"preview_method": "taesd"}))
        assert engine.last.partial_images == 1
        await history_of(client, await queue(client, txt2img(), extra_data={"preview_method": "none"}))
        assert engine.last.partial_images == 0


async def test_uploads_are_pictures_and_masks_of_prompts() -> None:
    engine = engine_of()
    async with serving(engine) as client:
        assert (await upload(client, "person.png", PNG + b"person")).json() == {
            "name": "person.png",
            "subfolder": "",
            "type": "input",
        }
        await upload(client, "mask.png", PNG + b"mask")
        await history_of(client, await queue(client, img2img()))
        assert (engine.files, engine.last.mask_kind) == ({"image": PNG + b"person"}, "none")
        await history_of(client, await queue(client, inpainting()))
        assert engine.last.mask_kind == "red"
        assert engine.files == {"image": PNG + b"person", "mask": PNG + b"mask"}
        engine.files.clear()
        await history_of(client, await queue(client, masked()))
        assert (engine.files, engine.last.mask_kind) == ({"image": PNG + b"person"}, "own")
        reference = json.dumps({"filename": "person.png", "type": "input"})
        made = await upload(client, "person.png", PNG + b"drawn", "mask", original_ref=reference, overwrite="true")
        assert made.json()["name"] == "person.png"
        await history_of(client, await queue(client, masked()))
        assert engine.files == {"image": PNG + b"person", "mask": PNG + b"drawn"}
        assert engine.last.mask_kind == "alpha"


@pytest.mark.parametrize("name", ["person.png", "other.png"])
async def test_all_pictures_of_a_graph_are_made_of_the_same_upload(name: str) -> None:
    """Where it is replaced while the first one is admitted, and where another upload pushes it out."""
    files, read = Files(StoreLimits(1, 1000, 1, 1000)), list[bytes]()

    class Engine(FakeEngine):
        @asynccontextmanager
        async def edit(
            self, request_id: str, edit: EditInput, choice: ModelChoice
        ) -> AsyncIterator[AsyncIterator[ImageOutput]]:
            async with super().edit(request_id, edit, choice) as outputs:
                read.append(self.files["image"])
                files.put("", FileName(name, "", "input"), StoredFile(KeptUpload([PNG + b"new"])))
                yield outputs

    draft = Draft()
    denoiser, clip, vae = draft.checkpoint("sd")
    told = draft.texts(clip)
    latents = draft.add("VAEEncode", pixels=draft.add("LoadImage", image="person.png"), vae=vae)
    for seed in (1, 2):
        draft.saved(draft.sampled(denoiser, told, latents, seed=seed, denoise=0.5), vae)
    prompt = Prompt.of(json.dumps({"prompt": draft.nodes}))
    graph, engine = ReadGraph.of(prompt.graph), Engine(engine_of().models["sd"])
    files.put("", FileName("person.png", "", "input"), StoredFile(KeptUpload([PNG + b"old"])))
    loaded = check_loaded(graph, files, "")
    jobs = Jobs(engine, files, History(), Sockets(), lambda *_: None)  # type: ignore[arg-type]
    await jobs.admit(Job("", prompt, 0, graph, loaded))
    await until(lambda: not jobs.num_left(""))
    assert read == [PNG + b"old"] * 2


async def test_an_upload_replaces_only_what_it_may() -> None:
    async with serving(engine_of()) as client:
        names = [
            (await upload(client, "a.png", PNG + content)).json()["name"] for content in (b"1", b"1", b"2", b"3", b"2")
        ]
        assert names == ["a.png", "a.png", "a (1).png", "a (2).png", "a (1).png"]
        assert (await upload(client, "a.png", PNG + b"3", overwrite="true")).json()["name"] == "a.png"
        view = await client.get("/view", params={"filename": "a.png", "type": "input"})
        assert view.content == PNG + b"3"
        inside = await upload(client, "a.png", PNG, subfolder="sub/", type="temp")
        assert inside.json() == {"name": "a.png", "subfolder": "sub", "type": "temp"}
        listed = (await client.get("/object_info/LoadImage")).json()["LoadImage"]["input"]["required"]["image"][0]
        assert listed == ["a (1).png", "a (2).png", "a.png"]


async def test_owners_see_their_own_alone() -> None:
    engine = engine_of()
    async with serving(engine, "one", "two") as client:
        for path in ("/prompt", "/api/history", "/queue", "/view?filename=a.png", "/object_info", "/system_stats"):
            assert (await client.get(path)).status_code == 401
        assert (await client.post("/prompt", json={"prompt": txt2img()})).status_code == 401
        assert (await upload(client, "a.png")).status_code == 401
        await upload(client, "person.png", PNG, headers=ONE)
        made = await client.post("/prompt", json={"prompt": img2img()}, headers=TWO)
        assert "there is no file 'person.png' in input" in refused(made)[0]
        id_ = await queue(client, img2img(), ONE)
        entry = await history_of(client, id_, ONE)
        (image,) = next(iter(entry["outputs"].values()))["images"]
        assert (await client.get("/view", params=image, headers=ONE)).status_code == 200
        refused(await client.get("/view", params=image, headers=TWO), 404)
        assert (await client.get(f"/history/{id_}", headers=TWO)).json() == {}
        assert (await client.get("/history", headers=TWO)).json() == {}
        await client.post("/history", json={"clear": True, "delete": [id_]}, headers=TWO)
        engine.gate.clear()
        running = await queue(client, img2img(), ONE)
        assert (await client.get("/queue", headers=TWO)).json() == {"queue_running": [], "queue_pending": []}
        await client.post("/interrupt", json={"prompt_id": running}, headers=TWO)
        await client.post("/queue", json={"clear": True}, headers=TWO)
        engine.gate.set()
        assert (await history_of(client, running, ONE))["status"]["completed"]
        assert set((await client.get("/history", headers=ONE)).json()) == {id_, running}
    assert engine.last.owner


async def test_prompts_wait_run_and_are_ended() -> None:
    engine = engine_of()
    engine.gate.clear()
    async with serving(engine) as client:
        ids = [await queue(client, txt2img(seed=seed), prompt_id=f"p{seed}") for seed in (1, 2)]
        assert ids == ["p1", "p2"]
        queued = (await client.get("/queue")).json()
        assert [item[1] for item in queued["queue_running"]] == ids
        assert (await client.get("/prompt")).json() == {"exec_info": {"queue_remaining": 2}}
        again = await client.post("/prompt", json={"prompt": txt2img(), "prompt_id": "p1"})
        assert "p1 is in the queue already" in refused(again)[0]
        await client.post("/queue", json={"delete": ids})  # none of them waits
        await client.post("/interrupt", json={"prompt_id": "p1"})
        entry = await history_of(client, "p1")
        assert (entry["status"]["status_str"], entry["status"]["completed"]) == ("error", False)
        assert entry["status"]["messages"][-1][0] == "execution_interrupted"
        engine.has_begun = False
        assert [item[1] for item in (await client.get("/queue")).json()["queue_pending"]] == ["p2"]
        await client.post("/interrupt")  # nothing runs
        assert (await client.post("/queue", json={"delete": ["p2", "none"]})).status_code == 200
        assert (await client.get("/queue")).json() == {"queue_running": [], "queue_pending": []}
        assert (await client.get("/history/p2")).json() == {}
        assert engine.num_open == 0


async def test_a_failure_is_told_in_the_history(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of()
    engine.failing = RunError("it failed on this machine")
    async with serving(engine) as client:
        entry = await history_of(client, await queue(client, txt2img()))
    event, told = entry["status"]["messages"][-1]
    assert (event, told["node_id"], told["node_type"]) == ("execution_error", "7", "KSampler")
    assert "machine" not in told["exception_message"]
    assert "it failed on this machine" in caplog.text


async def test_what_the_engine_refuses_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    async with serving(engine) as client:
        noted = list[str]()
        monkeypatch.setattr(RequestOwners, "note", lambda self, request_id, owner: noted.append(owner))
        engine.entering = OverloadedError("The queue is full.", retry_after=3.0)
        answer = await client.post("/prompt", json={"prompt": txt2img()})
        assert (refused(answer, 503)[0], answer.headers["retry-after"]) == ("The queue is full.", "3")
        await upload(client, "person.png")
        engine.entering = InvalidImageError("Invalid image file.", param="image", code="invalid_image_file")
        message, nodes = refused(await client.post("/prompt", json={"prompt": img2img()}))
        assert message == "node 4 (LoadImage), input image: Invalid image file."
        assert nodes["4"]["class_type"] == "LoadImage"
        assert nodes["4"]["errors"][0]["extra_info"] == {"input_name": "image"}
        engine.is_ready = False
        refused(await client.post("/prompt", json={"prompt": txt2img()}), 503)
        assert (await client.get("/history")).json() == {}
        assert noted == []


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        (txt2img("xl"), "node 3 (CheckpointLoaderSimple), input ckpt_name: no model is called xl; there are sd"),
        (lora(), "node 4 (LoraLoader), input lora_name: no adapter of sd is called hat; there are none"),
        (refined(), "input ckpt_name: no model is called sdxl; there are sd"),
        (img2img(), "node 4 (LoadImage), input image: there is no file 'person.png' in input; upload it"),
        ({"3": {"class_type": "FreeU", "inputs": {}}}, "node 3 (FreeU): nothing here does what this class does"),
        ({"3": {"class_type": "VAELoader", "inputs": {"vae_name": "x"}}}, "no SaveImage or PreviewImage is in it"),
    ],
)
async def test_what_is_not_served_is_refused_by_node(graph: GraphText, problem: str) -> None:
    engine = engine_of()
    async with serving(engine) as client:
        message, nodes = refused(await client.post("/prompt", json={"prompt": graph}))
    assert problem in message
    assert len(nodes) == ("node " in problem or "input " in problem)
    assert engine.edits == []


async def test_schedulers_are_read_at_the_start_alone(tmp_path: Path) -> None:
    """Else a disk that hangs would stop the server."""
    engine, file = engine_of(), tmp_path / "scheduler" / "scheduler_config.json"
    model = ModelConfig(model=str(tmp_path), served_model_name="sd")
    engine.config = StencilConfig(engine=EngineConfig(models=(model,)))
    file.parent.mkdir()
    file.write_text('{"_class_name": "PNDMScheduler"}')
    async with serving(engine) as client:
        file.unlink()
        message, _ = refused(await client.post("/prompt", json={"prompt": txt2img()}))
    assert "input sampler_name: sd cannot do that: sampler euler is EulerDiscreteScheduler" in message


async def test_a_prefix_stays_in_its_folder() -> None:
    graph = txt2img()
    graph["9"]["inputs"]["filename_prefix"] = "../up"
    async with serving(engine_of()) as client:
        assert "input filename_prefix" in refused(await client.post("/prompt", json={"prompt": graph}))[0]


async def test_a_model_with_a_workflow_of_the_operator_is_left_alone() -> None:
    engine = engine_of()
    engine.models["sd"] = msgspec.structs.replace(engine.models["sd"], workflow="guarded")
    async with serving(engine) as client:
        message, _ = refused(await client.post("/prompt", json={"prompt": txt2img()}))
    assert "it has a workflow already, which the server's operator has chosen" in message


async def test_malformed_prompts_are_refused_and_touch_nothing() -> None:
    engine, random = engine_of(), Random(0)
    slowest = 0.0
    async with serving(engine) as client:
        for make in malformed(500):
            made = make(random)
            graph = made if isinstance(made, str) else json.dumps(made)
            began = time.perf_counter()
            answer = await client.post("/prompt", content=f'{{"prompt": {graph}}}'.encode())
            slowest = max(slowest, time.perf_counter() - began)
            assert len(refused(answer)[0]) < 2000, make.__name__
        for body in (b"", b"\xff", b"[]", b"3", b"null", b'{"prompt": null}', b'{"prompt": {}, "client_id": 3}'):
            refused(await client.post("/prompt", content=body))
        assert (await client.get("/queue")).json() == {"queue_running": [], "queue_pending": []}
        assert (await client.get("/history")).json() == {}
    assert slowest < 2.0
    assert (engine.edits, engine.brought) == ([], [])


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": {"1": {"class_type": "SaveImage", "inputs": {"images": [' + "[]," * 1_300_000 + "[]]}}}}",
        '{"prompt": {' + "".join(f'"n{number}": {{}},' for number in range(280_000)) + '"1": {}}}',
        '{"prompt": {"1": {}}, "extra_data": {' + "".join(f'"{n}":1,' for n in range(380_000)) + '"a": 1}}',
    ],
    ids=["values", "nodes", "extra_data"],
)
async def test_large_bodies_do_not_keep_others_waiting(text: str) -> None:
    longest = before = 0.0

    async def beat() -> None:
        nonlocal longest, before
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - before)

    async with serving(engine_of()) as client:
        beating = asyncio.create_task(beat())
        refused(await client.post("/prompt", content=text.encode()))
        beating.cancel()
    assert longest < 0.25  # 1.3 s if all values are read


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/history?max_items=x", b"", 400),
        ("GET", "/view", b"", 400),
        ("GET", "/view?filename=../x", b"", 400),
        ("GET", "/view?filename=x.png&type=models", b"", 400),
        ("GET", "/view?filename=x.png&channel=a", b"", 400),
        ("GET", "/view?filename=x.png", b"", 404),
        ("POST", "/queue", b"{", 400),
        ("POST", "/queue", b'{"delete": [3]}', 400),
        ("POST", "/history", b"[]", 400),
        ("POST", "/interrupt", b"x", 400),
        ("POST", "/upload/image", b"x", 415),
        ("POST", "/queue", b" " * 300_000, 413),
    ],
)
async def test_wrong_requests_are_refused(method: str, path: str, content: bytes, status: int) -> None:
    async with serving(engine_of()) as client:
        refused(await client.request(method, path, content=content), status)


async def test_wrong_uploads_are_refused() -> None:
    async with serving(engine_of()) as client:
        assert "no PNG, JPEG or WebP" in refused(await upload(client, "a.png", b"<svg>"))[0]
        refused(await upload(client, "../a.png"))
        refused(await upload(client, "a.png", subfolder=".."))
        refused(await upload(client, "a.png", type="models"))
        refused(await upload(client, "a.png", PNG + bytes(100_000)), 413)
        refused(await client.post("/upload/image", data={"x": "y"}, files={"other": ("a.png", PNG)}))
        refused(await client.post("/upload/image", files={"image": (None, "text")}))
        for reference in ("", "x", "[]", '{"filename": "none.png"}', '{"filename": "../x"}'):
            refused(await upload(client, "a.png", path="mask", original_ref=reference))
        assert (await client.get("/object_info/LoadImage")).json()["LoadImage"]["input"]["required"]["image"][0] == []


async def test_clients_find_what_they_look_for() -> None:
    async with serving(engine_of()) as client:
        info = (await client.get("/object_info")).json()
        assert info["CheckpointLoaderSimple"]["input"]["required"]["ckpt_name"][0] == ["sd"]
        assert "euler" in info["KSampler"]["input"]["required"]["sampler_name"][0]
        assert info["KSampler"]["input"]["required"]["steps"] == ["INT", {"default": 1, "min": 1, "max": 200}]
        assert info["KSampler"]["output"] == ["LATENT"]
        assert info["SaveImage"]["output_node"] is True
        assert "vae" in info["ControlNetApplyAdvanced"]["input"]["optional"]
        assert (await client.get("/object_info/Nothing")).json() == {}
        stats = (await client.get("/system_stats")).json()
        assert stats["system"]["ram_total"] > stats["system"]["ram_free"] > 0
        assert stats["devices"][0]["type"] == MODEL.device
        assert (await client.get("/models/checkpoints")).json() == ["sd"]
        assert "loras" in (await client.get("/models")).json()
        assert (await client.get("/models/nothing")).status_code == 404
        assert (await client.get("/embeddings")).json() == []
        assert (await client.get("/features")).json() == {"supports_preview_metadata": False}
        assert (await client.post("/free", json={})).json()["error"]["code"] == "unknown_url"


async def test_without_the_flag_there_is_none_of_it(client: httpx.AsyncClient) -> None:
    for path in ("/prompt", "/api/prompt", "/queue", "/history", "/object_info"):
        assert (await client.get(path)).json()["error"]["code"] == "unknown_url"


async def told_by(socket: Socket) -> list[str | bytes]:
    """All messages up to the end of an execution."""
    told = list[str | bytes]()
    async with asyncio.timeout(10):
        while not told or not isinstance(told[-1], str) or '"node":null' not in told[-1]:
            message = await socket.next()
            assert message is not None
            told.append(message)
    return told


async def test_pictures_can_be_sent_instead_of_kept() -> None:
    engine, sockets = engine_of(), Sockets()
    files, history = Files(), History()
    jobs = Jobs(engine, files, history, sockets, lambda *_: None)  # type: ignore[arg-type]
    graph = txt2img()
    graph["9"] = {"class_type": "SaveImageWebsocket", "inputs": {"images": ["8", 0]}}
    prompt = Prompt.of(json.dumps({"prompt": graph, "client_id": "me"}))
    with sockets.open("", "me") as socket, sockets.open("", "other") as other, sockets.open("two", "me") as foreign:
        await jobs.admit(Job("", prompt, 0, ReadGraph.of(prompt.graph), {}))
        told = await told_by(socket)
        assert (other.nbytes > 0, foreign.nbytes) == (True, 0)  # all of an owner's are told how many prompts there are
    place = next(place for place, message in enumerate(told) if isinstance(message, bytes))
    assert told[place] == struct.pack(">II", 1, 2) + engine.payload
    assert json.loads(told[place - 1])["data"]["node"] == "9"
    events = [json.loads(message)["type"] for message in told if isinstance(message, str)]
    assert [event for event in events if event != "status"] == [
        *("execution_start", "execution_cached", "executing", "progress", "executing", "executing"),
        *("execution_success", "executing"),
    ]
    assert history.of("")[prompt.prompt_id]
    assert files.new_name("", "x", "output").name == "x_00001_.png"  # none was kept


async def test_a_client_that_does_not_keep_up_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr(sockets_module, "MAX_PREVIEW_BYTES", 500)
    sockets = Sockets()
    with sockets.open("", "me") as socket:
        sockets.send("", "me", "status", {"x": "y" * 600})
        sockets.send_picture("", "me", b"preview", is_preview=True)
        sockets.send_picture("", "me", b"picture", is_preview=False)
        assert [len(await socket.next() or "") > 600, await socket.next()] == [True, b"picture"]
        assert socket.nbytes == len(b"picture")  # it is being sent
        sockets.send("", "me", "status", {"x": "y" * 1100})
        sockets.send("", "me", "status", {"x": "y"})
        assert await socket.next() is None
    sockets.send("", "me", "status", {})
    with sockets.open("", "me") as first, sockets.open("", "me") as second:
        assert await first.next() is None
        sockets.send("", "me", "status", {})
        assert second.nbytes > 0


async def test_clients_that_wait_with_most_are_given_up_when_there_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "MAX_WAITING_IN_ALL", 1000)
    sockets = Sockets()
    with sockets.open("one", "a") as large, sockets.open("one", "b") as small, sockets.open("two", "a") as other:
        for _ in range(2):
            sockets.send_picture("one", "a", bytes(250), is_preview=False)
        sockets.send_picture("one", "b", bytes(100), is_preview=False)
        sockets.send_picture("two", "a", bytes(390), is_preview=False)
        assert len(await large.next() or b"") == 250  # and this is still being sent
        sockets.send_picture("two", "a", bytes(90), is_preview=False)
        assert [each.given_up.is_set() for each in (large, small, other)] == [True, False, False]
        assert not sockets.listens("one", "a")
        sockets.send_picture("two", "a", bytes(420), is_preview=False)
        assert other.nbytes == 900
    with sockets.open("one", "a"):
        sockets.send_picture("one", "a", bytes(999), is_preview=False)
        assert sockets.listens("one", "a")


async def test_pictures_are_only_put_together_for_clients_that_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once for all nodes that send them."""
    made = list[KeptUpload]()

    async def message_of(picture: KeptUpload) -> bytes:
        made.append(picture)
        return b"picture"

    monkeypatch.setattr(jobs_module, "_message_of", message_of)
    sockets, history = Sockets(), History()
    jobs = Jobs(engine_of(), Files(), history, sockets, lambda *_: None)  # type: ignore[arg-type]
    graph = txt2img()
    for node in ("9", "10", "11"):
        graph[node] = {"class_type": "SaveImageWebsocket", "inputs": {"images": ["8", 0]}}
    prompt = Prompt.of(json.dumps({"prompt": graph, "client_id": "me"}))
    with sockets.open("", "me") as socket:
        await jobs.admit(Job("", prompt, 0, ReadGraph.of(prompt.graph), {}))
        assert [each for each in await told_by(socket) if each == b"picture"] == [b"picture"] * 3
    assert len(made) == 1
    await jobs.admit(Job("", prompt, 0, ReadGraph.of(prompt.graph), {}))
    await until(lambda: not jobs.num_left(""))
    assert len(made) == 1


async def test_a_prompt_that_is_taken_out_of_the_queue_is_over_for_its_client() -> None:
    engine, sockets, history = engine_of(), Sockets(), History()
    engine.gate.clear()
    engine.has_begun = False
    jobs = Jobs(engine, Files(), history, sockets, lambda *_: None)  # type: ignore[arg-type]
    prompt = Prompt.of(json.dumps({"prompt": txt2img(), "client_id": "me"}))
    with sockets.open("", "me") as socket:
        await jobs.admit(Job("", prompt, 0, ReadGraph.of(prompt.graph), {}))
        await jobs.delete(jobs.of("")[1])
        told = [json.loads(message)["type"] for message in await told_by(socket)]
    assert told[-2:] == ["execution_interrupted", "executing"]
    assert history.of("") == {}


async def test_bodies_that_wait_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    engine.gate.clear()
    most = 2 * len(json.dumps(txt2img(), separators=(",", ":")) + "{}") - 1
    async with serving(engine, "one", "two") as client:
        id_ = await queue(client, txt2img(), ONE, ignored="x" * 100_000)
        listed = (await client.get("/queue", headers=ONE)).json()["queue_running"]
        monkeypatch.setattr(jobs_module, "MAX_QUEUED_BYTES_OF_OWNER", most)
        refused(await client.post("/prompt", json={"prompt": txt2img()}, headers=ONE), 503)
        other = await queue(client, txt2img(), TWO)
        monkeypatch.setattr(jobs_module, "MAX_QUEUED_BYTES", most)
        refused(await client.post("/prompt", json={"prompt": txt2img()}, headers=TWO), 503)
        engine.gate.set()
        await history_of(client, other, TWO)
        await history_of(client, id_, ONE)
        await queue(client, txt2img(), ONE)
    assert [item[1] for item in listed] == [id_]


async def test_a_large_graph_is_served_quickly_and_told_whole() -> None:
    engine, graph = engine_of(), txt2img()
    graph["6"]["inputs"]["batch_size"] = 2
    for number in range(480):
        graph[f"s{number}"] = {"class_type": "PreviewImage", "inputs": {"images": ["8", 0]}}
    async with serving(engine) as client:
        began = time.perf_counter()
        entry = await history_of(client, await queue(client, graph))
        assert time.perf_counter() - began < 5.0
    assert len(entry["outputs"]) == 481
    assert len(engine.edits) == 1
