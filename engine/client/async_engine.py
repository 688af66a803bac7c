"""AsyncEngine: the client side of the engine. Admits edits, has their images prepared, submits, streams, cleans up.

Owns the shared arena, the image processors and the router with its engines; one EditSession per edit owns that edit's
memory. The same object serves HTTP (entrypoints/openai) and offline use (entrypoints/image_engine.py). Never loads
torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import numpy.typing as npt

from core.config import StencilConfig
from core.costs.load_report import EngineStats, LoadReport, StepSample
from core.errors import EngineDeadError, EngineError, InvalidRequestError, OverloadedError, StencilError
from core.handles import ArrayRef
from core.ipc.limits import check_limits
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages.engine import DropTemplate
from core.model_choice import choose_model, kin
from core.model_info import ModelInfo
from engine.client.admission_controller import AdmissionController
from engine.client.edit_session import EditSession
from engine.client.edit_types import EditInput, ImageOutput
from engine.client.page_folder import check_page_folder
from engine.client.result_templates import ResultTemplates
from engine.client.template_session import TemplateSession
from engine.client.template_store import Template, TemplateStore
from engine.client.upload import KeptUpload, Upload
from engine.images.image_pool import ImagePool
from engine.observability.metrics import Metrics
from engine.router.engine_replica import ReplicaState
from engine.router.router import Router

logger = logging.getLogger("stencil.engine")

SETTLE_SECONDS = 4.0
"""How long callers may hold on to their last outputs once the engine has stopped."""

RELEASE_BYTES = 2 * 1024 * 1024
"""Shared memory given back between two turns of the event loop, about 0.7 ms of work; whole pages."""

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
"""Bounds of what a refused client is told to wait; clients of the OpenAI SDK ignore more than 120 s."""


class AsyncEngine:
    """start, ready, edit and prime_template (many at once), shutdown. All methods belong to one event loop."""

    def __init__(self, config: StencilConfig, metrics: Metrics | None = None) -> None:
        self.config = config
        self.metrics = metrics or Metrics()
        self.models: dict[str, ModelInfo] = {}  # name -> info; empty until ready
        self.cache = config.engine.cache  # with what the engines found they have, once ready
        self.templates = TemplateStore(config.template_bytes)
        self.result_templates = ResultTemplates(self)
        self.admission = AdmissionController(self)
        self._highest_class = 0  # of all requests so far, that of the default at least
        self._sessions: set[EditSession | TemplateSession] = set()  # begun and not yet cleaned up
        self.is_closing = False  # refuses new edits
        self._actor: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # ---------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Spawn every process and return; the model loads in the background, see `ready`.

        Raises ConfigError or EngineError, and then leaves nothing behind.
        """
        check_limits(self.config.arena_bytes, self.config.engine.cache.host_bytes)
        await asyncio.to_thread(check_page_folder, self.config.engine.cache)
        self._arena = Arena.create(0, self.config.arena_bytes)
        self.allocator = ArenaAllocator(self._arena)
        self.images = ImagePool(self.config.image, self._arena)
        self.router = Router(self.config, self._arena, self.metrics)
        self.metrics.watch_queue(lambda: self.num_requests_running, lambda: self.num_requests_waiting)
        self.metrics.watch_image_processors(self.images, lambda: self.admission.drain_seconds)
        try:
            self.router.start()
            await self.images.start()
        except BaseException:
            await self._dismantle()
            raise
        self._actor = asyncio.create_task(self._run(), name="async-engine")

    async def ready(self) -> None:
        """Wait until edits are served. Raises what kept the engine from starting."""
        models = await self.router.ready()
        self.metrics.expect(models, self.config.engine.data_parallel_size)
        self.metrics.name_adapters([model.name for model in models.values() if model.parent])
        self.cache = self.router.cache
        self.models = models

    async def shutdown(self, drain_seconds: float) -> None:
        """Refuse new edits, let running ones finish within `drain_seconds`, leave no process and no memory behind."""
        self.is_closing = True
        for session in tuple(self._sessions):
            if session.is_idle_work:
                session.give_up()
        with suppress(TimeoutError):  # what is left then is aborted by the engine's end
            async with asyncio.timeout(drain_seconds):
                for session in tuple(self._sessions):
                    await session.done.wait()
        self._stopping.set()
        if self._actor is not None:
            await self._actor

    async def failed(self) -> StencilError:
        """Wait until the last engine is gone for good and return why; never returns while one serves or is started
        anew.
        """
        return await self.router.failed()

    async def _run(self) -> None:
        """The actor: every background task of the engine lives in this group, and whatever ends it ends the engine."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self.router.run())
                self._tasks.create_task(self.images.closed())
                await self._stopping.wait()
                await asyncio.gather(self.router.stop(), self._wait_for_callers())
                await self.images.stop()
        except Exception as error:  # the actor's edge: unheard, a bug here would leave every caller waiting
            logger.exception("the engine's client failed")
            self.router.fail(EngineError(f"internal error: {error}"))
        finally:
            await self._dismantle()

    async def _wait_for_callers(self) -> None:
        """Every request has its terminal output by now: give callers a moment to take it and leave their contexts."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._idle.wait()

    async def _dismantle(self) -> None:
        """End what still runs and free what is held; after an orderly end there is little left to do."""
        await self.router.close()
        with suppress(Exception):  # its failure, if it failed, is what brought us here
            await self.images.stop()
        self._arena.close()

    # ---------------------------------------------------------------------------------- edits

    @asynccontextmanager
    async def edit(self, request_id: str, edit: EditInput) -> AsyncIterator[AsyncIterator[ImageOutput]]:
        """Run one edit. Entering admits it, checks and prepares its images and submits it; iterating yields outputs as
        they come; leaving early aborts it.

        Raises on entering: InvalidRequestError and below, OverloadedError (full, too busy for it, loading or shutting
        down), DeadlineExceededError. While iterating: DeadlineExceededError, OverloadedError, EngineError.
        """
        session = EditSession(self, request_id, edit, self._choose_model(edit.model, edit.lora))
        self._check_room(session)
        with self.track(session):
            await session.prepare()
            session.submit()
            yield session.outputs()

    @contextmanager
    def track(self, session: EditSession | TemplateSession) -> Iterator[None]:
        """Count a session among those that run. When its caller leaves, what still runs of it is ended, and its memory
        freed as soon as nothing can touch it any more.
        """
        self._sessions.add(session)
        self._idle.clear()
        try:
            yield
        except StencilError:
            session.has_failed = True
            raise
        finally:
            session.give_up()
            self.run_in_background(self._clean_up(session))

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """A task of the engine's own; nothing happens once the engine has ended, and the arena with it."""
        try:
            self._tasks.create_task(work)
        except RuntimeError:
            work.close()

    async def _clean_up(self, session: EditSession | TemplateSession) -> None:
        try:
            await session.close()
        finally:
            self._sessions.remove(session)
            if not self._sessions:
                self._idle.set()

    def _check_room(self, session: EditSession | TemplateSession) -> None:
        """Whether the queue has n places, all or none."""
        if self.router.error is not None:
            raise EngineDeadError(str(self.router.error))
        self._highest_class = min(self._highest_class, session.priority)
        if session.num_images > self.config.max_queue:
            message = f"Invalid 'n': {session.num_images} images; this server takes at most {self.config.max_queue}, "
            raise InvalidRequestError(message + "as many as its queue holds (--max-queue).", param="n")
        num_missing = self.num_admitted + session.num_images - self.config.max_queue
        if num_missing > 0 and not self._make_room(num_missing, session.priority):
            self.metrics.observe_rejected("queue_full")
            raise OverloadedError("The queue is full.", retry_after=self.retry_after())

    def _make_room(self, num_images: int, priority: int) -> bool:
        """Have waiting edits of lower classes leave the queue, the lowest and latest first; none, if that is not
        enough.
        """
        leaving, num_places = [], 0
        for session in sorted(self._lower_than(priority), key=lambda session: (-session.priority, -session.arrival)):
            if num_places < num_images:
                leaving.append(session)
                num_places += session.num_images
        if num_places < num_images:
            return False
        for session in leaving:
            session.displace()
        return True

    def _lower_than(self, priority: int) -> Iterator[EditSession]:
        for session in self._sessions:
            if isinstance(session, EditSession) and session.priority > priority and session.can_be_displaced:
                yield session

    @property
    def num_displaceable(self) -> int:
        """Images in the queue that would make room for a request of the highest class that has come so far."""
        return sum(session.num_images for session in self._lower_than(self._highest_class))

    def _choose_model(self, name: str, lora: str) -> ModelInfo:
        if self.is_closing:
            self.metrics.observe_rejected("shutting_down")
            raise OverloadedError("The server is shutting down.", retry_after=MIN_RETRY_SECONDS)
        if not self.models:
            self.metrics.observe_rejected("not_ready")
            raise OverloadedError("The model is still loading.", retry_after=MIN_RETRY_SECONDS)
        return choose_model(self.models, name, lora)

    def retry_after(self) -> float:
        """Seconds after which a refused client is likely to find room: the predicted time to drain what is here."""
        return self.bounded_retry(max(self.router.drain_seconds, self.admission.drain_seconds))

    def bounded_retry(self, seconds: float) -> float:
        """What a client that should wait so long is told."""
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))

    async def release(self, region: ArrayRef) -> None:
        """Free a region of the arena, giving its memory back to the kernel piece by piece: 36 MB at once take 12 ms."""
        for start in range(region.offset, region.offset + region.size - RELEASE_BYTES, RELEASE_BYTES):
            self._arena.release_pages(start, start + RELEASE_BYTES)
            await asyncio.sleep(0)
        self.allocator.free(region)

    # ---------------------------------------------------------------------------------- templates

    async def prime_template(
        self, request_id: str, image: Upload, *, model: str = "", lora: str = "", owner: str = ""
    ) -> Template:
        """Register an image as a template of `owner` and make its pages, which edits by its id with the same adapter,
        or likewise none, then find.

        Raises InvalidRequestError and below, OverloadedError, EngineError; nothing is registered then.
        """
        info = self._choose_model(model, lora)
        self.templates.check_size(image.size)
        upload = await KeptUpload.of(image)
        session = TemplateSession(self, request_id, upload, info, owner=owner)
        self._check_room(session)
        with self.track(session):
            prepared = await session.prepare()
            page_bytes = (await session.prime()).nbytes if session.can_prime else 0
            template = Template(
                upload=upload,
                owner=owner,
                model=info.name,
                width=prepared.upload_width,
                height=prepared.upload_height,
                image_tokens=session.num_tokens,
                created=int(time.time()),
                content_id=prepared.content_id,
                primed=session.can_prime,
                page_bytes=page_bytes,
                cache_salt=self.cache.salt(owner),
            )
            self.keep_template(template)  # before the session closes, which drops what nobody keeps
        return template

    def keep_template(self, template: Template) -> None:
        """Register a template; what it displaces goes with its pages."""
        for gone in self.templates.add(template):
            self._drop_all_pages(gone)

    def delete_template(self, template_id: str, owner: str) -> None:
        """Forget a template and its pages. Raises TemplateNotFoundError."""
        self._drop_all_pages(self.templates.remove(template_id, owner))

    def _drop_all_pages(self, gone: Template) -> None:
        """Those of edits with other adapters as well."""
        for model in kin(self.models, gone.model):
            for content_id in gone.content_ids:
                self.drop_pages(model, content_id, gone.cache_salt)

    def drop_pages(self, model: str, content_id: str, cache_salt: str) -> None:
        """Have pages forgotten, unless a template has them still, or will; "" is a template that never was prepared."""
        has_pages = content_id and self.models[model].page_scheme is not None
        if has_pages and not self._is_wanted(model, content_id, cache_salt):
            self.router.drop(DropTemplate(model, content_id, cache_salt))

    def _is_wanted(self, model: str, content_id: str, cache_salt: str) -> bool:
        sessions = (session for session in self._sessions if isinstance(session, TemplateSession))
        is_priming = any(session.wants_pages(model, content_id, cache_salt) for session in sessions)
        return is_priming or self.templates.holds_content(model, content_id, cache_salt)

    # ---------------------------------------------------------------------------------- what it knows

    def view(self, ref: ArrayRef) -> npt.NDArray[Any]:
        """The array behind a handle, without a copy."""
        return self._arena.view(ref)

    @property
    def is_ready(self) -> bool:
        return bool(self.models) and self.router.is_ready and not self.is_closing

    @property
    def alive(self) -> tuple[bool, ...]:
        """Which engines serve."""
        return tuple(self.router.alive)

    @property
    def replicas(self) -> tuple[tuple[ReplicaState, int], ...]:
        """How each engine is, and how often it was started anew in a row."""
        return tuple(self.router.replicas)

    @property
    def loads(self) -> tuple[LoadReport | None, ...]:
        """The last report of each engine; None before the first."""
        return tuple(self.router.loads)

    @property
    def stats(self) -> tuple[EngineStats | None, ...]:
        """What each engine has done; None before the first report."""
        return tuple(self.router.stats)

    @property
    def recent_steps(self) -> tuple[tuple[StepSample, ...], ...]:
        """The last denoising steps of each engine, at most MAX_RECENT_STEPS, the oldest first."""
        return tuple(map(tuple, self.router.recent_steps))

    @property
    def num_admitted(self) -> int:
        """Images that take a place in the queue: from admission until their caller has left and their memory is
        free.
        """
        return sum(session.num_images for session in self._sessions if not session.is_displaced)

    @property
    def num_requests_running(self) -> int:
        return self.router.num_running

    @property
    def num_requests_waiting(self) -> int:
        """Images that no worker has begun: queued in the engine, or still in preparation."""
        in_preparation = sum(session.num_images for session in self._sessions if not session.is_submitted)
        return in_preparation + self.router.num_waiting
