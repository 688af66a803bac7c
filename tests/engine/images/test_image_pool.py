"""The image pool with its real processes: load, deaths, cancellation, shutdown.

A launcher of these tests forks them, since their imports take a third of a second of processor time each; where they
must leave with their parent, they are spawned.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import pytest
from forked_processes import fork_child, light_launcher
from PIL import Image

from core.config import ImageConfig
from core.costs.image_costs import ImageWork
from core.errors import (
    EngineDeadError,
    EngineError,
    InvalidImageError,
    InvalidRequestError,
    OutOfMemoryError,
    OverloadedError,
)
from core.handles import ArrayRef
from core.ipc.logs import request_context
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages.codec import MessageDecoder
from core.messages.image_processor import (
    CanvasScale,
    ComposedImage,
    ComposeImage,
    FromImageProcessor,
    PreparedImages,
    PrepareImages,
)
from engine.images import image_ops, image_pool, processor_handle
from engine.images.image_jobs import Caller, Room, upload_work
from engine.images.image_pool import ImagePool
from engine.images.image_processor import NICENESS, OOM_SCORE
from engine.images.result_budget import ResultBudget

NATIVE, TOKEN = 256, 16
Bytes = npt.NDArray[np.uint8]


class Desk:
    """A pool, and the memory of its jobs; all allocations are freed and checked at the end."""

    def __init__(self, pool: ImagePool, arena: Arena) -> None:
        self.pool = pool
        self.arena = arena
        self.allocator = ArenaAllocator(arena)

    def put(self, data: Bytes) -> ArrayRef:
        ref = self.allocator.alloc(data.size)
        self.arena.view(ref)[:] = data.reshape(-1)
        return ArrayRef(ref.arena, ref.offset, data.shape, "uint8")

    def prepare_job(self, image: Bytes, mask: Bytes | None = None) -> PrepareImages:
        return PrepareImages(
            job_id=0,
            image=self.put(image),
            mask=None if mask is None else self.put(mask),
            mask_kind="alpha",
            canvas_size=None,
            mask_margin=0,
            native_size=NATIVE,
            token_size=TOKEN,
            max_pixels=64_000_000,
            scratch=self.allocator.alloc(image_ops.scratch_bytes(NATIVE, TOKEN)),
        )

    def compose_job(self, image: Bytes, mask: Bytes | None, pixels: Bytes, room: int) -> ComposeImage:
        return ComposeImage(
            job_id=0,
            pixels=self.put(pixels),
            image=self.put(image),
            mask=None if mask is None else self.put(mask),
            mask_kind="alpha",
            canvas_size=None,
            output_size=None,
            output_format="png",
            compression=100,
            base64=True,
            max_pixels=64_000_000,
            out=self.allocator.alloc(room),
        )

    async def compose(self, job: ComposeImage) -> ComposedImage:
        return await self.pool.compose(job, ImageWork(job.output_format, 6.0, 6.0))

    def slow_job(self) -> ComposeImage:
        """A job that takes half a second or more."""
        room = image_ops.encoded_bytes(3000, 2000, 3, True)
        return self.compose_job(slow_image(), None, noise(16, 16, 3), room)


def noise(*shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def png(pixels: Bytes) -> Bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    return np.frombuffer(buffer.getvalue(), np.uint8)


@functools.cache
def slow_image() -> Bytes:
    return png(noise(2000, 3000, 3))


def png_of_zeros(width: int, height: int) -> Bytes:
    """A large picture in a small file."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG", compress_level=1)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def endless_jpeg() -> Bytes:
    """A progressive file of 4 megapixels whose last scan, a few bytes, is repeated 20,000 times: a minute or more."""
    buffer = io.BytesIO()
    Image.new("L", (2000, 2000), 90).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    last_scan, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return np.frombuffer(data[:end] + data[last_scan:end] * 20_000 + data[end:], np.uint8)


