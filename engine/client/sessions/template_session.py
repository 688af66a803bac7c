"""TemplateSession: prepares one template's upload and has an engine prime its pages; owns the shared memory for that.

As with an edit, memory is freed only when no process can touch it any more; `close` waits for that.
"""

from __future__ import annotations

import logging
import time

from core.messages.engine import Aborted, Failed, Output, PrimeTemplate, TemplatePrimed
from core.messages.image_processor import PreparedImages, PrepareImages
from core.model_choice import ModelChoice
from engine.client.resolve.mask_aware import can_prime_ahead
from engine.client.services import Services
from engine.client.sessions.running_sessions import shut_down
from engine.client.sessions.session import Session
from engine.client.sessions.session_memory import SessionMemory
from engine.client.templates.template_store import Pages
from engine.client.upload import Upload
from engine.images import image_ops
from engine.images.image_jobs import Caller
from engine.observability.tracing import NO_SPAN, current_span

logger = logging.getLogger("stencil.engine")


class TemplateSession(Session):
    """Called in this order: prepare, prime, give_up, close. One caller.

    is_idle_work: computed while there is no other work, takes no place in the queue, and claims no pages, since its
    template was registered before.
    """

    def __init__(
        self,
        services: Services,
        request_id: str,
        upload: Upload,
        choice: ModelChoice,
        *,
        owner: str,
        is_idle_work: bool = False,
    ) -> None:
        super().__init__(choice, owner, num_images=0 if is_idle_work else 1, is_idle_work=is_idle_work)
        self._services = services
        self._id = request_id
        self._upload = upload
        self._model = choice.model
        self._cache_salt = services.served.cache.salt(owner)
        self._span = NO_SPAN if is_idle_work else current_span()  # the request's span has ended when idle work begins
        self._memory = SessionMemory(services)
        self._prepared: PreparedImages | None = None
        self._answer: Output | None = None

    async def prepare(self) -> PreparedImages:
        """Have the upload checked and made a template. Raises InvalidRequestError, OverloadedError, EngineError."""
        async with self._services.sessions.until_shutdown():
            prepared = await self._services.images.prepare(
                await self._make_job(), Caller(self._id, self.owner, arrival=self.arrival)
            )
        self._span.child("prepare", self.arrival, time.monotonic(), {})
        self._prepared = prepared
        return prepared

    async def _make_job(self) -> PrepareImages:
        model = self._model
        return PrepareImages(
            job_id=0,
            image=await self._memory.store(self._upload),
            mask=None,
            mask_kind="alpha",
            canvas_size=None,
            mask_margin=0,
            native_size=model.native_size,
            token_size=model.token_size,
            max_pixels=self._services.config.image.max_pixels,
            scratch=self._memory.alloc(image_ops.scratch_bytes(model.native_size, model.token_size)),
            max_side=model.max_side,
        )

    @property
    def num_tokens(self) -> int:
        """Image tokens of the template; valid after `prepare`."""
        assert self._prepared is not None
        return self._model.num_image_tokens(self._prepared.width, self._prepared.height)

    @property
    def can_prime(self) -> bool:
        """Whether this template's pages can be primed now, and fit the cache."""
        num_ranks = self._services.config.engine.workers_per_engine
        return can_prime_ahead(self._model, self._services.served.cache, num_ranks, self.num_tokens)

    async def prime(self) -> TemplatePrimed:
        """Have an engine prime its pages. Raises EngineError, or OverloadedError when the server shuts down."""
        start = time.monotonic()
        self._services.router.submit(self._make_request(), self._on_output)
        self.is_submitted = True
        if not self.is_idle_work:
            self._services.templates.claim(self._pages)
        async with self._services.sessions.until_shutdown():
            await self.done.wait()
        self._span.child("prime", start, time.monotonic(), {})
        match self._answer:
            case TemplatePrimed():
                return self._answer
            case Failed(failure=failure):
                if failure.detail:
                    logger.error("%s: %s\n%s", self._id, failure.message, failure.detail)
                raise failure.to_error()
            case Aborted():
                raise shut_down()
        raise AssertionError(f"{self._id} is a template, and was answered with {self._answer}")

    def _make_request(self) -> PrimeTemplate:
        prepared = self._prepared
        assert prepared is not None
        assert prepared.template is not None
        return PrimeTemplate(
            request_id=self._id,
            model=self._model.name,
            template=prepared.template,
            width=prepared.width,
            height=prepared.height,
            content_id=prepared.content_id,
            num_tokens=self.num_tokens,
            arrival=time.monotonic(),
            is_idle_work=self.is_idle_work,
            cache_salt=self._cache_salt,
            patches=self.patches,
            owner=self.owner,
        )

    def _on_output(self, output: Output) -> None:
        self._answer = output
        self.done.set()

    def give_up(self) -> None:
        if not self.is_submitted:
            self.done.set()
        elif not self.done.is_set():
            self._services.router.abort((self._id,))

    @property
    def _pages(self) -> Pages:
        assert self._prepared is not None
        return self._model.name, self._prepared.content_id, self._cache_salt

    async def close(self) -> None:
        """Wait for the terminal output, then free the memory. Pages without a template are dropped: an abort may come
        after they were made, and a captured template may be deleted while it is primed.
        """
        await self.done.wait()
        if self.is_submitted:
            if not self.is_idle_work:
                self._services.templates.release(self._pages)
            self._services.templates.drop_unwanted(self._pages)
        await self._memory.release()
