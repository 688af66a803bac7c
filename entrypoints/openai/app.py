"""The API server's FastAPI application: routes, middleware and exception handlers; the work is done elsewhere."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from core.control import MAX_CONTROLS
from core.errors import AbortedError, InvalidRequestError, ModelNotFoundError, StencilError
from core.routing.rate_limiter import RateLimiter
from core.scheduling.reports.reporter import MAX_RECENT_STEPS
from engine.client.admission.not_ready import not_ready
from engine.client.async_engine import AsyncEngine
from engine.client.resolve.model_state import model_state
from engine.client.templates.template_store import RegisteredTemplate
from engine.observability.metrics import CONTENT_TYPE
from engine.observability.tracing import NoTracer, Tracer
from entrypoints.comfy_api.routes import comfy_router, is_comfy_path
from entrypoints.openai.adapter_routes import adapter_router
from entrypoints.openai.answer.edit_response import EditResponse, disconnected
from entrypoints.openai.answer.engine_stats import engine_stats
from entrypoints.openai.answer.errors import describe_http, log_internal
from entrypoints.openai.answer.reference_page import reference_router
from entrypoints.openai.answer.run_response import RunResponse
from entrypoints.openai.answer.workflow_object import own_ports, workflow_object
from entrypoints.openai.body.submission import Submission, read_edit, read_generation, read_template
from entrypoints.openai.body.upload_slots import UploadSlots
from entrypoints.openai.edit_request import Operation, build_call, build_mask_call, missing
from entrypoints.openai.fields.default_fields import defaults_of
from entrypoints.openai.fields.fields import MASK_FIELDS
from entrypoints.openai.fields.own_fields import OwnFields, OwnFieldsByModel
from entrypoints.openai.guards.host_guard import HostGuard
from entrypoints.openai.guards.key_ring import KeyRing
from entrypoints.openai.guards.middleware import (
    RECORD,
    REQUEST_ID,
    ApiKeyGuard,
    RequestContext,
    UncaughtErrors,
    answer,
    bearer_key,
    owner_of,
)
from entrypoints.openai.guards.origin_guard import OriginGuard
from entrypoints.openai.guards.rate_limit import RateLimit
from entrypoints.openai.guards.request_owners import RequestOwners
from entrypoints.openai.run_request import build_run_call
from entrypoints.openai.schema import (
    DELETED_ANSWERS,
    EDIT_BODY,
    GENERATION_BODY,
    IMAGE_ANSWERS,
    MASK_ANSWERS,
    MASK_BODY,
    TEMPLATE_ANSWERS,
    TEMPLATE_BODY,
)
from entrypoints.openai.workflow_routes import workflow_router
from entrypoints.playground.pages import playground_router
from entrypoints.run_until import run_until

T = TypeVar("T")
EXPOSED_HEADERS = (
    "openai-processing-ms",
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-request-id",
)
"""Response headers that web pages of allowed other origins can read."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP application."""

    api_keys: tuple[str, ...] = field(repr=False)  # at the start; any of them opens /v1/*; empty: no key is required
    max_upload_bytes: int  # per file
    rate_limit: int = 0  # requests per minute and caller; 0: no limit
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use the API, besides the server's own; "*": any
    runtime_lora: bool = False  # whether callers may load adapters from files of this machine
    admin_keys: tuple[str, ...] = field(default=(), repr=False)  # that register workflows; empty: nobody may
    playground: bool = False  # whether to serve its pages
    allowed_hosts: tuple[str, ...] = ()  # in `Host` headers, besides loopback; empty: any
    comfy_api: bool = False  # whether to serve ComfyUI's API, too