def processors(pool: ImagePool) -> list[psutil.Process]:
    return [psutil.Process(processor.child.pid) for processor in pool._processors]


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def anonymous_kilobytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("Anonymous:")[1].split()[0])


def oom_score_adjustment(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def until_running(pool: ImagePool, count: int) -> None:
    async with asyncio.timeout(10):
        while pool.num_running != count:
            await asyncio.sleep(0.005)


async def busy_processor(pool: ImagePool) -> psutil.Process:
    """The processor that has a job, after it has worked on it for a while."""
    await until_running(pool, 1)
    process = psutil.Process(next(processor.child.pid for processor in pool._processors if processor.job is not None))
    before = process.cpu_times().user
    async with asyncio.timeout(10):
        while process.cpu_times().user < before + 0.1:
            await asyncio.sleep(0.005)
    return process


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    with light_launcher("engine.images.image_processor") as launcher, pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_pool, "spawn", functools.partial(fork_child, launcher))
        yield


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(7, 1024**3)
    yield arena
    arena.close()


@asynccontextmanager
async def started_pool(arena: Arena, config: ImageConfig) -> AsyncIterator[Desk]:
    others = children()
    pool = ImagePool(config, arena)
    await pool.start()
    yield Desk(pool, arena)
    await pool.stop()
    assert children() <= others
    assert (pool.num_waiting, pool.num_running) == (0, 0)


@pytest.fixture
async def desk(arena: Arena) -> AsyncIterator[Desk]:
    async with started_pool(arena, ImageConfig(image_workers=2)) as desk:
        yield desk


async def test_an_edit_goes_there_and_back(desk: Desk) -> None:
    image = noise(131, 213, 3)
    keep = np.full((131, 213), 255, np.uint8)
    keep[40:80, 50:120] = 0
    mask = png(np.dstack([image, keep]))
    prepared = await desk.pool.prepare(desk.prepare_job(png(image), mask))
    assert (prepared.upload_width, prepared.upload_height) == (213, 131)
    assert (prepared.width, prepared.height) == (208, 128)
    template = desk.arena.view(prepared.template)
    expected = Image.fromarray(image).resize((208, 128), Image.Resampling.LANCZOS)
    assert np.array_equal(template, np.asarray(expected))
    assert prepared.content_id == image_ops.content_id(template)
    assert np.array_equal(desk.arena.view(prepared.mask), image_ops.model_mask(keep, (208, 128)))
    assert np.array_equal(desk.arena.view(prepared.active), image_ops.active_tokens(keep, (208, 128), TOKEN, 0))
    pixels = noise(128, 208, 3, seed=1)
    job = desk.compose_job(png(image), mask, pixels, image_ops.encoded_bytes(213, 131, 3, True))
    composed = await desk.compose(job)
    assert composed.encoded.offset == job.out.offset
    result = np.asarray(Image.open(io.BytesIO(base64.b64decode(desk.arena.view(composed.encoded).tobytes()))))
    assert np.array_equal(result[keep == 255], image[keep == 255])
    assert not np.array_equal(result[keep == 0], image[keep == 0])


async def test_both_passes_of_an_edit_are_prepared_in_one_job(desk: Desk) -> None:
    image = png(noise(200, 256, 3))
    mask = png(
        np.dstack(
            [noise(200, 256, 3), np.where(np.arange(256) < 90, 0, 255).astype(np.uint8) + np.zeros((200, 1), np.uint8)]
        )
    )
    scratch = desk.allocator.alloc(image_ops.scratch_bytes(NATIVE, TOKEN, num_canvases=2))
    job = msgspec.structs.replace(
        desk.prepare_job(image, mask), scales=(CanvasScale("first", 2.0, "hires_scale"),), scratch=scratch
    )
    prepared = await desk.pool.prepare(job)
    expected = image_ops.prepare(job, image, mask)
    small, small_arrays = prepared.canvases["first"], expected.canvases["first"]
    assert (prepared.width, prepared.height) == (256, 208)
    assert (small.width, small.height) == (128, 112)
    for refs, arrays in ((prepared, expected), (small, small_arrays)):
        for name in ("template", "mask", "active"):
            assert np.array_equal(desk.arena.view(getattr(refs, name)), getattr(arrays, name))


