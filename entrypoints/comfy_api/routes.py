"""The routes of ComfyUI's API, each also below /api."""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import count
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from core.errors import InvalidRequestError, StencilError
from engine.client.async_engine import AsyncEngine
from entrypoints.comfy_api.comfy_route import ComfyRoute
from entrypoints.comfy_api.files import Files
from entrypoints.comfy_api.graph_edits import ReadGraph, check_loaded
from entrypoints.comfy_api.history import History
from entrypoints.comfy_api.job import Job
from entrypoints.comfy_api.jobs import Jobs
from entrypoints.comfy_api.object_info import object_info, served_files
from entrypoints.comfy_api.prompt import MAX_BODY_BYTES, Deletion, Interruption, Prompt, decode
from entrypoints.comfy_api.refusals import refusal
from entrypoints.comfy_api.socket_route import socket_router
from entrypoints.comfy_api.sockets import Sockets
from entrypoints.comfy_api.upload_routes import upload_router
from entrypoints.openai.body.chunks import read_text
from entrypoints.openai.body.upload_slots import UploadSlots
from entrypoints.openai.guards.middleware import owner_of
from entrypoints.openai.guards.request_owners import RequestOwners

MAX_SMALL_BYTES = 256 * 1024
"""Of a body without a graph."""

FIRST = frozenset(
    (
        *("prompt", "queue", "history", "interrupt", "view", "upload", "object_info", "system_stats", "ws", "models"),
        *("embeddings", "features"),
    )
)
"""The first parts of these routes' paths, behind /api or not."""


def is_comfy_path(path: str) -> bool:
    """Whether a path is one of these."""
    return path.removeprefix("/api").lstrip("/").partition("/")[0] in FIRST


def comfy_router(engine: AsyncEngine, places: UploadSlots, owners: RequestOwners, max_upload_bytes: int) -> APIRouter:
    """places: that bodies take while they are read. owners: are told of each edit. max_upload_bytes: per file."""
    files, history, sockets = Files(), History(), Sockets()
    jobs = Jobs(engine, files, history, sockets, owners.note)
    whole = APIRouter(route_class=ComfyRoute, include_in_schema=False)
    for part in (
        _prompt_router(engine, jobs, files, places),
        _history_router(history),
        _queue_router(jobs),
        _facts_router(engine, files),
        upload_router(files, places, max_upload_bytes),
        socket_router(sockets, jobs, max_upload_bytes),
    ):
        for prefix in ("", "/api"):
            whole.include_router(part, prefix=prefix)
    return whole


def _prompt_router(engine: AsyncEngine, jobs: Jobs, files: Files, places: UploadSlots) -> APIRouter:
    router, numbers = APIRouter(route_class=ComfyRoute), count()

    @router.get("/prompt")
    async def queue_size(request: Request) -> Response:
        """How many of the caller's prompts are not over."""
        return _json({"exec_info": {"queue_remaining": jobs.num_left(owner_of(request.scope))}})

    @router.post("/prompt")
    async def queue_prompt(request: Request) -> Response:
        """Execute a graph; answers when it is admitted."""
        owner = owner_of(request.scope)
        engine.check_ready()
        async with engine.until_shutdown(), places.take(owner):
            body = await read_text(request, MAX_BODY_BYTES)
        prompt = Prompt.of(body)
        try:
            read = await asyncio.to_thread(ReadGraph.of, prompt.graph)
            number = next(numbers) if prompt.number is None else prompt.number
            job = Job(owner, prompt, -number if prompt.front else number, read, check_loaded(read, files, owner))
            if any(prompt.prompt_id == other.id for group in jobs.of(owner) for other in group):
                message = f"Invalid 'prompt_id': {prompt.prompt_id} is in the queue already."
                raise InvalidRequestError(message, param="prompt_id")
            await jobs.admit(job)
        except StencilError as error:
            return refusal(request, error, prompt.class_type)
        return _json({"prompt_id": job.id, "number": job.number, "node_errors": {}})

    return router


