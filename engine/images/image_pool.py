"""ImagePool: the API server's image processors: queues jobs, assigns them to the processes, replaces dead ones.

A job is answered exactly once. When its caller has an answer or an exception, cancellation included, no processor
touches the job's memory any more: the caller may free it.

Jobs are limited: CPU time and memory by the kernel (see ImageProcessorConfig), hanging by STALL_SECONDS, the wait for a
cancelled one by CANCEL_SECONDS, results in memory by RESULT_BYTES. The number of waiting jobs is limited by admission:
each edit has one job at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from itertools import count

import msgspec

from core.config import ImageConfig
from core.costs.image_costs import ImageCosts, ImageWork
from core.errors import EngineDeadError, EngineError, InvalidRequestError, MessageError, StencilError
from core.failure import Failure
from core.ipc.logs import of_request
from core.ipc.process import spawn
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import Arena
from core.messages.codec import MessageDecoder
from core.messages.image_processor import (
    ComposedImage,
    ComposeImage,
    FromImageProcessor,
    JobFailed,
    PreparedImages,
    PrepareImages,
    ReadPicture,
    ReadPixels,
    ToImageProcessor,
)
from engine.images.image_jobs import Answer, Caller, ImageJob, JobQueue, Room, upload_work
from engine.images.image_processor import ImageProcessorConfig
from engine.images.processor_handle import ProcessorHandle
from engine.images.result_budget import ResultBudget

logger = logging.getLogger("stencil.images")

ANYBODY = Caller()
"""Default caller: no edit, no owner, default class."""

CPU_SECONDS, CPU_SECONDS_PER_PIXEL = 10.0, 1e-6
"""CPU time limit of one job: a constant, and an amount per pixel of the largest file allowed. At 64 megapixels the
limit is 77 s, and the slowest job (decode WebP, encode lossless WebP) takes 15 s."""
MEMORY_BYTES, MEMORY_BYTES_PER_PIXEL = 768 * 1024**2, 40
"""Memory limit of one processor, in the same way; the most that a job took was 28 bytes per pixel. The constant part is
for results larger than any upload may be."""
CANCEL_SECONDS = 1.0
"""How long a cancelled caller waits for its processor before this is killed; a new one takes 0.3 s to start."""
STOP_SECONDS = 1.0
"""How long a processor may take to exit after its channel was closed; it has nothing to clean up."""
MAX_DEATHS = 2
"""A job is failed when this many processors have died with it."""
RESULT_BYTES, RESULT_BYTES_PER_OWNER = 768 * 1024**2, 384 * 1024**2
"""Limits of results in memory that clients have not received, see `ResultBudget`. An edit has at most 10 of 90 MB."""
SHORT_SECONDS = 0.25
"""Jobs predicted to take at most this long are short: they may use the spare processor, see `ImagePool`."""


class ImagePool:
    """`config.image_workers` processes with one job each; JobQueue has the order of the jobs.

    Jobs are not interrupted and may take seconds. So that a short job of one owner does not wait for long ones of
    others, a spare processor is started at the first long job of an owner with a key. It does short jobs of owners that
    have no job running, while all other processors are busy, at least one of them with a long job.

    A dead processor is replaced when the next job needs one. Its job is retried once, then fails with EngineDeadError,
    so that a malicious upload cannot kill one processor after another. A job that exceeded its CPU time is not retried:
    InvalidRequestError for an upload, EngineError for a result.
    """

    def __init__(self, config: ImageConfig, arena: Arena) -> None:
        """arena: of all handles in jobs; closed by the caller."""
        self.num_deaths = 0  # processors that died unexpectedly since start
        self.num_retries = 0  # jobs retried after such a death since start
        self.costs = ImageCosts()
        self.results = ResultBudget(RESULT_BYTES, RESULT_BYTES_PER_OWNER)
        self._config = config
        self._arena = arena
        self._queue = JobQueue()
        self._processors: list[ProcessorHandle] = []  # not known to be dead
        self._job_ids = count(1)
        self._stopping = asyncio.Event()
        self._stopping.set()  # until started
        self._main: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for a processor."""
        return self._queue.num_waiting

    @property
    def num_running(self) -> int:
        """Processors that have a job."""
        return sum(processor.job is not None for processor in self._processors)

    @property
    def result_bytes(self) -> int:
        """Bytes of results in memory that clients have not received yet."""
        return self.results.used_bytes

    # ------------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Spawn the processors and return; jobs may be submitted at once. Raises EngineError."""
        ready = asyncio.Event()
        self._stopping.clear()
        self._main = asyncio.create_task(self._run(ready), name="image-pool")
        await ready.wait()
        try:
            for _ in range(self._config.image_workers):
                self._start_processor()
        except OSError as error:
            await self.stop()
            raise EngineError(f"cannot start an image processor: {error}") from error

    async def stop(self) -> None:
        """End the processors; unanswered jobs fail with EngineDeadError. May be called again."""
        self._stopping.set()
        if self._main is not None:
            await self._main

    async def closed(self) -> None:
        """Wait until the pool has stopped; raises the error that ended it, if one did."""
        assert self._main is not None
        await asyncio.shield(self._main)

    async def prepare(self, job: PrepareImages, caller: Caller = ANYBODY) -> PreparedImages:
        """Do `job`, whose job_id is ignored. Raises InvalidRequestError, EngineError."""
        answer = await self._submit(job, upload_work(job), caller)
        assert isinstance(answer, PreparedImages)
        return answer

    async def read(self, job: ReadPicture, caller: Caller = ANYBODY) -> ReadPixels:
        """The pixels of a picture. Raises as `prepare`."""
        answer = await self._submit(job, upload_work(job), caller)
        assert isinstance(answer, ReadPixels)
        return answer

    async def compose(
        self, job: ComposeImage, work: ImageWork, caller: Caller = ANYBODY, room: Room | None = None
    ) -> ComposedImage:
        """As `prepare`. work: the job's size. room: memory for the result instead of `job.out`, counted in `results`
        until `forget`; errors of its `take` are raised here.
        """
        if room is not None:
            self.results.join(caller.edit_id, caller.owner)
        answer = await self._submit(job, work, caller, room)
        assert isinstance(answer, ComposedImage)
        return answer

    def forget(self, edit_id: str) -> None:
        """Note that the memory of an edit's results was freed; other jobs may begin."""
        self.results.leave(edit_id)
        self._dispatch()

    async def _run(self, ready: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                ready.set()
                await self._stopping.wait()
                for processor in self._processors:
                    processor.channel.close()
        finally:
            self._fail_queue("the image processors have stopped")

    # ------------------------------------------------------------------------------------------------- jobs

    async def _submit(
        self, message: ToImageProcessor, work: ImageWork, caller: Caller, room: Room | None = None
    ) -> Answer:
        if self._stopping.is_set():
            raise EngineDeadError("the image processors have stopped")
        message = msgspec.structs.replace(message, job_id=next(self._job_ids))
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        job = ImageJob(message, answer, work, self.costs.predict(work), caller, room)
        self._queue.push(job)
        self._dispatch()
        try:
            await asyncio.wait([job.answer])
        except asyncio.CancelledError:
            await self._abandon(job)
            raise
        return job.answer.result()

    async def _abandon(self, job: ImageJob) -> None:
        """Remove a cancelled caller's job from the queue, or wait until no processor works on it."""
        job.is_abandoned = True
        if self._queue.is_waiting(job):
            self._queue.remove(job)
            return
        patience = asyncio.get_running_loop().call_later(CANCEL_SECONDS, self._dismiss, job)
        while not job.answer.done():
            with contextlib.suppress(asyncio.CancelledError):  # again: the memory is still in use
                await asyncio.wait([job.answer])
        patience.cancel()
        job.answer.exception()  # marks it as retrieved

    def _dismiss(self, job: ImageJob) -> None:
        for processor in self._processors:
            if processor.job is job:
                processor.dismiss()

    def _dispatch(self) -> None:
        """Assign queued jobs to idle processors; dead ones are replaced."""
        while self._has_place and not self._stopping.is_set():
            job = self._queue.next(self._may_begin)
            if job is None or (processor := self._idle_processor()) is None:
                break
            if not self._take_room(job):
                continue
            self._queue.begin(job)
            try:
                processor.take(job)
            except MessageError as error:
                self._queue.remove(job)
                job.fail(error)
            except PeerClosedError:  # it died while idle, which does not count for the job; `_watch` notices, too
                self._processors.remove(processor)
                self._queue.give_back(job)
        self._start_spare()

    @property
    def _has_place(self) -> bool:
        return self.num_running < self._config.image_workers + self._has_long_job

    def _may_begin(self, job: ImageJob) -> bool:
        """Whether a processor may take a waiting job now, and there is room for its result."""
        if self.num_running >= self._config.image_workers and not self._may_have_spare(job):
            return False
        return job.room is None or self.results.has_room(job.caller.edit_id, job.room.nbytes)

    def _may_have_spare(self, job: ImageJob) -> bool:
        running = (processor.job for processor in self._processors if processor.job is not None)
        return job.seconds <= SHORT_SECONDS and all(other.caller.owner != job.caller.owner for other in running)

    @property
    def _has_long_job(self) -> bool:
        """Whether a processor has a long job of an owner with a key; without keys, no other owners wait for it."""
        jobs = (processor.job for processor in self._processors)
        return any(job is not None and job.caller.owner and job.seconds > SHORT_SECONDS for job in jobs)

    def _take_room(self, job: ImageJob) -> bool:
        """Allocate the memory for a job's result, if it needs any. Returns False if that failed; the job fails then."""
        if job.room is None:
            return True
        try:
            out = job.room.take()
        except StencilError as error:
            self._queue.remove(job)
            job.fail(error)
            return False
        self.results.take(job.caller.edit_id, job.room.nbytes)
        job.message, job.held, job.room = msgspec.structs.replace(job.message, out=out), job.room.nbytes, None
        return True

    def _fail_queue(self, reason: str) -> None:
        while (job := self._queue.next(lambda _: True)) is not None:
            self._queue.remove(job)
            job.fail(EngineDeadError(reason))

    def _idle_processor(self) -> ProcessorHandle | None:
        for processor in self._processors:
            if processor.job is None and not processor.is_dismissed:
                return processor
        if len(self._processors) >= self._config.image_workers + self._has_long_job:
            return None  # one of them is dismissed, and will be replaced when it is dead
        try:
            return self._start_processor()
        except OSError as error:
            logger.error("cannot replace an image processor: %s", error, extra=of_request(""))
            if not self._processors:  # otherwise one of them takes the next job when it is idle
                self._fail_queue("no image processor can be started")
            return None

    def _start_spare(self) -> None:
        """Start the spare processor before the first short job needs it, as a start takes 0.3 s."""
        is_wanted = self._has_long_job and not self._stopping.is_set()
        if is_wanted and len(self._processors) == self._config.image_workers:
            try:
                self._start_processor()
            except OSError as error:
                logger.warning("cannot start another image processor: %s", error, extra=of_request(""))

    def _take_answer(self, processor: ProcessorHandle, answer: FromImageProcessor) -> None:
        job = processor.job
        if job is None or job.message.job_id != answer.job_id:
            raise RuntimeError(f"{processor.child.name} answered a job it does not have: {answer}")
        processor.drop_job()
        took = time.monotonic() - processor.began
        self._queue.remove(job, took)
        match answer:
            case PreparedImages() | ReadPixels() | ComposedImage():
                self.costs.observe(job.work, took)
                if isinstance(answer, ComposedImage) and job.held:
                    self.results.take(job.caller.edit_id, answer.encoded.size - job.held)
                job.answer.set_result(answer)
            case JobFailed(failure=failure):
                if failure.detail:
                    extra = of_request(job.request_id)
                    logger.error("an image job failed: %s\n%s", failure.message, failure.detail, extra=extra)
                job.answer.set_exception(failure.to_error())

    # ------------------------------------------------------------------------------------------------- processors

    def _start_processor(self) -> ProcessorHandle:
        """Takes a few milliseconds; the process needs a few hundred more until it reads its first job."""
        assert self._tasks is not None
        channel, channel_fds = Channel.create()
        config = msgspec.msgpack.encode(_limits(self._arena.id, self._config.max_pixels))
        fds = [self._arena.fd, *channel_fds]
        try:
            child = spawn("engine.images.image_processor:main", config, fds, "stencil-images")
        except OSError:
            channel.close()
            raise
        channel.close_child_fds()
        processor = ProcessorHandle(child, channel)
        self._processors.append(processor)
        self._tasks.create_task(self._watch(processor), name=child.name)
        return processor

    async def _watch(self, processor: ProcessorHandle) -> None:
        """Take a processor's answers until it dies or is stopped; then retry or fail its job."""
        decoder: MessageDecoder[FromImageProcessor] = MessageDecoder(FromImageProcessor)
        try:
            async for payload in processor.channel.messages():
                if (answer := _read_answer(decoder, payload, processor)) is not None:
                    self._take_answer(processor, answer)
                self._dispatch()
        except BaseException:
            self._stopping.set()  # a bug ends the pool: no more jobs may be queued
            raise
        finally:
            await self._bury(processor)
        self._dispatch()

    async def _bury(self, processor: ProcessorHandle) -> None:
        """Wait until a processor is dead; only then may its job's memory be used for something else."""
        processor.channel.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(processor.child.wait(), STOP_SECONDS)
        processor.child.kill()
        await processor.child.wait()
        if processor in self._processors:
            self._processors.remove(processor)
        if not self._stopping.is_set() and not processor.is_dismissed:
            self.num_deaths += 1
            logger.error("an image processor died: %s", processor.child.describe_exit(), extra=processor.log_extra)
        if (job := processor.drop_job()) is not None:
            self._retry_or_fail(job, has_run_out=processor.child.returncode == -signal.SIGPROF)

    def _retry_or_fail(self, job: ImageJob, *, has_run_out: bool) -> None:
        """Requeue or fail the job of a dead processor. has_run_out: the job exceeded its CPU time."""
        job.deaths += 1
        if not (has_run_out or self._stopping.is_set() or job.is_abandoned or job.deaths == MAX_DEATHS):
            self.num_retries += 1
            self._queue.give_back(job)
            return
        self._queue.remove(job)
        job.fail(_out_of_time(job) if has_run_out else EngineDeadError("the process that handled the image died"))


def _read_answer(
    decoder: MessageDecoder[FromImageProcessor], payload: bytes, processor: ProcessorHandle
) -> FromImageProcessor | None:
    """Decode an answer. One that cannot be decoded becomes a JobFailed for the processor's job; None if it has none."""
    try:
        return decoder.decode(payload)
    except MessageError as error:
        logger.error("%s: %s", processor.child.name, error, extra=processor.log_extra)
        if processor.job is None:
            return None
        return JobFailed(job_id=processor.job.message.job_id, failure=Failure.of(error))


def _limits(arena_id: int, max_pixels: int) -> ImageProcessorConfig:
    return ImageProcessorConfig(
        arena_id=arena_id,
        cpu_seconds=CPU_SECONDS + CPU_SECONDS_PER_PIXEL * max_pixels,
        memory_bytes=MEMORY_BYTES + MEMORY_BYTES_PER_PIXEL * max_pixels,
    )


def _out_of_time(job: ImageJob) -> InvalidRequestError | EngineError:
    if isinstance(job.message, ReadPicture):
        param = job.message.param
        message = f"Invalid '{param}': it takes too long to decode; save it again, with fewer pixels."
        return InvalidRequestError(message, param=param, code="image_too_large")
    if isinstance(job.message, PrepareImages):
        further = job.message.references or job.message.controls
        files = "'image', mask or further picture" if further else "'image' or mask"
        message = f"Invalid {files}: it takes too long to decode; save it again, with fewer pixels."
        return InvalidRequestError(message, param="image", code="image_too_large")
    return EngineError("the result takes too long to encode")