async def test_a_bad_upload_is_the_users_error_and_affects_no_other(desk: Desk) -> None:
    with pytest.raises(InvalidImageError) as caught:
        await desk.pool.prepare(desk.prepare_job(noise(1000)))
    assert (caught.value.param, caught.value.code) == ("image", "invalid_image_file")
    await desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3))))
    assert desk.pool.num_deaths == 0


async def test_jobs_and_answers_that_are_no_messages_fail_alone_and_end_no_process(desk: Desk) -> None:
    pids = {process.pid for process in processors(desk.pool)}
    good = desk.prepare_job(png(noise(16, 16, 3)))
    with pytest.raises(EngineError, match="a PrepareImages cannot be encoded"):
        await desk.pool.prepare(msgspec.structs.replace(good, canvas_size=(np.int64(64), 64)))
    with pytest.raises(EngineError, match="a message cannot be decoded"):
        await desk.pool.prepare(msgspec.structs.replace(good, canvas_size=(64.0, 64)))
    for processor in desk.pool._processors:
        processor.channel.send(b"nonsense")
    await asyncio.gather(*(desk.pool.prepare(good) for _ in range(4)))
    assert {process.pid for process in processors(desk.pool)} == pids
    assert desk.pool.num_deaths == 0


async def test_an_answer_that_cannot_be_read_fails_the_job_in_hand(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = image_pool.MessageDecoder.decode

    def garbled(decoder: MessageDecoder[FromImageProcessor], payload: bytes) -> FromImageProcessor:
        return whole(decoder, payload[:-1])

    good = desk.prepare_job(png(noise(16, 16, 3)))
    with monkeypatch.context() as patch:
        patch.setattr(image_pool.MessageDecoder, "decode", garbled)
        with pytest.raises(EngineError, match="a message cannot be decoded"):
            await desk.pool.prepare(good)
    await desk.pool.prepare(good)
    assert desk.pool.num_deaths == 0


async def test_costs_are_learnt_from_jobs_that_were_done(desk: Desk) -> None:
    work = upload_work(desk.prepare_job(noise(1000)))
    guess = desk.pool.costs.predict(work)
    with pytest.raises(InvalidImageError):
        await desk.pool.prepare(desk.prepare_job(noise(1000)))
    assert desk.pool.costs.predict(work) == guess
    await desk.pool.prepare(desk.prepare_job(png(noise(64, 64, 3))))
    assert desk.pool.costs.predict(work) != guess


async def test_a_region_too_small_is_an_engine_error_with_a_trace(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    job = desk.compose_job(png(noise(64, 64, 3)), None, noise(64, 64, 3), 1000)
    with caplog.at_level(logging.ERROR), pytest.raises(EngineError, match="does not fit"), request_context("req_1"):
        await desk.compose(job)
    assert "Traceback" in caplog.text
    assert vars(caplog.records[0])["request_id"] == "req_1"


async def test_fifty_jobs_at_once_each_get_their_own_answer(desk: Desk) -> None:
    images = [noise(32 + i, 48, 3, seed=i) for i in range(50)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(desk.pool.prepare(desk.prepare_job(png(image)))) for image in images]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert desk.pool.num_running == 2
        assert desk.pool.num_waiting == 48
    for image, task in zip(images, tasks, strict=True):
        prepared = task.result()
        assert (prepared.upload_width, prepared.upload_height) == (48, image.shape[0])
        size = (prepared.width, prepared.height)
        expected = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))
        assert np.array_equal(desk.arena.view(prepared.template), expected)