def _history_router(history: History) -> APIRouter:
    router = APIRouter(route_class=ComfyRoute)

    @router.get("/history")
    async def all_history(request: Request, max_items: int | None = None, offset: int = -1) -> Response:
        """The caller's prompts that are over, by id."""
        return _json(history.of(owner_of(request.scope), max_items, offset))

    @router.get("/history/{prompt_id}")
    async def history_of(request: Request, prompt_id: str) -> Response:
        """One of them; {} if it is not over, or not known."""
        return _json(history.find(owner_of(request.scope), prompt_id))

    @router.post("/history")
    async def forget_history(request: Request) -> Response:
        """Forget all of them, or some."""
        owner, told = owner_of(request.scope), await _deletion(request)
        if told.clear:
            history.clear(owner)
        history.remove(owner, told.delete)
        return Response()

    return router


def _queue_router(jobs: Jobs) -> APIRouter:
    router = APIRouter(route_class=ComfyRoute)

    @router.get("/queue")
    async def queue(request: Request) -> Response:
        """The caller's prompts that are not over."""
        running, waiting = jobs.of(owner_of(request.scope))
        return _json({"queue_running": [job.item for job in running], "queue_pending": [job.item for job in waiting]})

    @router.post("/queue")
    async def delete_from_queue(request: Request) -> Response:
        """Take prompts that wait out of the queue: all of the caller's, or some."""
        told = await _deletion(request)
        _, waiting = jobs.of(owner_of(request.scope))
        await jobs.delete([job for job in waiting if told.clear or job.id in told.delete])
        return Response()

    @router.post("/interrupt")
    async def interrupt(request: Request) -> Response:
        """End what runs of the caller's: one prompt, or all."""
        body = await read_text(request, MAX_SMALL_BYTES)
        told = decode(body, Interruption, "an object of JSON is wanted") if body.strip() else Interruption()
        running, _ = jobs.of(owner_of(request.scope))
        await jobs.interrupt([job for job in running if told.prompt_id in (None, "", job.id)])
        return Response()

    return router


def _facts_router(engine: AsyncEngine, files: Files) -> APIRouter:
    router = APIRouter(route_class=ComfyRoute)

    def info_of(request: Request) -> dict[str, Any]:
        return object_info(engine.models, files.inputs(owner_of(request.scope)))

    @router.get("/object_info")
    async def all_object_info(request: Request) -> Response:
        """The classes of nodes that graphs may have."""
        return _json(info_of(request))

    @router.get("/object_info/{name}")
    async def object_info_of(request: Request, name: str) -> Response:
        """One of them; {} if there is none of this name."""
        infos = info_of(request)
        return _json({name: infos[name]} if name in infos else {})

    @router.get("/system_stats")
    async def system_stats() -> Response:
        """The machine, as far as clients read it."""
        return _json(_system_stats(engine))

    @router.get("/models")
    async def model_folders() -> Response:
        """ComfyUI's folders of models."""
        return _json(list(served_files(engine.models)))

    @router.get("/models/{folder}")
    async def models_of(folder: str) -> Response:
        """What is served of one of them."""
        served = served_files(engine.models)
        return _json(served[folder]) if folder in served else Response(status_code=404)

    @router.get("/embeddings")
    async def embeddings() -> Response:
        """None are served."""
        return _json([])

    @router.get("/features")
    async def features() -> Response:
        """What clients may rely on beside the rest."""
        return _json({"supports_preview_metadata": False})

    return router


def _system_stats(engine: AsyncEngine) -> dict[str, Any]:
    page = os.sysconf("SC_PAGE_SIZE")
    devices = dict.fromkeys(info.device for info in engine.models.values())
    unknown = dict.fromkeys(("vram_total", "vram_free", "torch_vram_total", "torch_vram_free"), 0)
    return {
        "system": {
            "os": os.name,
            "ram_total": page * os.sysconf("SC_PHYS_PAGES"),
            "ram_free": page * os.sysconf("SC_AVPHYS_PAGES"),
            "comfyui_version": "stencil",
            "python_version": sys.version,
            "pytorch_version": "",
            "embedded_python": False,
            "argv": [],
        },
        "devices": [
            {"name": device, "type": device, "index": index, **unknown} for index, device in enumerate(devices)
        ],
    }


async def _deletion(request: Request) -> Deletion:
    body = await read_text(request, MAX_SMALL_BYTES)
    return decode(body, Deletion, "an object of JSON with 'clear' or 'delete', a list of ids, is wanted")


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
