"""The order in which image processors take jobs."""

from __future__ import annotations

import asyncio
from contextlib import closing
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from core.config import ImageConfig
from core.costs.image_costs import ImageWork
from core.failure import Failure
from core.handles import ArrayRef
from core.ipc.process import ChildProcess
from core.ipc.ring import Channel
from core.ipc.shared_array import Arena
from core.messages.image_processor import ComposeImage, JobFailed, PrepareImages, ToImageProcessor
from engine.images.image_jobs import Caller, ImageJob, JobQueue, upload_work
from engine.images.image_pool import ANYBODY, ImagePool
from engine.images.processor_handle import ProcessorHandle

_REF = ArrayRef(0, 0, (1,), "uint8")
UPLOAD = PrepareImages(
    job_id=0,
    image=_REF,
    mask=None,
    mask_kind="alpha",
    canvas_size=None,
    mask_margin=0,
    native_size=256,
    token_size=16,
    max_pixels=1,
    scratch=_REF,
)
RESULT = ComposeImage(
    job_id=0,
    pixels=_REF,
    image=_REF,
    mask=None,
    mask_kind="alpha",
    canvas_size=None,
    output_size=None,
    output_format="png",
    compression=100,
    base64=True,
    max_pixels=1,
    out=_REF,
)


async def make_job(message: ToImageProcessor, job_id: int, caller: Caller = ANYBODY, seconds: float = 0.1) -> ImageJob:
    answer = asyncio.get_running_loop().create_future()
    work = ImageWork("png" if isinstance(message, ComposeImage) else "prepare")
    return ImageJob(msgspec.structs.replace(message, job_id=job_id), answer, work, seconds, caller)


def anything(job: ImageJob) -> bool:
    return True


def drain(queue: JobQueue) -> list[int]:
    """Ids of the jobs in the order in which processors get them."""
    ids = []
    while (job := queue.next(anything)) is not None:
        queue.begin(job)
        queue.remove(job)
        ids.append(job.message.job_id)
    return ids


def test_the_work_of_an_upload_is_that_of_all_its_files() -> None:
    """As its edit predicted it, which learns from how long it takes."""
    file = ArrayRef(0, 0, (1_000_000,), "uint8")
    upload = msgspec.structs.replace(UPLOAD, image=file, mask=file, references=(file, file), controls=(file,))
    assert upload_work(upload) == ImageWork("prepare", 5.0)
    assert upload_work(msgspec.structs.replace(UPLOAD, image=None, canvas_size=(1000, 500))).features == (1.0, 0.0, 0.5)


async def test_an_answer_to_another_job_leaves_the_one_in_hand() -> None:
    """The pool ends then; a job that no processor had any more would never be answered."""
    with closing(Arena.create(0, 4096)) as arena:
        pool = ImagePool(ImageConfig(), arena)
    processor = ProcessorHandle(
        cast(ChildProcess, SimpleNamespace(name="p")), cast(Channel, None), await make_job(UPLOAD, 5)
    )
    with pytest.raises(RuntimeError, match="a job it does not have"):
        pool._take_answer(processor, JobFailed(job_id=6, failure=Failure("engine", "")))
    assert processor.job is not None


async def test_results_then_uploads_first_come_first_served() -> None:
    queue = JobQueue()
    for job_id, message in enumerate((UPLOAD, RESULT, UPLOAD, RESULT)):
        queue.push(await make_job(message, job_id))
    assert queue.num_waiting == 4
    assert drain(queue) == [1, 3, 0, 2]
    assert queue.next(anything) is None


async def test_jobs_of_one_owner_are_ordered_as_its_edits_are() -> None:
    queue = JobQueue()
    callers = [
        Caller("late", priority=1, arrival=1.0),
        Caller("first", arrival=2.0),
        Caller("second", arrival=3.0),
        Caller("due", arrival=4.0, due=9.0),
        Caller("high", priority=-1, arrival=5.0),
    ]
    for job_id, caller in enumerate(callers):
        queue.push(await make_job(UPLOAD, job_id, caller))
    assert drain(queue) == [4, 3, 1, 2, 0]


async def test_an_owner_with_many_long_jobs_does_not_starve_another() -> None:
    """Even in the same class, for both results and uploads."""
    queue = JobQueue()
    for job_id in range(30):
        queue.push(await make_job(RESULT, job_id, Caller(f"a{job_id}", "a", arrival=float(job_id)), seconds=1.0))
    job = queue.next(anything)
    assert job is not None
    queue.begin(job)
    queue.push(await make_job(UPLOAD, 100, Caller("b", "b", arrival=50.0)))
    queue.push(await make_job(RESULT, 101, Caller("c", "c", arrival=51.0)))
    queue.remove(job, took=1.0)
    order = drain(queue)
    assert set(order[:2]) == {100, 101}
    assert order[2:] == list(range(1, 30))


async def test_a_higher_class_of_another_owner_goes_first() -> None:
    queue = JobQueue()
    for job_id in range(10):
        queue.push(await make_job(RESULT, job_id, Caller(f"a{job_id}", "a"), seconds=1.0))
    for job_id in range(10, 20):
        queue.push(await make_job(UPLOAD, job_id, Caller(f"b{job_id}", "b", priority=-5), seconds=1.0))
    assert drain(queue) == [*range(10, 20), *range(10)]


async def test_a_job_that_may_not_begin_blocks_no_other() -> None:
    queue = JobQueue()
    for job_id in range(3):
        queue.push(await make_job(RESULT, job_id))
    job = queue.next(lambda job: job.message.job_id == 1)
    assert job is not None
    assert job.message.job_id == 1
    assert queue.next(lambda job: False) is None


async def test_a_job_that_comes_back_is_the_next_of_its_kind() -> None:
    queue = JobQueue()
    jobs = [await make_job(UPLOAD, 0), await make_job(UPLOAD, 1), await make_job(RESULT, 2)]
    queue.push(jobs[0])
    queue.begin(jobs[0])
    for job in jobs[1:]:
        queue.push(job)
    assert queue.num_waiting == 2
    queue.give_back(jobs[0])
    assert queue.num_waiting == 3
    assert drain(queue) == [2, 0, 1]


@pytest.mark.parametrize("message", [UPLOAD, RESULT])
async def test_a_job_can_be_taken_out_once(message: ToImageProcessor) -> None:
    queue = JobQueue()
    job = await make_job(message, 0)
    assert not queue.is_waiting(job)
    queue.push(job)
    assert queue.is_waiting(job)
    queue.remove(job)
    assert (queue.is_waiting(job), queue.num_waiting) == (False, 0)
    with pytest.raises(KeyError):
        queue.remove(job)