async def test_the_job_of_a_killed_processor_is_done_by_another(desk: Desk) -> None:
    before = processors(desk.pool)
    task = asyncio.create_task(desk.compose(desk.slow_job()))
    await until_running(desk.pool, 1)
    await asyncio.sleep(0.05)  # into its work, far from its end
    next(processor for processor in desk.pool._processors if processor.job is not None).child.kill()
    composed = await task
    assert (composed.width, composed.height) == (3000, 2000)
    assert desk.pool.num_deaths == 1
    await asyncio.gather(*(desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3)))) for _ in range(4)))
    after = processors(desk.pool)
    assert len(after) == 2
    assert len(set(before) & set(after)) == 1


async def test_a_job_that_takes_two_processors_with_it_is_given_up_and_others_go_on(desk: Desk) -> None:
    poison = asyncio.create_task(desk.compose(desk.slow_job()))
    victims: set[int] = set()
    while len(victims) < 2:
        await asyncio.sleep(0.05)
        for processor in desk.pool._processors:
            if processor.job is not None and processor.child.pid not in victims:
                victims.add(processor.child.pid)
                processor.child.kill()
    with pytest.raises(EngineDeadError, match="died"):
        await poison
    assert desk.pool.num_deaths == 2
    prepared = await asyncio.gather(*(desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3)))) for _ in range(4)))
    assert all(isinstance(answer, PreparedImages) for answer in prepared)


async def test_a_processor_killed_while_idle_costs_no_job(desk: Desk) -> None:
    await desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3))))
    for child in processors(desk.pool):
        child.kill()
    # Not one pass of the event loop lies between the deaths and the next job.
    await asyncio.gather(*(desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3)))) for _ in range(4)))
    assert len(processors(desk.pool)) == 2


async def test_when_no_processor_can_be_started_callers_get_an_error(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError("no process left")

    monkeypatch.setattr(image_pool, "spawn", no_room)
    for processor in desk.pool._processors:
        processor.child.kill()
    jobs = [desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3)))) for _ in range(3)]
    answers = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(answer, EngineDeadError) for answer in answers)
    monkeypatch.undo()
    await desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3))))


async def test_a_processor_that_is_stopped_in_its_work_is_replaced(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_handle, "STALL_SECONDS", 1.0)
    task = asyncio.create_task(desk.compose(desk.slow_job()))
    stopped = await busy_processor(desk.pool)
    stopped.suspend()
    composed = await asyncio.wait_for(task, 60)
    assert (composed.width, composed.height) == (3000, 2000)
    assert (desk.pool.num_deaths, desk.pool.num_retries) == (1, 1)
    assert not stopped.is_running()


async def test_a_processor_that_was_stopped_together_with_the_server_is_left_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_handle, "STALL_SECONDS", 2.0)
    task = asyncio.create_task(desk.compose(desk.slow_job()))
    stopped = await busy_processor(desk.pool)
    stopped.suspend()
    time.sleep(2.5)  # noqa: ASYNC251 - so does a server that is stopped
    await asyncio.sleep(0.1)  # whatever has become due meanwhile
    stopped.resume()
    await asyncio.wait_for(task, 60)
    assert desk.pool.num_deaths == 0


async def test_a_processor_that_works_for_long_is_left_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_handle, "STALL_SECONDS", 0.4)
    monkeypatch.setattr(processor_handle, "PROGRESS_SECONDS", 1e-6)  # of a machine that may be busy
    started = time.perf_counter()
    await desk.compose(desk.slow_job())
    assert time.perf_counter() - started > 0.3  # several looks
    assert desk.pool.num_deaths == 0


