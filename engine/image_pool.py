"""The image processors as seen from the API server: one actor that queues jobs, runs them and survives their deaths.

It owns the processes and the queue, and knows nothing of pixels. A job is answered exactly once. When its caller has an
answer or an exception, cancellation included, no processor touches the job's memory any more: the caller may free it.

What a job may take is bounded: processor time and memory by the kernel (see ImageProcessorConfig), a standstill by
STALL_SECONDS, a cancelled one by CANCEL_SECONDS. How many may wait is not decided here: the AsyncEngine admits edits,
and each has one job at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from dataclasses import dataclass

import msgspec

from core.config import ImageConfig
from core.errors import EngineDeadError, EngineError, InvalidRequestError, MessageError
from core.failure import Failure
from core.ipc.logs import of_request
from core.ipc.process import ChildProcess, spawn
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import Arena
from core.messages.codec import MessageDecoder, encode
from core.messages.image_processor import (
    ComposedImage,
    ComposeImage,
    FromImageProcessor,
    JobFailed,
    PreparedEdit,
    PrepareEdit,
    ToImageProcessor,
)
from engine.image_jobs import ImageJob, JobQueue, JobTimes
from engine.image_processor import ImageProcessorConfig

logger = logging.getLogger("stencil.images")

STALL_SECONDS = 5.0
"""A processor with a job that uses no processor time for so long hangs, and is killed. A working one that gets little
of a full machine is not: at its niceness it still gets 1 % of a core beside ten busy processes. It is counted
in two halves: where this process was itself stopped, with all its children, the first one is over at once."""
PROGRESS_SECONDS = 0.001
"""Processor time that counts as some."""
CPU_SECONDS, CPU_SECONDS_PER_PIXEL = 10.0, 1e-6
"""Processor time that one job may take, by the most pixels a file may have. 64 megapixels: 15 s at worst (decoded from
WebP, encoded to lossless WebP) of the 77 allowed."""
MEMORY_BYTES, MEMORY_BYTES_PER_PIXEL = 768 * 1024**2, 40
"""Memory of one processor, likewise: 28 bytes a pixel were the most that a job took. The first part is for results that
are larger than any upload may be."""
CANCEL_SECONDS = 1.0
"""A cancelled caller waits no longer for its processor, which is killed then: a new one takes 0.3 s to start."""
STOP_SECONDS = 1.0
"""How long a processor may take to leave when its channel is closed; it has nothing to clean up."""
MAX_DEATHS = 2
"""How many processors a job may take with it before it is given up."""


@dataclass(eq=False, slots=True)
class _Processor:
    child: ChildProcess
    channel: Channel
    job: ImageJob | None = None  # what it works on now
    stall: asyncio.TimerHandle | None = None  # the next look at whether it moves
    cpu_seconds: float = 0.0  # used at the last look
    is_standing: bool = False  # it had used none since the look before
    began: float = 0.0  # when it took its job
    is_dismissed: bool = False  # killed because nobody wants its job's result any more

    def take(self, job: ImageJob) -> None:
        """Send it a job. Raises PeerClosedError when it is gone, and MessageError for a job that cannot be encoded."""
        self.channel.send(encode(job.message))
        self.job = job
        self.cpu_seconds, self.is_standing = self._read_cpu_seconds(), False
        self.began = time.monotonic()
        self._look_later()

    def drop_job(self) -> ImageJob | None:
        """It is done with its job, one way or another."""
        job, self.job = self.job, None
        if self.stall is not None:
            self.stall.cancel()
        return job

    def dismiss(self) -> None:
        """Kill it in the middle of a job that nobody wants any more."""
        self.is_dismissed = True
        self.child.kill()

    @property
    def log_extra(self) -> dict[str, str]:
        """A line about it is one about the request that it works for; tasks and timers run in anybody's context."""
        return of_request(self.job.request_id if self.job else "")

    def _look_later(self) -> None:
        self.stall = asyncio.get_running_loop().call_later(STALL_SECONDS / 2, self._look)

    def _look(self) -> None:
        """Kill it if it stands still: stopped, or stuck in the kernel."""
        before, self.cpu_seconds = self.cpu_seconds, self._read_cpu_seconds()
        was_standing, self.is_standing = self.is_standing, self.cpu_seconds - before < PROGRESS_SECONDS
        if was_standing and self.is_standing:
            extra = self.log_extra
            logger.error("%s (pid %d) stands still and is killed", self.child.name, self.child.pid, extra=extra)
            self.child.kill()
        else:
            self._look_later()

    def _read_cpu_seconds(self) -> float:
        """Processor time it has used so far; 0 when it is gone, as its channel is about to say."""
        clock = ~self.child.pid << 3 | 2  # clock_getcpuclockid(3), which Python has for threads only
        with contextlib.suppress(OSError):
            return time.clock_gettime(clock)
        return 0.0


