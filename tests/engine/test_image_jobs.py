"""Whose turn it is at the image processors."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from core.handles import ArrayRef
from core.messages.image_processor import ComposeImage, PrepareEdit, ToImageProcessor
from engine.image_jobs import ImageJob, JobQueue

_REF = ArrayRef(0, 0, (1,), "uint8")
UPLOAD = PrepareEdit(
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


async def make_job(message: ToImageProcessor, job_id: int) -> ImageJob:
    return ImageJob(msgspec.structs.replace(message, job_id=job_id), asyncio.get_running_loop().create_future())


def drain(queue: JobQueue) -> list[int]:
    return [queue.pop().message.job_id for _ in range(len(queue))]


async def test_results_then_uploads_first_come_first_served() -> None:
    queue = JobQueue()
    for job_id, message in enumerate((UPLOAD, RESULT, UPLOAD, RESULT)):
        queue.push(await make_job(message, job_id))
    assert len(queue) == 4
    assert drain(queue) == [1, 3, 0, 2]
    with pytest.raises(IndexError):
        queue.pop()


async def test_a_job_that_comes_back_is_the_next_of_its_kind() -> None:
    queue = JobQueue()
    jobs = [await make_job(UPLOAD, 0), await make_job(UPLOAD, 1), await make_job(RESULT, 2)]
    for job in jobs[1:]:
        queue.push(job)
    queue.push_first(jobs[0])
    assert drain(queue) == [2, 0, 1]


@pytest.mark.parametrize("message", [UPLOAD, RESULT])
async def test_a_job_can_be_taken_out_once(message: ToImageProcessor) -> None:
    queue = JobQueue()
    job = await make_job(message, 0)
    assert job not in queue
    queue.push(job)
    assert job in queue
    queue.remove(job)
    assert (job in queue, len(queue)) == (False, 0)
    with pytest.raises(ValueError, match="not in deque"):
        queue.remove(job)