async def test_an_upload_that_takes_too_much_processor_time_is_refused_once(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_pool, "CPU_SECONDS", 0.5)
    async with started_pool(arena, ImageConfig(image_workers=1, max_pixels=64_000)) as desk:
        before = processors(desk.pool)
        with pytest.raises(InvalidRequestError, match="too long") as caught:
            await asyncio.wait_for(desk.pool.prepare(desk.prepare_job(endless_jpeg())), 20)
        assert caught.value.param == "image"
        assert (desk.pool.num_deaths, desk.pool.num_retries) == (1, 0)
        await desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3))))
        assert processors(desk.pool) != before


async def test_processor_time_is_counted_for_each_job_alone(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_pool, "CPU_SECONDS", 0.3)
    async with started_pool(arena, ImageConfig(image_workers=1, max_pixels=64_000)) as desk:
        used = 0.0
        while used < 1.0:
            await desk.pool.prepare(desk.prepare_job(png(noise(700, 700, 3))))
            used = sum(processors(desk.pool)[0].cpu_times()[:2])
        assert desk.pool.num_deaths == 0


async def test_a_job_that_needs_more_memory_than_allowed_fails_alone(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_pool, "MEMORY_BYTES", 256 * 1024**2)
    flat = png_of_zeros(8000, 8000)
    async with started_pool(arena, ImageConfig(image_workers=1, max_pixels=64_000)) as desk:
        with pytest.raises(OutOfMemoryError):
            await desk.pool.prepare(desk.prepare_job(flat))
        await desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3))))
        assert desk.pool.num_deaths == 0
    async with started_pool(arena, ImageConfig(image_workers=1, max_pixels=64_000_000)) as desk:
        prepared = await desk.pool.prepare(desk.prepare_job(flat))
        assert (prepared.upload_width, prepared.upload_height) == (8000, 8000)


async def test_processors_run_at_lower_priority_than_other_processes(desk: Desk) -> None:
    await asyncio.gather(*(desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3)))) for _ in range(4)))
    for child in processors(desk.pool):
        assert child.nice() == min(19, psutil.Process().nice() + NICENESS)
        assert oom_score_adjustment(child.pid) == int(OOM_SCORE)


async def test_results_go_before_uploads(arena: Arena) -> None:
    async with started_pool(arena, ImageConfig(image_workers=1)) as desk:
        order: list[str] = []

        async def do(name: str, work: Coroutine[None, None, object]) -> None:
            await work
            order.append(name)

        small, pixels = png(noise(16, 16, 3)), noise(16, 16, 3)
        async with asyncio.TaskGroup() as group:
            group.create_task(do("running", desk.compose(desk.slow_job())))
            await until_running(desk.pool, 1)
            for name in ("upload 1", "upload 2", "upload 3"):
                group.create_task(do(name, desk.pool.prepare(desk.prepare_job(small))))
            for name in ("result 1", "result 2"):
                group.create_task(do(name, desk.compose(desk.compose_job(small, None, pixels, 1_000_000))))
        assert order == ["running", "result 1", "result 2", "upload 1", "upload 2", "upload 3"]


async def test_a_cancelled_caller_returns_when_no_processor_writes_to_its_memory(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = desk.slow_job()
    monkeypatch.setattr(image_pool, "CANCEL_SECONDS", 60.0)
    task = asyncio.create_task(desk.compose(job))
    await until_running(desk.pool, 1)
    for _ in range(3):  # however often
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert desk.pool.num_running == 0
    out = desk.arena.view(job.out)
    assert out[:1000].any()  # it was done to its end
    out[:1000] = 0
    await asyncio.sleep(0.2)
    assert not out[:1000].any()


async def test_a_cancelled_caller_does_not_wait_for_a_long_job(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_pool, "CANCEL_SECONDS", 0.1)
    job = desk.slow_job()
    task = asyncio.create_task(desk.compose(job))
    dismissed = await busy_processor(desk.pool)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not dismissed.is_running()  # so it cannot write to the memory any more
    await asyncio.gather(*(desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3)))) for _ in range(4)))
    assert len(processors(desk.pool)) == 2
    assert (desk.pool.num_deaths, desk.pool.num_retries) == (0, 0)  # it was asked to