class ImagePool:
    """`config.image_workers` processes, one job in flight each; whose turn it is, the JobQueue knows.

    A processor that dies is replaced when the next job needs one; its job is tried once more, then fails with
    EngineDeadError, so that one poisonous upload cannot keep all of them down. One that used up its processor time is
    not tried again: InvalidRequestError for an upload, EngineError for a result.
    """

    def __init__(self, config: ImageConfig, arena: Arena) -> None:
        """arena: where all handles in jobs point to; it stays the caller's."""
        self.num_deaths = 0  # processors that ended unasked, since start
        self.num_retries = 0  # jobs tried again after such a death, since start
        self.times = JobTimes()
        self._config = config
        self._arena = arena
        self._queue = JobQueue()
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

    @property
    def wait_seconds(self) -> float:
        """Predicted time until a new upload has its turn."""
        running = sum(self.times.of(processor.job.message) for processor in self._processors if processor.job) / 2
        return (self._queue.seconds(self.times) + running) / self._config.image_workers

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
        job = ImageJob(message, asyncio.get_running_loop().create_future())
        self._queue.push(job)
        self._dispatch()
        try:
            await asyncio.wait([job.answer])
        except asyncio.CancelledError:
            await self._abandon(job)
            raise
        return job.answer.result()

    async def _abandon(self, job: ImageJob) -> None:
        """Take a cancelled caller's job off the queue, or wait until no processor works on it."""
        job.is_abandoned = True
        if job in self._queue:
            self._queue.remove(job)
            return
        patience = asyncio.get_running_loop().call_later(CANCEL_SECONDS, self._dismiss, job)
        while not job.answer.done():
            with contextlib.suppress(asyncio.CancelledError):  # again: the memory is still in use
                await asyncio.wait([job.answer])
        patience.cancel()
        job.answer.exception()  # seen, though by nobody

    def _dismiss(self, job: ImageJob) -> None:
        for processor in self._processors:
            if processor.job is job:
                processor.dismiss()

    def _dispatch(self) -> None:
        """Hand queued jobs to idle processors, replacing dead ones first."""
        while self._queue and not self._stopping.is_set() and (processor := self._idle_processor()) is not None:
            job = self._queue.pop()
            try:
                processor.take(job)
            except MessageError as error:
                job.fail(error)
            except PeerClosedError:  # it died idle, which is not the job's fault; its task will notice, too
                self._processors.remove(processor)
                self._queue.push_first(job)

    def _fail_queue(self, reason: str) -> None:
        while self._queue:
            self._queue.pop().fail(EngineDeadError(reason))

    def _idle_processor(self) -> _Processor | None:
        for processor in self._processors:
            if processor.job is None and not processor.is_dismissed:
                return processor
        if len(self._processors) == self._config.image_workers:
            return None
        try:
            return self._start_processor()
        except OSError as error:
            logger.error("cannot replace an image processor: %s", error, extra=of_request(""))
            if not self._processors:  # else one of them comes back for the queue
                self._fail_queue("no image processor can be started")
            return None

    def _take_answer(self, processor: _Processor, answer: FromImageProcessor) -> None:
        job = processor.drop_job()
        if job is None or job.message.job_id != answer.job_id:
            raise RuntimeError(f"{processor.child.name} answered a job it does not have: {answer}")
        match answer:
            case PreparedEdit() | ComposedImage():
                self.times.observe(job.message, time.monotonic() - processor.began)
                job.answer.set_result(answer)
            case JobFailed(failure=failure):
                if failure.detail:
                    extra = of_request(job.request_id)
                    logger.error("an image job failed: %s\n%s", failure.message, failure.detail, extra=extra)
                job.answer.set_exception(failure.to_error())

    # ------------------------------------------------------------------------------------------------- processors

    def _start_processor(self) -> _Processor:
        """Takes a few milliseconds; the process itself needs a few hundred until it takes its first job."""
        assert self._tasks is not None
        channel, channel_fds = Channel.create()
        config = msgspec.msgpack.encode(_limits(self._arena.id, self._config.max_pixels))
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
        decoder: MessageDecoder[FromImageProcessor] = MessageDecoder(FromImageProcessor)
        try:
            async for payload in processor.channel.messages():
                if (answer := _read_answer(decoder, payload, processor)) is not None:
                    self._take_answer(processor, answer)
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
        if not self._stopping.is_set() and not processor.is_dismissed:
            self.num_deaths += 1
            logger.error("an image processor died: %s", processor.child.describe_exit(), extra=processor.log_extra)
        if (job := processor.drop_job()) is not None:
            self._settle(job, has_run_out=processor.child.returncode == -signal.SIGPROF)

    def _settle(self, job: ImageJob, *, has_run_out: bool) -> None:
        """Decide on a job whose processor is dead. has_run_out: the kernel ended it, for using up its time."""
        job.deaths += 1
        if has_run_out:
            job.fail(_out_of_time(job))
        elif self._stopping.is_set() or job.is_abandoned or job.deaths == MAX_DEATHS:
            job.fail(EngineDeadError("the process that handled the image died"))
        else:
            self.num_retries += 1
            self._queue.push_first(job)


def _read_answer(
    decoder: MessageDecoder[FromImageProcessor], payload: bytes, processor: _Processor
) -> FromImageProcessor | None:
    """An answer that cannot be decoded is a failure of the one job that its processor has, if it has one."""
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
    if isinstance(job.message, PrepareEdit):
        message = "Invalid 'image' or mask: it takes too long to decode; save it anew, with fewer pixels."
        return InvalidRequestError(message, param="image", code="image_too_large")
    return EngineError("the result takes too long to encode")
