"""AsyncEngine: the engine as the API server uses it. Admits edits, runs them in sessions and streams their results.

Owns the shared arena, the image processors and the router with its engines (`Services`); one EditSession per edit owns
that edit's memory. The same object serves HTTP (entrypoints/openai) and offline use (entrypoints/image_engine.py).
Never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import replace

import msgspec

from core.config import CacheConfig, StencilConfig
from core.costs.load_report import EngineStats, LoadReport, StepSample
from core.errors import (
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    StencilError,
    first_error,
)
from core.failure import LEAST_RETRY_SECONDS
from core.graph.workflow import Workflow
from core.ipc.limits import check_limits
from core.lora import Lora
from core.model_choice import ModelChoice
from core.model_info import ModelInfo
from core.run_class import RunClass
from core.validation import shorten
from engine.client.admission.not_ready import not_ready
from engine.client.edit_types import EditInput, ImageOutput
from engine.client.processes.page_folder import check_page_folder
from engine.client.resolve.bound_model import BoundModel
from engine.client.resolve.class_label import edits_nothing
from engine.client.resolve.served_models import ServedModels
from engine.client.run_files import RunEncoding, RunResults
from engine.client.run_input import RunInput
from engine.client.run_values import RunValue
from engine.client.services import Services
from engine.client.sessions.edit_session import EditSession
from engine.client.sessions.request_workflows import RequestWorkflows
from engine.client.sessions.run_session import RunSession
from engine.client.sessions.running_sessions import RunningSessions
from engine.client.sessions.runtime_adapters import RuntimeAdapters
from engine.client.sessions.runtime_workflows import FIRST_MODEL, RuntimeWorkflows
from engine.client.sessions.template_session import TemplateSession
from engine.client.sessions.upload_place import UploadPlace
from engine.client.templates.result_templates import ResultTemplates
from engine.client.templates.template_store import RegisteredTemplate, TemplateStore
from engine.client.upload import KeptUpload, Upload
from engine.observability.metrics import Metrics
from engine.router.engine_backend import MachineLink
from engine.router.engine_replica import ReplicaState

logger = logging.getLogger("stencil.engine")

SETTLE_SECONDS = 4.0
"""How long shutdown waits for callers to take their last outputs."""


class AsyncEngine:
    """start, ready, edit and prime_template (many at once), shutdown. All methods belong to one event loop."""

    services: Services  # set by `start`, and those below with it
    _results: ResultTemplates
    _adapters: RuntimeAdapters
    _workflows: RuntimeWorkflows
    _brought: RequestWorkflows

    def __init__(self, config: StencilConfig, metrics: Metrics | None = None) -> None:
        """Raises WorkflowError for a registered workflow that cannot run."""
        self.config = config
        self.metrics = metrics or Metrics()
        self.templates = TemplateStore(config.template_bytes)
        self._served = ServedModels(config.engine)
        self._sessions = RunningSessions()
        self._actor: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    # ---------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Spawn every process and return; the model loads in the background, see `ready`.

        Raises ConfigError or EngineError, and then leaves nothing behind.
        """
        check_limits(self.config.shared_bytes, self.config.engine.cache.host_bytes)
        services = Services.create(self.config, self.metrics, self._served, self._sessions, self.templates)
        self.services, self._results, changing = services, ResultTemplates(services), asyncio.Lock()
        self._adapters, self._workflows = RuntimeAdapters(services, changing), RuntimeWorkflows(services, changing)
        self._brought = RequestWorkflows(services)
        self.metrics.watch_queue(lambda: self.num_requests_running, lambda: self.num_requests_waiting)
        self.metrics.watch_image_processors(services.images, lambda: services.admission.drain_seconds)
        self.metrics.watch_states(services.states)
        try:  # what follows awaits, and HTTP is served meanwhile: it asks for the services
            await asyncio.to_thread(check_page_folder, self.config.engine.cache)
            if services.keeper is not None:
                services.keeper.start()
            services.engines.start()
            await services.images.start()
        except BaseException:
            await self._dismantle()
            raise
        self._actor = asyncio.create_task(self._run(), name="async-engine")

    async def ready(self) -> None:
        """Wait until edits are served. Raises the error that kept the engine from starting."""
        engines = self.services.engines
        models = await engines.ready()
        adapters = [model.name for model in models.values() if model.parent]
        self.metrics.expect(models.keys() - set(adapters), self.config.engine.data_parallel_size)  # 0: `engines` does
        self.metrics.name_adapters(adapters)
        self._served.set(models, msgspec.structs.replace(self.config.engine, cache=engines.cache))

    async def shutdown(self, drain_seconds: float) -> None:
        """Refuse new edits, let running ones finish within `drain_seconds`, then end all processes, free all memory."""
        await self._sessions.drain(drain_seconds)  # sessions that still run are aborted when the engine stops
        self._stopping.set()
        if self._actor is not None:
            await self._actor

    async def failed(self) -> StencilError:
        """Wait until the last engine is given up and return the reason. Does not return while any engine serves or is
        being restarted.
        """
        return await self.services.engines.failed()

    async def _run(self) -> None:
        """The actor: all background tasks of the engine are in this task group; its end is the engine's end."""
        router, images, keeper = self.services.router, self.services.images, self.services.keeper
        try:
            async with asyncio.TaskGroup() as tasks:
                self._sessions.start(tasks)
                tasks.create_task(self.services.engines.run())
                tasks.create_task(images.closed())
                if keeper is not None:
                    tasks.create_task(keeper.run())
                await self._stopping.wait()
                # When the router has stopped, every request has its terminal output; callers get time to take it.
                await asyncio.gather(router.stop(), self._sessions.wait_idle(SETTLE_SECONDS))
                await images.stop()
                if keeper is not None:
                    await keeper.close()
        except Exception as error:  # the actor's edge: swallowed, a bug here would leave every caller waiting
            logger.exception("the engine's client failed")
            self.services.engines.fail(EngineError(f"internal error: {first_error(error)}"))
        finally:
            await self._dismantle()

    async def _dismantle(self) -> None:
        """End all processes and free all memory, in whatever state the engine is."""
        await self.services.engines.close()
        with suppress(Exception):  # its failure was raised by `start` or logged by `_run`
            await self.services.images.stop()
        if self.services.keeper is not None:
            await self.services.keeper.close()
        await asyncio.to_thread(self.services.launcher.close)  # waits until the process has ended
        self.services.arena.close()

    # ---------------------------------------------------------------------------------- edits

    @asynccontextmanager
    async def edit(
        self, request_id: str, edit: EditInput, choice: ModelChoice
    ) -> AsyncIterator[AsyncIterator[ImageOutput]]:
        """Run one edit. Entering admits it, checks and prepares its images and submits it; iterating yields outputs as
        they are finished; leaving early aborts it. choice: from `choose_model`.

        Raises on entering: InvalidRequestError and its subclasses, OverloadedError (full, too busy, loading or shutting
        down), DeadlineExceededError, ModelUnavailableError. While iterating: DeadlineExceededError, OverloadedError,
        EngineError.
        """
        services = self.services
        self._check_served(choice)
        self._check_workflow(choice)
        session = EditSession(services, self._results, request_id, edit, choice)
        services.admission.check_queue(session)
        with services.sessions.track(session):
            await session.begin()
            yield session.outputs()

    @asynccontextmanager
    async def bring_workflow(self, choice: ModelChoice, workflow: Workflow) -> AsyncIterator[ModelChoice]:
        """The choice with a workflow for pictures of the caller's own, which its edits run instead; they must begin
        while the context is open. Raises WorkflowError for a workflow that cannot run, and OverloadedError.
        """
        self._check_up(choice.model.name)
        async with self._brought.use(workflow) as name:
            yield replace(choice, model=msgspec.structs.replace(choice.model, workflow=name))

    async def run(self, request_id: str, asked: RunInput) -> dict[str, RunValue]:
        """Run a registered workflow of users' classes; its results, by name. Cancelling it aborts it.

        Raises InvalidRequestError and its subclasses, naming the input; OverloadedError, DeadlineExceededError,
        EngineError and its subclasses, of which RunError names the node that has failed.
        """
        with self._running(request_id, asked) as session:
            return await session.run()

    @asynccontextmanager
    async def run_files(self, request_id: str, asked: RunInput, encoding: RunEncoding) -> AsyncIterator[RunResults]:
        """A run, made on entering as by `run`, that returns pictures as files. Its results are in shared memory until
        the context is left.
        """
        with self._running(request_id, asked) as session:
            yield await session.run_files(encoding)

    @contextmanager
    def _running(self, request_id: str, asked: RunInput) -> Iterator[RunSession]:
        self._check_up()
        workflow = self.workflows.get(asked.workflow)
        if workflow is None:
            known = ", ".join(self.workflows) or "none"
            message = (
                f"Invalid 'workflow': there is no workflow '{shorten(asked.workflow)}' of classes; there are {known}."
            )
            raise InvalidRequestError(message, param="workflow")
        session = RunSession(self.services, request_id, asked, workflow)
        self.services.admission.check_queue(session)
        with self.services.sessions.track(session):
            yield session

    def until_shutdown(self) -> AbstractAsyncContextManager[None]:
        """A block that is cancelled, and raises OverloadedError, once a shutdown's time to drain has passed."""
        return self._sessions.until_shutdown()

    def check_upload(self, owner: str, uploads: Collection[UploadPlace]) -> None:
        """Check whether one more body, of this owner, may be read while `uploads` are; some of other owners may be
        refused for it. Raises OverloadedError.
        """
        self.services.admission.check_upload(owner, uploads)

    def choose_model(
        self, name: str = "", loras: Sequence[Lora] = (), steps_without_lora: int | None = 0
    ) -> ModelChoice:
        """The model and adapters that a request names, see `ServedModels.choose`. Raises as that, and OverloadedError
        while no model is served.
        """
        self._check_open()
        return self._served.choose(name, loras, steps_without_lora)

    def check_ready(self) -> None:
        """Raises OverloadedError, and counts the refusal, unless a request can be served at once: while models load, no
        engine is up, or the server shuts down. Asked before a body is read, to save a useless upload.
        """
        self._refuse_unless(self.is_ready)

    def _check_open(self) -> None:
        """As `check_ready`, but a request may wait for an engine that is restarted."""
        self._refuse_unless(bool(self.models) and not self.is_closing)

    def _refuse_unless(self, can_serve: bool) -> None:
        if not can_serve:
            self.metrics.observe_rejected("shutting_down" if self.is_closing else "not_ready")
            raise not_ready(is_closing=self.is_closing)

    def _check_up(self, model: str = "") -> None:
        """Check that a model may be computed; "": none is needed. Raises ModelUnavailableError if no engine with it is
        left, OverloadedError, also while engines are up and none of them has it.
        """
        self._check_open()
        engines = self.services.engines
        if engines.error is None and (error := engines.error_of(model)) is not None:
            raise error
        self._refuse_unless(engines.is_served(model) or not engines.is_ready)

    def _check_served(self, choice: ModelChoice) -> None:
        """Check a choice that was made a while ago, right before its session begins, which keeps its adapters. Raises
        InvalidRequestError if one of them was unloaded, and as `_check_up`.
        """
        self._check_up(choice.model.name)
        if not self._served.has(choice):
            raise InvalidRequestError("Invalid 'lora': an adapter of this request was unloaded.", param="lora")

    def _check_workflow(self, choice: ModelChoice) -> None:
        """Check likewise that the workflow is served which the choice was made for, unless the request has brought it.
        Raises ModelNotFoundError if it was deleted, OverloadedError if it was replaced.
        """
        name, served = choice.model.workflow, self._served
        title = name.partition("@")[0]
        if name == title or name in served.added.values() or self._brought.has(name):
            return
        if title not in served.added:
            raise ModelNotFoundError(title)
        message = f"The workflow '{title}' was replaced meanwhile; try again."
        raise OverloadedError(message, retry_after=LEAST_RETRY_SECONDS)

    # ---------------------------------------------------------------------------------- templates

    async def prime_template(
        self, request_id: str, image: Upload, *, model: str = "", loras: Sequence[Lora] = (), owner: str = ""
    ) -> RegisteredTemplate:
        """Register an image as a template of `owner` and prime its pages. Edits that name its id with the same model
        and adapters then find them cached.

        Raises InvalidRequestError and its subclasses, OverloadedError, EngineError; then nothing is registered.
        """
        choice = self.choose_model(model, loras, None)
        if not choice.model.can_edit:
            raise edits_nothing(choice.model, "model")
        self.templates.check_size(image.size)
        upload = await KeptUpload.of(image)
        services = self.services
        self._check_served(choice)
        session = TemplateSession(services, request_id, upload, choice, owner=owner)
        services.admission.check_queue(session)
        with services.sessions.track(session):
            prepared = await session.prepare()
            page_bytes = (await session.prime()).nbytes if session.can_prime else 0
            template = RegisteredTemplate(
                upload=upload,
                owner=owner,
                model=choice.model.name,
                width=prepared.upload_width,
                height=prepared.upload_height,
                image_tokens=session.num_tokens,
                created=int(time.time()),
                content_id=prepared.content_id,
                primed=session.can_prime,
                page_bytes=page_bytes,
                cache_salt=self._served.cache.salt(owner),
            )
            services.templates.add(template)  # before the session closes: that drops pages that no template has
        return template

    def delete_template(self, template_id: str, owner: str) -> None:
        """Delete a template and its pages. Raises TemplateNotFoundError."""
        self.services.templates.remove(template_id, owner)

    # ---------------------------------------------------------------------------------- adapters

    async def load_adapter(self, name: str, path: str, model: str = "") -> ModelInfo:
        """See `RuntimeAdapters.load`. Raises OverloadedError, too: while no worker is up, and when the server shuts
        down.
        """
        self.check_ready()
        return await self._adapters.load(name, path, model)

    def begin_adapter(self, name: str, path: str, model: str = "") -> ModelInfo:
        """See `RuntimeAdapters.begin`. Raises OverloadedError, too."""
        self.check_ready()
        return self._adapters.begin(name, path, model)

    def unload_adapter(self, name: str) -> None:
        """See `RuntimeAdapters.unload`."""
        self._check_open()
        self._adapters.unload(name)

    # ---------------------------------------------------------------------------------- workflows

    async def register_workflows(
        self, workflows: Sequence[Workflow], classes: Sequence[RunClass], bound: BoundModel = FIRST_MODEL
    ) -> None:
        """See `RuntimeWorkflows.register`. Raises OverloadedError, too: while no worker is up, and when the server
        shuts down.
        """
        self.check_ready()
        await self._workflows.register(workflows, classes, bound)

    def remove_workflow(self, name: str) -> None:
        """See `RuntimeWorkflows.remove`."""
        self._check_open()
        self._workflows.remove(name)

    # ---------------------------------------------------------------------------------- state

    @property
    def models(self) -> dict[str, ModelInfo]:
        """Served models by name, see ServedModels; empty until ready."""
        return self._served.by_name

    @property
    def workflows(self) -> dict[str, Workflow]:
        """Registered workflows of users' classes alone, by title."""
        return self._served.run_workflows

    def workflow_of(self, model: ModelInfo) -> Workflow | None:
        """The registered workflow that a model's pictures are made by; None: it has none."""
        return self._served.workflows[model.workflow] if model.workflow else None

    @property
    def cache(self) -> CacheConfig:
        """Limits of cached pages; once ready, with the device memory that the engines found."""
        return self._served.cache

    @property
    def is_closing(self) -> bool:
        """Whether the engine is shutting down; new edits are refused."""
        return self._sessions.is_closing

    @property
    def is_ready(self) -> bool:
        return bool(self.models) and self.services.engines.is_ready and not self.is_closing

    @property
    def engines(self) -> tuple[int, ...]:
        """The numbers of the engines; what follows has an entry for each of them."""
        return tuple(self.services.engines.ranks)

    @property
    def links(self) -> tuple[MachineLink | None, ...]:
        """The way to each engine; None: it is of this machine, or of none yet."""
        return tuple(self.services.engines.links)

    @property
    def alive(self) -> tuple[bool, ...]:
        """For each engine, whether it serves."""
        return tuple(self.services.engines.alive)

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """The number of live workers of each engine, also of one that only does what it has."""
        unreported = self.config.engine.workers_per_engine
        return tuple(
            unreported * is_alive if load is None else load.num_ranks
            for load, is_alive in zip(self.loads, self.alive, strict=True)
        )

    @property
    def replicas(self) -> tuple[tuple[ReplicaState, int], ...]:
        """State and number of restarts in a row of each engine."""
        return tuple(self.services.engines.states)

    @property
    def loads(self) -> tuple[LoadReport | None, ...]:
        """The last report of each engine; None before the first."""
        return tuple(self.services.engines.loads)

    @property
    def stats(self) -> tuple[EngineStats | None, ...]:
        """The last statistics of each engine; None before the first report."""
        return tuple(self.services.engines.stats)

    @property
    def recent_steps(self) -> tuple[tuple[StepSample, ...], ...]:
        """The last denoising steps of each engine, at most MAX_RECENT_STEPS, the oldest first."""
        return tuple(map(tuple, self.services.engines.recent_steps))

    @property
    def num_admitted(self) -> int:
        """Images that have a place in the queue."""
        return self._sessions.num_admitted

    @property
    def begun_edits(self) -> frozenset[str]:
        """Ids of the edits of which a worker has begun an image, until their memory is freed."""
        edits = (session for session in self._sessions if isinstance(session, EditSession))
        return frozenset(edit.request_id for edit in edits if edit.has_begun)

    @property
    def num_requests_running(self) -> int:
        return self.services.router.num_running

    @property
    def num_requests_waiting(self) -> int:
        """Images that no worker has begun: queued in an engine, waiting for one, or in preparation."""
        return self._sessions.num_in_preparation + self.services.router.num_waiting
