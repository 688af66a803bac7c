"""The routes that register and delete workflows of users while the server runs."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request
from starlette.datastructures import QueryParams
from starlette.responses import Response

from core.errors import InvalidRequestError, WorkflowError
from core.validation import shorten
from engine.client.async_engine import AsyncEngine
from engine.client.resolve.bound_model import BoundModel
from entrypoints.openai.answer.errors import InvalidApiKeyError, WorkflowsOffError
from entrypoints.openai.body.chunks import read_text
from entrypoints.openai.fields.default_fields import check_defaults
from entrypoints.openai.fields.own_fields import check_inputs
from entrypoints.openai.guards.key_ring import KeyRing
from entrypoints.openai.guards.middleware import ADMIN_PATH, bearer_key
from entrypoints.openai.schema import DELETED_WORKFLOW_ANSWERS, WORKFLOW_ANSWERS, WORKFLOW_BODY
from entrypoints.workflows.registered import Registered
from entrypoints.workflows.workflow_files import read_sent

MAX_TEXT_BYTES = 256 * 1024
"""Largest file of workflows: engines and workers get its text in a message."""


def workflow_router(engine: AsyncEngine, admin_keys: KeyRing) -> APIRouter:
    """admin_keys: any of them lets its owner register workflows; none: all requests are refused."""
    router = APIRouter()
    importing = asyncio.Lock()  # one at a time: most imports load PyTorch

    @router.post(ADMIN_PATH, response_model=None, openapi_extra=WORKFLOW_BODY, responses=WORKFLOW_ANSWERS)
    async def register_workflows(request: Request) -> Response:
        """Register the workflows of a file, whose text is the body; answers when requests may name them. Those that are
        served under the same names are replaced: requests that run end on the former ones. Those that make a model's
        pictures make those of `model`, else of the first one; other models play the roles that are named like
        `refiner`.
        """
        _check_key(request)
        engine.check_ready()
        bound = _bound(request.query_params)
        async with engine.until_shutdown():
            text = await read_text(request, MAX_TEXT_BYTES)
            async with importing:
                registered = await _imported(text)
        await engine.register_workflows(registered.workflows, registered.classes, bound)
        names = [workflow.title for workflow in registered.workflows]
        return _json({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    @router.delete(f"{ADMIN_PATH}/{{name}}", response_model=None, responses=DELETED_WORKFLOW_ANSWERS)
    async def delete_workflow(request: Request, name: str) -> Response:
        """Serve a workflow no more; requests that run it end as they began."""
        _check_key(request)
        engine.remove_workflow(name)
        return _json({"id": name, "object": "model", "deleted": True})

    def _check_key(request: Request) -> None:
        if not admin_keys:
            raise WorkflowsOffError
        if admin_keys.owner_of(bearer_key(request.scope)) is None:
            raise InvalidApiKeyError("Missing or incorrect admin key. Send it as 'Authorization: Bearer <key>'.")

    return router


async def _imported(text: str) -> Registered:
    """The workflows of a file. Raises InvalidRequestError that names line, node and input."""
    try:
        registered = await read_sent(text)
        check_inputs(registered.workflows)
        for workflow in registered.workflows:
            check_defaults(workflow)
        return registered
    except WorkflowError as error:
        param = error.input or error.node or None
        raise InvalidRequestError(f"Invalid workflow: {error}.", param=param, code="invalid_workflow") from error


def _bound(params: QueryParams) -> BoundModel:
    """What the address says: `model`, and the models that play roles. Raises InvalidRequestError."""
    given = dict[str, str]()
    for name, value in params.multi_items():
        if name in given or not value:
            raise InvalidRequestError(f"Invalid '{shorten(name)}': give it once, with a name.", param=shorten(name))
        given[name] = value
    return BoundModel(given.pop("model", ""), given)


def _json(content: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