async def test_a_cancelled_caller_in_the_queue_leaves_at_once(desk: Desk) -> None:
    running = [asyncio.create_task(desk.compose(desk.slow_job())) for _ in range(2)]
    await until_running(desk.pool, 2)
    queued = asyncio.create_task(desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3)))))
    await asyncio.sleep(0)
    assert desk.pool.num_waiting == 1
    queued.cancel()
    started = time.perf_counter()
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert time.perf_counter() - started < 0.1
    assert desk.pool.num_waiting == 0
    await asyncio.gather(*running)


async def test_an_abandoned_job_is_not_tried_again(desk: Desk) -> None:
    task = asyncio.create_task(desk.compose(desk.slow_job()))
    await until_running(desk.pool, 1)
    task.cancel()
    await asyncio.sleep(0.05)
    os.kill(desk.pool._processors[0].child.pid, signal.SIGKILL)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(desk.pool._processors) == 1


async def test_stop_ends_jobs_and_processes(arena: Arena) -> None:
    pool = ImagePool(ImageConfig(image_workers=2), arena)
    await pool.start()
    desk = Desk(pool, arena)
    jobs = [asyncio.create_task(desk.compose(desk.slow_job())) for _ in range(3)]
    await until_running(pool, 2)
    processes = processors(pool)
    started = time.perf_counter()
    await pool.stop()
    assert time.perf_counter() - started < image_pool.STOP_SECONDS + 2
    assert not any(process.is_running() for process in processes)
    answers = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(answer, EngineDeadError) for answer in answers)
    with pytest.raises(EngineDeadError):
        await pool.prepare(desk.prepare_job(png(noise(16, 16, 3))))
    await pool.stop()


async def test_processors_ignore_the_signals_of_their_group(desk: Desk) -> None:
    await asyncio.gather(*(desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3)))) for _ in range(8)))
    for child in processors(desk.pool):
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
    await asyncio.gather(*(desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3)))) for _ in range(4)))
    assert desk.pool.num_deaths == 0


async def test_the_event_loop_goes_on_while_processors_work(desk: Desk) -> None:
    jobs = [asyncio.create_task(desk.compose(desk.slow_job())) for _ in range(2)]
    await until_running(desk.pool, 2)
    worst = 0.0
    cpu = time.thread_time()
    while not all(job.done() for job in jobs):
        before = time.thread_time()
        await asyncio.sleep(0.005)
        worst = max(worst, time.thread_time() - before)
    assert worst < 0.01  # of this thread's own time: the machine may be busy
    assert time.thread_time() - cpu < 0.5


async def test_processors_stay_light_and_idle(desk: Desk) -> None:
    await asyncio.gather(*(desk.compose(desk.slow_job()) for _ in range(4)))
    before = [sum(child.cpu_times()[:2]) for child in processors(desk.pool)]
    await asyncio.sleep(0.5)
    assert [sum(child.cpu_times()[:2]) for child in processors(desk.pool)] == before
    for child in processors(desk.pool):
        assert child.num_threads() <= 3
        assert anonymous_kilobytes(child.pid) < 80 * 1024, "decoded pixels are still held"


