"""The image processors as seen from the API server: one actor that queues jobs, runs them and survives their deaths.

It owns the processes and the queue, and knows nothing of pixels. A job is answered exactly once. When its caller has an
answer or an exception, cancellation included, no processor touches the job's memory any more: the caller may free it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass

import msgspec

from core.config import ImageConfig
from core.errors import EngineDeadError, EngineError
from core.ipc.process import ChildProcess, spawn
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import Arena
from core.messages import (
    ComposedImage,
    ComposeImage,
    FromImageProcessor,
    JobFailed,
    PreparedEdit,
    PrepareEdit,
    ToImageProcessor,
)
from engine.image_processor import ImageProcessorConfig

logger = logging.getLogger("stencil.images")

JOB_SECONDS = 120.0
"""A processor that works longer than this on one job hangs and is killed; 64 megapixels take a tenth of it."""
STOP_SECONDS = 1.0
"""How long a processor may take to leave when its channel is closed; it has nothing to clean up."""
MAX_DEATHS = 2
"""How many processors a job may take with it before it is given up."""


@dataclass(eq=False, slots=True)
class _Job:
    message: ToImageProcessor
    answer: asyncio.Future[PreparedEdit | ComposedImage]
    deaths: int = 0  # processors that died with it in hand
    abandoned: bool = False  # its caller was cancelled: not worth a second try


@dataclass(eq=False, slots=True)
class _Processor:
    child: ChildProcess
    channel: Channel
    job: _Job | None = None  # what it works on now
    limit: asyncio.TimerHandle | None = None  # kills it when the job takes too long


class ImagePool:
    """`config.image_workers` processes, one job in flight each, first come first served.

    A processor that dies is replaced when the next job needs one; its job is tried once more, then fails with
    EngineDeadError, so that one poisonous upload cannot keep all of them down.
    """

    def __init__(self, config: ImageConfig, arena: Arena) -> None:
        """arena: where all handles in jobs point to; it stays the caller's."""
        self.num_deaths = 0  # processors that ended unasked, since start
        self._config = config
        self._arena = arena
        self._queue: deque[_Job] = deque()
        self._processors: list[_Processor] = []  # alive, as far as is known
        self._last_job_id = 0
        self._stopping = asyncio.Event()
        self._stopping.set()  # until started
        self._main: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def num_waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Processors at work."""
        return sum(processor.job is not None for processor in self._processors)

    # ------------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the processors; does not wait until they run (jobs may be given at once). Raises EngineError."""
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
        """End the processors; jobs not yet answered fail with EngineDeadError. Harmless when repeated."""
        self._stopping.set()
        if self._main is not None:
            await self._main

    async def closed(self) -> None:
        """Wait for the pool's end; raises what ended it, if it was not told to."""
        assert self._main is not None
        await asyncio.shield(self._main)

    async def prepare(self, job: PrepareEdit) -> PreparedEdit:
        """Do `job`, whose job_id is ignored. Raises what the processor says: InvalidRequestError or EngineError."""
        answer = await self._submit(msgspec.structs.replace(job, job_id=self._next_job_id()))
        assert isinstance(answer, PreparedEdit)
        return answer

    async def compose(self, job: ComposeImage) -> ComposedImage:
        """As `prepare`."""
        answer = await self._submit(msgspec.structs.replace(job, job_id=self._next_job_id()))
        assert isinstance(answer, ComposedImage)
        return answer

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

    def _next_job_id(self) -> int:
        self._last_job_id += 1
        return self._last_job_id

    async def _submit(self, message: ToImageProcessor) -> PreparedEdit | ComposedImage:
        if self._stopping.is_set():
            raise EngineDeadError("the image processors have stopped")
        job = _Job(message, asyncio.get_running_loop().create_future())
        self._queue.append(job)
        self._dispatch()
        try:
            await asyncio.wait([job.answer])
        except asyncio.CancelledError:
            await self._abandon(job)
            raise
        return job.answer.result()

    async def _abandon(self, job: _Job) -> None:
        """Take a cancelled caller's job off the queue, or wait until no processor works on it."""
        job.abandoned = True
        if job in self._queue:
            self._queue.remove(job)
            return
        while not job.answer.done():
            with contextlib.suppress(asyncio.CancelledError):  # again: the memory is still in use
                await asyncio.wait([job.answer])
        job.answer.exception()  # seen, though by nobody

    def _dispatch(self) -> None:
        """Hand queued jobs to idle processors, replacing dead ones first."""
        while self._queue and not self._stopping.is_set() and (processor := self._idle_processor()) is not None:
            job = self._queue.popleft()
            try:
                processor.channel.send(msgspec.msgpack.encode(job.message))
            except PeerClosedError:  # it died idle, which is not the job's fault; its task will notice, too
                self._processors.remove(processor)
                self._queue.appendleft(job)
            else:
                processor.job = job
                loop = asyncio.get_running_loop()
                processor.limit = loop.call_later(JOB_SECONDS, processor.child.kill)

    def _fail_queue(self, reason: str) -> None:
        while self._queue:
            _fail(self._queue.popleft(), reason)

    def _idle_processor(self) -> _Processor | None:
        for processor in self._processors:
            if processor.job is None:
                return processor
        if len(self._processors) == self._config.image_workers:
            return None
        try:
            return self._start_processor()
        except OSError as error:
            logger.error("cannot replace an image processor: %s", error)
            if not self._processors:  # else one of them comes back for the queue
                self._fail_queue("no image processor can be started")
            return None

    def _take_answer(self, processor: _Processor, answer: FromImageProcessor) -> None:
        job = self._take_job(processor)
        if job is None or job.message.job_id != answer.job_id:
            raise RuntimeError(f"{processor.child.name} answered a job it does not have: {answer}")
        match answer:
            case PreparedEdit() | ComposedImage():
                job.answer.set_result(answer)
            case JobFailed(failure=failure):
                if failure.detail:
                    logger.error("an image job failed: %s\n%s", failure.message, failure.detail)
                job.answer.set_exception(failure.to_error())

    def _take_job(self, processor: _Processor) -> _Job | None:
        job, processor.job = processor.job, None
        if processor.limit is not None:
            processor.limit.cancel()
        return job

    # ------------------------------------------------------------------------------------------------- processors

    def _start_processor(self) -> _Processor:
        """Takes a few milliseconds; the process itself needs a few hundred until it takes its first job."""
        assert self._tasks is not None
        channel, channel_fds = Channel.create()
        config = msgspec.msgpack.encode(ImageProcessorConfig(self._arena.id))
        fds = [self._arena.fd, *channel_fds]
        try:
            child = spawn("engine.image_processor:main", config, fds, "stencil-images")
        except OSError:
            channel.close()
            raise
        channel.close_child_fds()
        processor = _Processor(child, channel)
        self._processors.append(processor)
        self._tasks.create_task(self._watch(processor), name=child.name)
        return processor

    async def _watch(self, processor: _Processor) -> None:
        """Take a processor's answers until it dies or is stopped; then settle what it had in hand."""
        decoder: msgspec.msgpack.Decoder[FromImageProcessor] = msgspec.msgpack.Decoder(FromImageProcessor)
        try:
            async for payload in processor.channel.messages():
                self._take_answer(processor, decoder.decode(payload))
                self._dispatch()
        except BaseException:
            self._stopping.set()  # a bug ends the pool: nobody may queue for what is going away
            raise
        finally:
            await self._bury(processor)
        self._dispatch()

    async def _bury(self, processor: _Processor) -> None:
        """See a processor's end; only then can its job's memory be anybody else's."""
        processor.channel.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(processor.child.wait(), STOP_SECONDS)
        processor.child.kill()
        await processor.child.wait()
        if processor in self._processors:
            self._processors.remove(processor)
        if not self._stopping.is_set():
            self.num_deaths += 1
            logger.error("an image processor died: %s", processor.child.describe_exit())
        if (job := self._take_job(processor)) is not None:
            self._retry(job)

    def _retry(self, job: _Job) -> None:
        job.deaths += 1
        if self._stopping.is_set() or job.abandoned or job.deaths == MAX_DEATHS:
            _fail(job, "the process that handled the image died")
        else:
            self._queue.appendleft(job)


def _fail(job: _Job, reason: str) -> None:
    job.answer.set_exception(EngineDeadError(reason))