def create_app(engine: AsyncEngine, settings: ServerSettings, tracer: Tracer | None = None) -> FastAPI:
    """The application for a started engine, which may still be loading. tracer: records a span for each request in
    TRACED; None: no tracing.
    """
    app = FastAPI(
        title="Stencil",
        summary="Masked image editing behind the OpenAI images API.",
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages load scripts from another host
        redoc_url=None,
    )
    app.include_router(reference_router())
    places, owners = UploadSlots(engine.check_upload, engine.metrics), RequestOwners()
    _add_image_routes(app, engine, settings, places, owners)
    _add_template_routes(app, engine, settings, places)
    _add_model_routes(app, engine)
    app.include_router(adapter_router(engine, is_allowed=settings.runtime_lora))
    app.state.admin_keys = KeyRing(settings.admin_keys)
    app.include_router(workflow_router(engine, app.state.admin_keys))
    _add_operator_routes(app, engine, owners)
    if settings.playground:
        app.include_router(playground_router())
    if settings.comfy_api:
        app.include_router(comfy_router(engine, places, owners, settings.max_upload_bytes))
    app.add_exception_handler(StencilError, _on_stencil_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    if settings.rate_limit:
        app.add_middleware(RateLimit, limiter=RateLimiter(settings.rate_limit))
    if settings.api_keys:
        app.state.keys = KeyRing(settings.api_keys)  # entrypoints.key_reload replaces its keys
        guarded = is_comfy_path if settings.comfy_api else lambda _: False
        app.add_middleware(ApiKeyGuard, keys=app.state.keys, is_guarded=guarded)
    else:
        app.add_middleware(OriginGuard, allowed=settings.allowed_origins)  # not with keys: foreign pages have none
    app.add_middleware(UncaughtErrors)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    if settings.allowed_hosts:
        app.add_middleware(HostGuard, allowed=settings.allowed_hosts)
    app.add_middleware(
        RequestContext, metrics=engine.metrics, tracer=tracer or NoTracer()
    )  # the last one added is the outermost
    return app


def _add_image_routes(
    app: FastAPI, engine: AsyncEngine, settings: ServerSettings, places: UploadSlots, owners: RequestOwners
) -> None:
    @app.post("/v1/images/edits", response_model=None, openapi_extra=EDIT_BODY, responses=IMAGE_ANSWERS)
    async def edit_image(request: Request) -> Response:
        """Repaint the masked part of an image. With `stream` the answer is a stream of server-sent events."""
        engine.check_ready()
        async with engine.until_shutdown(), places.take(_owner(request)):
            seen = (model.references.most for model in engine.models.values() if model.references is not None)
            submission = await read_edit(
                request,
                settings.max_upload_bytes,
                max_references=max(seen, default=0),
                max_controls=_most_controls(engine),
                own=_own_fields(engine),
            )
        owners.note(request.scope[REQUEST_ID], _owner(request))
        return _answer(engine, request, "image_edit", submission)

    @app.post("/v1/images/generations", response_model=None, openapi_extra=GENERATION_BODY, responses=IMAGE_ANSWERS)
    async def generate_image(request: Request) -> Response:
        """Paint a whole image: an edit of an empty canvas, or with models that have classes a picture of one."""
        engine.check_ready()
        async with engine.until_shutdown(), places.take(_owner(request)):
            submission = await read_generation(
                request, settings.max_upload_bytes, _most_controls(engine), _own_fields(engine)
            )
        owners.note(request.scope[REQUEST_ID], _owner(request))
        return _answer(engine, request, "image_generation", submission)

    @app.post("/v1/images/masks", response_model=None, openapi_extra=MASK_BODY, responses=MASK_ANSWERS)
    async def find_mask(request: Request) -> Response:
        """Find the mask of what words, points or a box ask for, as `mask` of an edit takes it."""
        engine.check_ready()
        async with engine.until_shutdown(), places.take(_owner(request)):
            submission = await read_edit(request, settings.max_upload_bytes, fields=MASK_FIELDS)
        owners.note(request.scope[REQUEST_ID], _owner(request))
        return _answer(engine, request, "image_mask", submission)

    @app.post("/v1/images/variations", response_model=None, include_in_schema=False)
    async def vary_image() -> Response:
        raise HTTPException(404)


def _own_fields(engine: AsyncEngine) -> OwnFieldsByModel:
    """What registered workflows take of requests: those that run alone, and those of models."""
    found = {name: OwnFields.of(workflow) for name, workflow in engine.workflows.items()}
    for name, model in engine.models.items():
        workflow = engine.workflow_of(model)
        if workflow is not None and workflow.has_own_ports:
            found[name] = OwnFields.of(workflow)
    first = next(iter(engine.models), "")
    return OwnFieldsByModel({**found, **({"": found[first]} if first in found else {})})


def _most_controls(engine: AsyncEngine) -> int:
    """Control pictures that any served model takes."""
    return MAX_CONTROLS if any(model.controls for model in engine.models.values()) else 0


def _answer(engine: AsyncEngine, request: Request, operation: Operation, submission: Submission) -> Response:
    try:
        if submission.own is not None and submission.own.is_alone:
            if submission.own.workflow not in engine.workflows:  # it was deleted while the body came
                raise ModelNotFoundError(submission.own.workflow)
            return RunResponse(engine, build_run_call(submission, submission.own, _owner(request)), submission)
        if operation == "image_mask":
            choice = engine.choose_model(submission.model, submission.loras)
            call = build_mask_call(submission, choice, _owner(request))
        else:
            choice = engine.choose_model(submission.model, submission.loras, submission.steps_without_lora)
            defaults = defaults_of(engine.workflow_of(choice.model))
            call = build_call(operation, submission, choice, _owner(request), defaults)
    except StencilError:
        submission.close()
        raise
    return EditResponse(engine, call, submission)


def _add_template_routes(app: FastAPI, engine: AsyncEngine, settings: ServerSettings, places: UploadSlots) -> None:
    @app.post("/v1/templates", response_model=None, openapi_extra=TEMPLATE_BODY, responses=TEMPLATE_ANSWERS)
    async def create_template(request: Request) -> Response:
        """Register an image and compute what edits of it need; answers when that is done."""
        engine.check_ready()
        async with engine.until_shutdown(), places.take(_owner(request)):
            submission = await read_template(request, settings.max_upload_bytes)
        try:
            return _json(_template_object(await _register(engine, request, submission)))
        finally:
            submission.close()

    @app.get("/v1/templates/{template_id}", response_model=None, responses=TEMPLATE_ANSWERS)
    async def retrieve_template(request: Request, template_id: str) -> Response:
        """One of the caller's templates."""
        return _json(_template_object(engine.templates.get(template_id, _owner(request))))

    @app.delete("/v1/templates/{template_id}", response_model=None, responses=DELETED_ANSWERS)
    async def delete_template(request: Request, template_id: str) -> Response:
        """Delete a template with its upload, and all that was computed from it unless an equal template needs it."""
        engine.delete_template(template_id, _owner(request))
        return _json({"id": template_id, "object": "template.deleted", "deleted": True})


async def _register(engine: AsyncEngine, request: Request, submission: Submission) -> RegisteredTemplate:
    if "image" not in submission.uploads:
        raise missing("image")
    primed = engine.prime_template(
        request.scope[REQUEST_ID],
        submission.uploads["image"],
        model=submission.model,
        loras=submission.loras,
        owner=_owner(request),
    )
    return await _unless_gone(request, primed)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects, cancels it and raises AbortedError."""
    results: list[T] = []

    async def run() -> None:
        results.append(await work)

    if not await run_until(disconnected(request.receive), run()):
        raise AbortedError("the client went away")
    return results[0]


def _owner(request: Request) -> str:
    return owner_of(request.scope)


def _add_model_routes(app: FastAPI, engine: AsyncEngine) -> None:
    started = int(time.time())

    @app.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        """The served models, their adapters, whose `parent` is their model, and the workflows of users' classes."""
        _require_ready(engine)
        models = [_model_object(engine, name, started) for name in engine.models]
        data = [*models, *(workflow_object(workflow, started) for workflow in engine.workflows.values())]
        return _json({"object": "list", "data": data})

    @app.get("/v1/models/{model_id:path}", response_model=None)
    async def retrieve_model(model_id: str) -> Response:
        """One model, adapter or workflow; its id may contain slashes."""
        _require_ready(engine)
        if model_id in engine.workflows:
            return _json(workflow_object(engine.workflows[model_id], started))
        if model_id not in engine.models:
            raise ModelNotFoundError(model_id)
        return _json(_model_object(engine, model_id, started))


def _add_operator_routes(app: FastAPI, engine: AsyncEngine, owners: RequestOwners) -> None:
    @app.get("/health", response_model=None)
    @app.head("/health", include_in_schema=False)
    async def health() -> Response:
        """200 while the server process is alive, with each engine's state ("serving", "loading", "restarting",
        "draining" or "gone"), its number of consecutive restarts and its number of live workers.
        """
        facts = zip(engine.engines, engine.replicas, engine.num_ranks, strict=True)
        engines = [
            {"index": index, "alive": state == "serving", "state": state, "restarts": restarts, "workers": workers}
            for index, (state, restarts), workers in facts
        ]
        return _json({"status": _status(engine), "engines": engines})

    @app.get("/ready", response_model=None)
    @app.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        """200 when edits are served; 503 while the model loads, also after its engine's death, and during shutdown."""
        _require_ready(engine)
        return _json({"status": "ready"})

    @app.get("/metrics", response_model=None)
    @app.head("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        """Prometheus metrics. Where /v1/models needs a key, those without one do not read adapters' names."""
        keys: KeyRing | None = getattr(request.app.state, "keys", None)
        may_know = keys is None or keys.owner_of(bearer_key(request.scope)) is not None
        exposition = engine.metrics.exposition(names_adapters=may_know)
        return Response(exposition, headers={"content-type": CONTENT_TYPE})

    @app.get("/v1/engine/stats", response_model=None)
    async def stats(request: Request, steps: Annotated[int, Query(ge=0, le=MAX_RECENT_STEPS)] = 0) -> Response:
        """The queue, the load, the activation cache and the cost model; with `steps`, each engine's last N steps."""
        owner = _owner(request)
        return _json(engine_stats(engine, steps, lambda image_id: owners.shown(image_id, owner)))


def _require_ready(engine: AsyncEngine) -> None:
    """For requests of no work, which do not count as refused. Raises OverloadedError unless edits are served."""
    if not engine.is_ready:
        raise not_ready(is_closing=engine.is_closing)


def _status(engine: AsyncEngine) -> str:
    if not engine.models:
        return "loading"
    is_whole = all(number == engine.config.engine.workers_per_engine for number in engine.num_ranks)
    return "ok" if engine.num_ranks and is_whole else "degraded"  # a cluster may have lost all machines


def _model_object(engine: AsyncEngine, name: str, created: int) -> dict[str, Any]:
    """name: of a model, an adapter, or a workflow for a model."""
    model = engine.models[name]
    alive = (stats for stats, is_alive in zip(engine.stats, engine.alive, strict=True) if is_alive)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "stencil",
        "parent": model.parent or None,
        "modality": model.modality,
        "dtype": model.dtype,
        "num_classes": model.num_classes,
        "class_names": model.class_names,
        "selects_by": list(model.selects_by),
        "control_types": list(model.controls),
        "state": model_state(model, alive),
        **own_ports(engine.workflow_of(model)),
    }


def _template_object(template: RegisteredTemplate) -> dict[str, Any]:
    return {
        "id": template.id,
        "object": "template",
        "bytes": template.upload.size,
        "image_tokens": template.image_tokens,
        "page_bytes": template.page_bytes,
        "primed": template.primed,
        "created": template.created,
    }


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _on_stencil_error(request: Request, error: Exception) -> Response:
    log_internal(error)
    return answer(request.scope, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reply = describe_http(error, request.method, request.url.path)
    request.scope[RECORD].note_error(reply.code)
    return reply.response()


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return answer(request.scope, InvalidRequestError(f"Invalid '{name}': {first['msg']}.", param=name))
