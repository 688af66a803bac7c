"""EditSession: one edit from its upload to its last image, and all the shared memory it takes.

Memory is freed only when nothing can touch it any more: after the terminal output of every image and the end of every
image job. `close` waits for that, so it runs in the background, after the caller has left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from core.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from core.handles import ArrayRef
from core.messages.engine import Aborted, Failed, Finished, PartialImage, TemplatePrimed
from core.messages.image_processor import ComposedImage, PreparedImages
from core.model_choice import kin
from core.model_info import ModelInfo
from core.routing.fleet import EditShape
from core.sampling_params import MAX_PADDING_MASK_CROP, MAX_PROMPT_CHARACTERS
from core.validation import check_integer, check_length
from engine.client.admission_ticket import AdmissionTicket
from engine.client.edit_images import EditImage, EditImages
from engine.client.edit_types import EditInput, EditReport, ImageOutput
from engine.client.prepared_edit import PreparedEdit, smallest_shape
from engine.client.sampling_defaults import resolve
from engine.client.session_images import SessionImages
from engine.client.session_memory import SessionMemory
from engine.client.template_store import Template, TemplateStore
from engine.images import image_ops
from engine.observability.metrics import DropReason
from engine.observability.tracing import current_span

if TYPE_CHECKING:
    from engine.client.async_engine import AsyncEngine
    from engine.router.engine_client import RequestOutput


logger = logging.getLogger("stencil.engine")


@dataclass(slots=True)
class Timing:
    """Clock readings of one edit, seconds of CLOCK_MONOTONIC."""

    arrival: float = field(default_factory=time.monotonic)
    prepared: float = 0.0


class EditSession:
    """prepare, submit, outputs; then give_up and close. One caller.

    What it holds of shared memory, all of it until `close`:

        what             how many               written by           read by
        image, mask      one each               this process         image processors, to prepare and to paste back
        scratch          one                    an image processor   workers: template, mask, active tokens
        pixels, latents  one pair per image     a worker             image processors; another worker
        out              one per output image   an image processor   the caller: the encoded file
    """

    is_idle_work = False

    def __init__(self, engine: AsyncEngine, request_id: str, edit: EditInput, model: ModelInfo) -> None:
        self.num_images = edit.sampling.n
        self.priority = edit.sampling.priority
        self.is_displaced = False  # its places in the queue are another's
        self._engine = engine
        self._id = request_id
        self._edit = edit
        self._model = model
        self._sampling = resolve(edit.sampling, model)
        check_length("prompt", edit.prompt, MAX_PROMPT_CHARACTERS)
        if edit.padding_mask_crop is not None:
            check_integer("padding_mask_crop", edit.padding_mask_crop, 0, MAX_PADDING_MASK_CROP)
        self._template = _find_template(edit, engine.templates)
        self._upload = self._template.upload if self._template else edit.image
        self._timing = Timing()
        self._span = current_span()
        caller = engine.admission.caller(request_id, edit, self._timing.arrival)
        self._ticket = AdmissionTicket(
            engine.admission, self._timing.arrival, edit.sampling.timeout, self.num_images, caller
        )
        self._memory = SessionMemory(engine)
        self._images = SessionImages(engine, caller, edit, self._upload, model, self._memory)
        self._resolved: PreparedEdit | None = None  # once its images are prepared
        self._pictures = EditImages(engine.router)
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self.done = asyncio.Event()  # nothing of it is left to compute
        self.has_failed = False  # set by the engine when an error, not the caller, ends it

    # ---------------------------------------------------------------------------------- before the engine

    async def prepare(self) -> None:
        """Copy the uploads to shared memory and have them checked and turned into template, mask and tokens."""
        edit, model = self._edit, self._model
        shape = smallest_shape(self._sampling, model, edit.owner)
        self._ticket.look_at_upload(shape, self._images.seconds)
        async with self._deadline():
            prepared = await self._images.prepare()
            config = msgspec.structs.replace(self._engine.config.engine, cache=self._engine.cache)
            self._resolved = PreparedEdit.of(edit, model, self._sampling, prepared, config)
            image_ops.check_output_size(*self._resolved.output_size, edit.output_format)
        if self._template is not None and self._template.model in kin(self._engine.models, model.name):
            self._note_content(self._template.id, prepared)
        self._timing.prepared = time.monotonic()
        self._span.child("prepare", self._timing.arrival, self._timing.prepared, {})

    def _note_content(self, template_id: str, prepared: PreparedImages) -> None:
        """What pages the registered template has from now on."""
        if prepared.crop is None:
            self._engine.templates.set_content(template_id, prepared.content_id)
        else:
            self._engine.templates.add_crop(template_id, prepared.content_id)

    @property
    def _known(self) -> PreparedEdit:
        assert self._resolved is not None, "its images are not prepared"
        return self._resolved

    # ---------------------------------------------------------------------------------- to the engine

    @property
    def arrival(self) -> float:
        return self._timing.arrival

    @property
    def is_submitted(self) -> bool:
        return bool(self._pictures)

    def submit(self) -> None:
        """Hand one request per image to the engine. Raises OverloadedError, DeadlineExceededError where they would come
        too late.
        """
        if self.is_displaced:
            raise self._displaced()
        pictures = [self._make_picture(index) for index in range(self.num_images)]
        self._ticket.look_at_edit(EditShape.of_edit(pictures[0].request, self._model), self._images.seconds)
        for picture in pictures:
            picture.request = msgspec.structs.replace(picture.request, objective=self._ticket.worker_objective)
            self._engine.router.submit(picture.request, self._hear)
            self._pictures.add(picture)

    @property
    def can_be_displaced(self) -> bool:
        """Whether no worker has begun any of it."""
        return not self.is_displaced and not self._pictures.has_begun

    def displace(self) -> None:
        """Leave the queue to a request of a higher class; the caller is told as soon as possible."""
        self.is_displaced = True
        self._engine.router.abort(self._pictures.ids)

    def _displaced(self) -> OverloadedError:
        self._note_dropped("displaced")
        message = "The queue is full, and a request of a higher class has taken this one's place."
        return OverloadedError(message, retry_after=self._engine.retry_after())

    def _make_picture(self, index: int) -> EditImage:
        request = self._known.make_request(
            index,
            f"{self._id}-{index}",
            self._memory.alloc,
            arrival=self._timing.prepared,
            deadline=self._ticket.deadline,
            trace_context=self._span.traceparent,
        )
        assert request.sampling.seed is not None
        return EditImage(index, request.sampling.seed, request)

    def _hear(self, output: RequestOutput) -> None:
        if not isinstance(output, PartialImage):
            self._pictures.note_end(output, time.monotonic())
            if not self._pictures.running:
                self.done.set()
        self._outputs.put_nowait(output)

    # ---------------------------------------------------------------------------------- from the engine

    async def outputs(self) -> AsyncIterator[ImageOutput]:
        """Every partial and final image, encoded, as it comes; ends after the last final one. Raises the first
        failure.
        """
        num_left = self.num_images
        while num_left:
            async with self._deadline():
                output = await self._outputs.get()
                image = await self._take(output)
            num_left -= isinstance(output, Finished)
            if not num_left:
                self._teach()
            self._ticket.note_image_work(0.0)  # none is done while the reader has it, for as long as it likes
            yield image
            self._ticket.note_image_work(self._images.seconds.composes)

    async def _take(self, output: RequestOutput) -> ImageOutput:
        picture = self._pictures[output.request_id]
        match output:
            case PartialImage():
                return await self._take_partial(picture, output)
            case Finished():
                return await self._take_finished(picture, output)
            case Failed():
                self._engine.metrics.observe_failed(self._model.name)
                if output.failure.kind == "deadline_exceeded":
                    self._note_dropped("timeout")
                if output.failure.kind == "overloaded":
                    self._note_dropped("slo")
                    raise OverloadedError(output.failure.message, retry_after=self._engine.retry_after())
                if output.failure.detail:
                    logger.error("%s: %s\n%s", output.request_id, output.failure.message, output.failure.detail)
                raise output.failure.to_error()
            case Aborted() if self.is_displaced:
                raise self._displaced()
            case Aborted():
                raise OverloadedError("The server shut down before the request finished.", retry_after=1.0)
            case TemplatePrimed():
                raise AssertionError(f"{output.request_id} is an edit, and was answered as a template")

    async def _take_partial(self, picture: EditImage, output: PartialImage) -> ImageOutput:
        composed = await self._compose(picture, picture.request.pixels[output.index])
        picture.num_partials += 1
        return self._make_output(picture, composed, partial_index=picture.num_partials - 1)

    async def _take_finished(self, picture: EditImage, output: Finished) -> ImageOutput:
        start = time.monotonic()
        composed = await self._compose(picture, picture.request.pixels[-1])
        postprocess = time.monotonic() - start
        self._span.child("queue", *self._queue_times(output), {"stencil.image": picture.index})
        report = self._known.make_report(
            output,
            engine=picture.engine,
            template_id=await self._capture(composed),
            colour_lost=composed.colour_lost,
            preprocess_seconds=self._timing.prepared - self._timing.arrival,
            postprocess_seconds=postprocess,
        )
        assert picture.ended is not None
        is_met = self._ticket.is_met(picture.ended)
        if is_met is not None:
            self._engine.metrics.observe_objective(is_met=is_met)
        self._engine.metrics.observe_finished(
            self._model.name,
            seconds=time.monotonic() - self._timing.arrival,
            ms=report.ms,
            mask_ratio=report.mask_ratio,
            cache=report.cache,
            num_inference_steps=report.num_inference_steps,
        )
        return self._make_output(picture, composed, report=report)

    def _queue_times(self, output: Finished) -> tuple[float, float]:
        """When the image was handed over, and when a worker began with it."""
        return self._timing.prepared, self._timing.prepared + output.ms["queue"] / 1e3

    async def _capture(self, composed: ComposedImage) -> str | None:
        """Make a template of a result whose every token was to be computed; its id, if it became one."""
        if self._known.exact_reason not in ("asked", "mask_covers_all"):
            return None
        edit = self._edit
        return await self._engine.result_templates.keep(composed, self._model, edit.owner, is_base64=edit.base64)

    async def _compose(self, picture: EditImage, pixels: ArrayRef) -> ComposedImage:
        start = time.monotonic()
        composed = await self._images.compose(pixels, self._known.prepared)
        self._span.child("compose", start, time.monotonic(), {"stencil.image": picture.index})
        return composed

    def _make_output(
        self,
        picture: EditImage,
        composed: ComposedImage,
        partial_index: int | None = None,
        report: EditReport | None = None,
    ) -> ImageOutput:
        return ImageOutput(
            image_index=picture.index,
            partial_index=partial_index,
            data=self._engine.view(composed.encoded).data.toreadonly(),
            width=composed.width,
            height=composed.height,
            seed=picture.seed,
            report=report,
        )

    # ---------------------------------------------------------------------------------- the end

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Raises DeadlineExceededError at the deadline, on the event loop's clock, which is CLOCK_MONOTONIC."""
        try:
            async with asyncio.timeout_at(self._ticket.deadline):
                yield
        except TimeoutError as error:
            self._note_dropped("timeout")
            raise DeadlineExceededError("The request's timeout passed before it finished.") from error

    def _note_dropped(self, reason: DropReason) -> None:
        if reason != "displaced":
            self._teach()
        self._engine.metrics.observe_dropped(reason)

    def _teach(self) -> None:
        """Have the door learn from it. A reader may take as long as it likes over the pictures that workers have
        finished: that says nothing of the server. Nor does what an engine's death has cost say anything of edits to
        come.
        """
        if self._pictures.was_retried:
            return
        ended = self._pictures.last_ended
        if ended is None:
            self._ticket.missed()
        else:
            self._ticket.finished(ended)

    def give_up(self) -> None:
        """Nobody listens any more: abort what still runs."""
        self._ticket.leave()
        running = self._pictures.running
        for _ in running:
            self._count_end(self._model.name)
        if running:
            self._engine.router.abort(running)
        if not self._pictures:
            self.done.set()

    @property
    def _count_end(self) -> Callable[[str], None]:
        metrics = self._engine.metrics
        return metrics.observe_failed if self.has_failed else metrics.observe_aborted

    async def close(self) -> None:
        """Wait for the last terminal output, then free the memory."""
        await self.done.wait()
        await self._memory.release()
        self._engine.images.forget(self._id)


def _find_template(edit: EditInput, templates: TemplateStore) -> Template | None:
    """Raises TemplateNotFoundError; InvalidRequestError where an image came as well."""
    if edit.template_id is None:
        return None
    if edit.image is not None:
        message = "Give either 'image' or 'template_id', not both: each of them is the picture to edit."
        raise InvalidRequestError(message, param="template_id")
    return templates.use(edit.template_id, edit.owner)
