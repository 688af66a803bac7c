"""The routes that load and unload adapters while the server runs, named as vLLM's."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.client.async_engine import AsyncEngine
from entrypoints.openai.answer.errors import AdapterLoadingOffError
from entrypoints.openai.body.submission import Submission, read_json
from entrypoints.openai.edit_request import missing
from entrypoints.openai.fields.fields import ADAPTER_FIELDS
from entrypoints.openai.schema import LOAD_ADAPTER_BODY, MODEL_ANSWERS, UNLOAD_ADAPTER_BODY


def adapter_router(engine: AsyncEngine, *, is_allowed: bool) -> APIRouter:
    """is_allowed: whether the operator lets callers load adapters; otherwise all requests are refused."""
    router = APIRouter()

    @router.post("/v1/load_lora_adapter", response_model=None, openapi_extra=LOAD_ADAPTER_BODY, responses=MODEL_ANSWERS)
    async def load_adapter(request: Request) -> Response:
        """Load an adapter from a file on the server's machine; answers when requests may use it, or at once, with
        `wait` false."""
        values = await _read(request)
        asked = _required(values, "lora_name"), _required(values, "lora_path"), values.model
        waits = values.values.get("wait", True)
        info = await engine.load_adapter(*asked) if waits else engine.begin_adapter(*asked)
        return _json({"id": info.name, "object": "model", "parent": info.parent, "ignored": values.ignored})

    @router.post(
        "/v1/unload_lora_adapter", response_model=None, openapi_extra=UNLOAD_ADAPTER_BODY, responses=MODEL_ANSWERS
    )
    async def unload_adapter(request: Request) -> Response:
        """Serve an adapter no more; requests that use it end as they began."""
        values = await _read(request)
        name = _required(values, "lora_name")
        engine.unload_adapter(name)
        return _json({"id": name, "object": "model", "deleted": True, "ignored": values.ignored})

    async def _read(request: Request) -> Submission:
        if not is_allowed:
            raise AdapterLoadingOffError
        return await read_json(request, ADAPTER_FIELDS)

    return router


def _required(submission: Submission, name: str) -> str:
    value = str(submission.values.get(name, ""))
    if not value:
        raise missing(name)
    return value


def _json(content: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
