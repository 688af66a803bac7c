"""EditSession: runs one edit in the API server: preparation, submission, delivery; enforces its deadline.

It owns the edit's shared memory, which is freed only when no process can touch it any more: after the terminal output
of every image and the end of every image job. `close` waits for that in the background, after the caller has left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from core.errors import AdapterNotFiniteError, DeadlineExceededError, EngineDeadError, OverloadedError, StencilError
from core.messages.engine import (
    Aborted,
    AdapterAdded,
    AdaptersUsed,
    Failed,
    Finished,
    Output,
    PartialImage,
    TemplatePrimed,
    WorkflowAdded,
)
from core.model_choice import ModelChoice
from core.routing.request_shape import RequestShape
from engine.client.admission.admission_ticket import AdmissionTicket
from engine.client.edit_types import EditInput, ImageOutput
from engine.client.recall.edit_recall import EditRecall
from engine.client.services import Services
from engine.client.sessions.cancel_scope import CancelScope
from engine.client.sessions.edit_delivery import EditDelivery
from engine.client.sessions.edit_images import EditImage, EditImages
from engine.client.sessions.edit_preparation import EditPreparation
from engine.client.sessions.running_sessions import shut_down
from engine.client.sessions.session import DisplacedFor, Session
from engine.client.sessions.session_memory import SessionMemory
from engine.client.templates.result_templates import ResultTemplates
from engine.observability.metrics import DropReason
from engine.observability.tracing import current_span

logger = logging.getLogger("stencil.engine")

MOST_LOAD_SECONDS = 120.0
"""How long a request waits for adapters that are loading, whatever its timeout: their file system may hang."""


class EditSession(Session):
    """Called in this order: begin, outputs, give_up, close. One caller.

    Its shared memory, all of it held until `close`:

        what             how many               written by           read by
        image, mask      one each               this process         image processors, to prepare and to paste back
        scratch          one                    an image processor   workers: template, mask, active tokens
        pixels, latents  one pair per image     a worker             image processors; another worker
        embedding        one, if asked for      a worker             this process, see EditRecall
        out              one per output image   an image processor   the caller: the encoded file
    """

    def __init__(
        self, services: Services, results: ResultTemplates, request_id: str, edit: EditInput, choice: ModelChoice
    ) -> None:
        """Raises InvalidRequestError, TemplateNotFoundError."""
        super().__init__(choice, edit.owner, edit.sampling.n, edit.sampling.priority)
        self._services = services
        self._results = results
        self.request_id = request_id
        self._model = choice.model
        self.workflow = choice.model.workflow
        self._adapters = [lora.name for lora in choice.loras]
        self._span = current_span()
        self._caller = services.admission.caller(request_id, edit, self.arrival)
        self._memory = SessionMemory(services)
        self._preparation = EditPreparation(services, self._caller, edit, choice, self._memory, self._span)
        self._ticket = AdmissionTicket(services.admission, self._caller, edit.sampling.timeout, self.num_images)
        self._in_preparation = CancelScope()  # by `displace`
        self._images = EditImages(services.router, self.done)
        self._recall: EditRecall | None = None  # once it is prepared; None: without approximate caching
        self._delivery: EditDelivery | None = None  # likewise
        self._choice = choice
        self._not_loaded: StencilError | None = None  # why it cannot have its late adapters
        self._in_wait = CancelScope()  # for late adapters; by `close`
        self._is_with_caller = False  # nothing is done for it before its caller asks for the next output

    # ---------------------------------------------------------------------------------- to the engine

    async def begin(self) -> None:
        """Prepare the uploads and submit one request per image. Raises InvalidRequestError and its subclasses,
        OverloadedError; DeadlineExceededError if its timeout passes or is certain to be missed.
        """
        self._ticket.look_at_upload(self._preparation.smallest_shape, self._preparation.image_seconds)
        async with self._deadline(), self._services.sessions.until_shutdown(), self._in_preparation:
            uploads = await self._preparation.store()
            prepared = await self._preparation.prepare(uploads)
            images = self._preparation.make_images(prepared)
            self._recall = self._preparation.make_recall(prepared)
            if self._recall is not None:
                await self._recall.embed(images[0].request)
        if self.displaced_for:
            raise self._displaced(self.displaced_for)
        if self._recall is not None:
            for image in images:
                self._recall.with_state(image)
        self._delivery = EditDelivery(
            self._services, self._results, self._caller, uploads, prepared, self._memory, self._span
        )
        longest = max(images, key=lambda image: sum(image.request.rounds))
        shape = RequestShape.of_request(longest.request, self._model, self._services.served.workflows)
        self._ticket.look_at_edit(shape, self._delivery.image_seconds)
        for image in images:
            image.request = msgspec.structs.replace(
                image.request, deadline=self._ticket.worker_deadline, objective=self._ticket.worker_objective
            )
            self._images.submit(image)
            self.is_submitted = True
        if any(image.request.picture.late is not None for image in images):
            self._services.sessions.run_in_background(self._use_adapters())
        self._is_with_caller = True

    async def _use_adapters(self) -> None:
        """Wait for the adapters that were still loading, and have the images go on with them, or fail."""
        async with self._in_wait:
            try:
                async with asyncio.timeout(MOST_LOAD_SECONDS):
                    patches = await self._services.served.loaded(self._choice)
            except (StencilError, TimeoutError) as error:
                message = f"An adapter of the request was not loaded within {MOST_LOAD_SECONDS:g} s."
                self._not_loaded = error if isinstance(error, StencilError) else DeadlineExceededError(message)
                self._services.router.abort(self._images.ids)
            else:
                assert self._delivery is not None, "its images are not prepared"
                self.patches = self._delivery.patches = patches  # they are kept until it ends
                self._services.router.use_adapters(self._images.ids, patches)

    @property
    def waits_for_caller(self) -> bool:
        return self._is_with_caller and self.done.is_set()

    @property
    def can_be_displaced(self) -> bool:
        """Whether no worker has begun any of its images."""
        return not self.displaced_for and not self.has_begun

    @property
    def has_begun(self) -> bool:
        """Whether a worker has begun any of its images."""
        return self._images.has_begun

    def displace(self, reason: DisplacedFor) -> None:
        """Abort its requests, or its preparation, so that its caller gets the error as soon as possible."""
        super().displace(reason)
        self._in_preparation.cancel()
        self._services.router.abort(self._images.ids)

    # ---------------------------------------------------------------------------------- from the engine

    async def outputs(self) -> AsyncIterator[ImageOutput]:
        """Yield every partial and final image, encoded, as soon as it is made; ends after the last final one. Raises
        the first failure.
        """
        assert self._delivery is not None, "its images are not prepared"
        num_left = self.num_images
        while num_left:
            self._is_with_caller = False
            async with self._deadline():
                image, output = await self._next_output()
                try:
                    file = await self._deliver(self._delivery, image, output)
                except EngineDeadError as error:
                    if not self._services.sessions.is_over:
                        raise
                    raise shut_down() from error  # it has ended the image processors
            num_left -= isinstance(output, Finished)
            if not num_left:
                self._report_time()
            # None is done while the caller reads the file, which may take long.
            self._services.admission.set_image_work(self._caller, 0.0)
            self._is_with_caller = True
            yield file
            self._services.admission.set_image_work(self._caller, self._delivery.image_seconds.composes)

    async def _next_output(self) -> tuple[EditImage, Output]:
        """Wait for the next output. Raises OverloadedError if there is none when the server shuts down."""
        try:
            async with self._services.sessions.until_shutdown():
                return await self._images.next_output()
        except OverloadedError:
            if not self._images.has_output:
                raise
        return await self._images.next_output()

    async def _deliver(self, delivery: EditDelivery, image: EditImage, output: Output) -> ImageOutput:
        match output:
            case PartialImage():
                return await delivery.partial(image, output)
            case Finished():
                assert image.ended is not None
                transit, start = image.ended - output.made, time.monotonic()
                if self._recall is not None:
                    self._recall.finished(image)
                file = await delivery.finished(image, output)
                self._ticket.note_delivered(transit + time.monotonic() - start)
                if (is_met := self._ticket.is_met(image.ended)) is not None:
                    self._services.metrics.observe_objective(is_met=is_met)
                return file
            case Failed():
                raise self._failed(output)
            case Aborted() if self.displaced_for:
                raise self._displaced(self.displaced_for)
            case Aborted() if self._not_loaded is not None:
                raise self._not_loaded
            case Aborted():
                raise shut_down()
            case TemplatePrimed() | AdapterAdded() | AdaptersUsed() | WorkflowAdded():
                raise AssertionError(f"{output.request_id} is an edit, and was answered as a template")

    # ---------------------------------------------------------------------------------- failures

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Raises DeadlineExceededError at the deadline, on the event loop's clock, which is CLOCK_MONOTONIC."""
        try:
            async with asyncio.timeout_at(self._ticket.deadline):
                yield
        except TimeoutError as error:
            self._note_dropped("timeout")
            raise DeadlineExceededError("The request's timeout passed before it finished.") from error

    def _failed(self, output: Failed) -> StencilError:
        failure = output.failure
        if failure.kind == "deadline_exceeded":
            self._note_dropped("timeout")
        if failure.kind == "overloaded":
            self._note_dropped("slo")
            return OverloadedError(failure.message, retry_after=self._services.admission.retry_after())
        if failure.kind == "not_finite" and self._adapters:
            return AdapterNotFiniteError(self._adapters)
        if failure.detail:
            logger.error("%s: %s\n%s", output.request_id, failure.message, failure.detail)
        return failure.to_error()

    def _displaced(self, reason: DisplacedFor) -> OverloadedError:
        self._note_dropped("displaced")
        whose = "of a higher class" if reason == "class" else "of another API key, which holds fewer places,"
        message = f"The queue is full, and a request {whose} has taken this one's place."
        return OverloadedError(message, retry_after=self._services.admission.retry_after())

    def _note_dropped(self, reason: DropReason) -> None:
        if reason != "displaced":
            self._report_time()
        self._services.metrics.observe_dropped(reason)

    def _report_time(self) -> None:
        """Have admission compare its prediction with the actual time. That ends when the workers have finished, as a
        slow reader says nothing about the server. A retried edit is left out: the time lost with an engine's death
        does not predict later edits.
        """
        if self._images.was_retried:
            return
        ended = self._images.last_ended
        if ended is None:
            self._ticket.missed()
        else:
            self._ticket.finished(ended)

    # ---------------------------------------------------------------------------------- the end

    def give_up(self) -> None:
        self._services.admission.forget(self._caller.edit_id)
        self._count_unfinished()
        if running := self._images.running:
            self._services.router.abort(running)
        if self._recall is not None:
            self._recall.give_up()
        if not self._images:
            self.done.set()

    def _count_unfinished(self) -> None:
        """Count the end of each image whose file was not made: as that of the edit."""
        metrics = self._services.metrics
        for image in self._images:
            if not image.is_counted:
                (metrics.observe_failed if self.has_failed else metrics.observe_aborted)(self._model.name)
                image.is_counted = True

    async def close(self) -> None:
        """Wait for the last terminal output, then free the memory."""
        await self.done.wait()
        self._in_wait.cancel()
        if self._recall is not None:
            await self._recall.close()
        await self._memory.release()
        self._services.images.forget(self._caller.edit_id)