async def test_a_processor_leaves_with_its_parent() -> None:
    code = (
        "import asyncio, os\n"
        "from core.config import ImageConfig\nfrom core.ipc.shared_array import Arena\n"
        "from engine.images.image_pool import ImagePool\n"
        "async def main():\n"
        "    pool = ImagePool(ImageConfig(image_workers=2), Arena.create(1, 4096))\n"
        "    await pool.start()\n"
        "    print(*(p.child.pid for p in pool._processors), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(5):
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    await asyncio.sleep(0.02)


# ------------------------------------------------------------------------------------------------------------- owners


def room_for(desk: Desk, nbytes: int) -> Room:
    return Room(nbytes, lambda: desk.allocator.alloc(nbytes))


def of(owner: str, number: int = 0) -> Caller:
    return Caller(f"{owner}{number}", owner, arrival=float(number))


async def test_a_short_job_of_another_owner_does_not_wait_for_long_ones(desk: Desk) -> None:
    """Both processors are busy for half a second, with ten more such jobs queued; a third one is started for it."""
    long, small = ImageWork("png", 40.0, 40.0), png(noise(16, 16, 3))
    job = desk.slow_job()
    flood = [asyncio.create_task(desk.pool.compose(job, long, of("a", number))) for number in range(12)]
    try:
        await until_running(desk.pool, 2)
        assert len(desk.pool._processors) == 3
        for _ in range(4):
            await desk.pool.prepare(desk.prepare_job(small), of("b"))
        assert sum(task.done() for task in flood) <= 6
        flood.append(asyncio.create_task(desk.pool.prepare(desk.prepare_job(small), of("a", 0))))
        await asyncio.sleep(0.02)
        assert desk.pool.num_running == 2, "an owner that has processors does not get one more"
    finally:
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_the_pool_stops_in_the_middle_of_long_jobs(desk: Desk) -> None:
    job, long = desk.slow_job(), ImageWork("png", 40.0, 40.0)
    jobs = [asyncio.create_task(desk.pool.compose(job, long, of("a", number))) for number in range(3)]
    await until_running(desk.pool, 2)
    await asyncio.wait_for(desk.pool.stop(), image_pool.STOP_SECONDS + 5)
    answers = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(answer, EngineDeadError) for answer in answers)


async def test_without_keys_there_is_no_processor_beyond_those_asked_for(desk: Desk) -> None:
    long = ImageWork("png", 40.0, 40.0)
    jobs = [asyncio.create_task(desk.pool.compose(desk.slow_job(), long)) for _ in range(3)]
    await until_running(desk.pool, 2)
    assert len(desk.pool._processors) == 2
    await asyncio.gather(*jobs)


async def test_a_result_waits_for_room_and_another_owners_does_not(desk: Desk) -> None:
    desk.pool.results = ResultBudget(2_000_000, 1_000_000)
    image, pixels, work = png(noise(64, 64, 3)), noise(64, 64, 3), ImageWork("png", 0.004, 0.004)
    job = desk.compose_job(image, None, pixels, 1)
    compose = functools.partial(desk.pool.compose, job, work)
    first = await compose(of("a", 0), room_for(desk, 900_000))
    assert desk.pool.results.used_bytes == first.encoded.size, "what it really takes"
    desk.pool.results.take("a0", 900_000)
    second = asyncio.create_task(compose(of("a", 1), room_for(desk, 900_000)))
    await compose(of("b", 2), room_for(desk, 900_000))
    await compose(of("a", 0), room_for(desk, 900_000))
    assert (second.done(), desk.pool.num_waiting, desk.pool.num_running) == (False, 1, 0)
    desk.pool.forget("a0")
    await asyncio.wait_for(second, 10)
    for edit_id in ("a1", "b2", "never seen"):
        desk.pool.forget(edit_id)
    assert desk.pool.results.used_bytes == 0


async def test_without_memory_for_a_result_its_caller_gets_an_error(desk: Desk) -> None:
    def refuse() -> ArrayRef:
        raise OverloadedError("No shared memory is left for this edit.", retry_after=1.0)

    job = desk.compose_job(png(noise(64, 64, 3)), None, noise(64, 64, 3), 1)
    with pytest.raises(OverloadedError, match="No shared memory"):
        await desk.pool.compose(job, ImageWork("png"), of("a"), Room(1000, refuse))
    assert (desk.pool.num_waiting, desk.pool.num_running) == (0, 0)
    await desk.pool.prepare(desk.prepare_job(png(noise(16, 16, 3))))
