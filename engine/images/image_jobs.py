"""JobQueue: the jobs for the image processors and their order. ImagePool owns it and assigns the jobs to processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from core.config import PATIENCE_SECONDS
from core.costs.image_backlog import BacklogShare
from core.costs.image_costs import ImageWork
from core.handles import ArrayRef
from core.ipc.logs import current_request
from core.messages.image_processor import (
    ComposedImage,
    ComposeImage,
    PreparedImages,
    PrepareImages,
    ReadPicture,
    ReadPixels,
    ToImageProcessor,
)
from core.scheduling.requests.fair_queue import Claim, FairQueue, counts_as_due


@dataclass(frozen=True, slots=True)
class Caller:
    """The edit or template that a job is for; decides the job's order. arrival, due: seconds of CLOCK_MONOTONIC."""

    edit_id: str = ""
    owner: str = ""
    priority: int = 0
    arrival: float = 0.0
    due: float | None = None

    @property
    def counts_as_due(self) -> float:
        """See `core.scheduling.requests.fair_queue`."""
        return counts_as_due(self.arrival, self.due, self.priority)

    def share(self, seconds: float) -> BacklogShare:
        """Its entry in the image backlog. seconds: image work left."""
        return BacklogShare(self.owner, self.priority, self.counts_as_due, seconds)


@dataclass(frozen=True, slots=True)
class Room:
    """Shared memory for a result, allocated by `take` when the job's turn comes. nbytes: its size."""

    nbytes: int
    take: Callable[[], ArrayRef]


Answer = PreparedImages | ReadPixels | ComposedImage
"""What a job that succeeds is answered with."""


@dataclass(eq=False, slots=True)
class ImageJob:
    """One job, from submission to its answer. work: its size. seconds: its predicted time."""

    message: ToImageProcessor
    answer: asyncio.Future[Answer]
    work: ImageWork
    seconds: float = 0.0
    caller: Caller = field(default_factory=Caller)
    room: Room | None = None  # None: not needed, or already taken
    held: int = 0  # bytes of the room after it was taken
    request_id: str = field(default_factory=current_request)  # for log lines
    deaths: int = 0  # processors that died while they had it
    is_abandoned: bool = False  # its caller was cancelled, so it is not retried

    @property
    def is_result(self) -> bool:
        return isinstance(self.message, ComposeImage)

    def fail(self, error: Exception) -> None:
        """Raise `error` in its caller."""
        self.answer.set_exception(error)


class JobQueue:
    """Holds jobs from `push` until `remove`: those that wait, and those that a processor has.

    Owners share the processors' time fairly (`FairQueue`). One owner's jobs are in the order of its edits, except that
    results go before uploads of the same class that arrived up to PATIENCE_SECONDS earlier: a result ends its request
    and frees memory, and should not wait for a burst of uploads.
    """

    def __init__(self) -> None:
        self._queue: FairQueue[ImageJob] = FairQueue()
        self._claims: dict[ImageJob, Claim[ImageJob]] = {}
        self._numbers = count()

    @property
    def num_waiting(self) -> int:
        return sum(not claim.has_begun for claim in self._claims.values())

    def push(self, job: ImageJob) -> None:
        """Enqueue a job."""
        caller = job.caller
        due = caller.counts_as_due - (PATIENCE_SECONDS if job.is_result else 0.0)
        urgency = due, caller.arrival, f"{next(self._numbers):020}"
        claim = self._claims[job] = Claim(job, caller.owner, caller.priority, urgency, job.seconds)
        self._queue.add(claim)

    def next(self, may_begin: Callable[[ImageJob], bool]) -> ImageJob | None:
        """The first waiting job for which `may_begin` is true; None if there is none."""
        waiting = (job for job in self._queue.in_order() if not self._claims[job].has_begun)
        return next(filter(may_begin, waiting), None)

    def begin(self, job: ImageJob) -> None:
        """Note that a processor has the job."""
        self._queue.begin(self._claims[job])

    def give_back(self, job: ImageJob) -> None:
        """Undo `begin` after its processor died; the job waits again at its former place."""
        self._queue.give_back(self._claims[job])

    def remove(self, job: ImageJob, took: float | None = None) -> None:
        """Remove a job that is answered or abandoned. took: seconds that it took, if it was done. Raises KeyError if it
        is not in the queue.
        """
        self._queue.remove(self._claims.pop(job), took)

    def is_waiting(self, job: ImageJob) -> bool:
        return job in self._claims and not self._claims[job].has_begun


def upload_work(message: PrepareImages | ReadPicture) -> ImageWork:
    """The size of the work of a job that decodes uploads."""
    if isinstance(message, ReadPicture):
        return ImageWork("prepare", message.file.size / 1e6)
    files = message.image, message.mask, *message.references, *message.controls
    nbytes = sum(ref.size for ref in files if ref is not None)
    width, height = message.canvas_size or (0, 0)
    return ImageWork("prepare", nbytes / 1e6, width * height / 1e6)
