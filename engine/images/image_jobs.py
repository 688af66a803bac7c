"""Jobs for the image processors, and whose turn it is. Knows nothing of processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from core.config import PATIENCE_SECONDS
from core.costs.image_backlog import Share
from core.costs.image_costs import ImageWork
from core.handles import ArrayRef
from core.ipc.logs import current_request
from core.messages.image_processor import ComposedImage, ComposeImage, PreparedImages, PrepareImages, ToImageProcessor
from core.scheduling.fair_queue import Claim, FairQueue, counts_as_due


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose a job is and how urgent: as of the edit or template that it is for. arrival, due: seconds of
    CLOCK_MONOTONIC.
    """

    edit_id: str = ""
    owner: str = ""
    priority: int = 0
    arrival: float = 0.0
    due: float | None = None

    @property
    def counts_as_due(self) -> float:
        """See `core.scheduling.fair_queue`."""
        return counts_as_due(self.arrival, self.due, self.priority)

    def share(self, seconds: float) -> Share:
        """Its entry in the backlog, with so much left."""
        return Share(self.owner, self.priority, self.counts_as_due, seconds)


@dataclass(frozen=True, slots=True)
class Room:
    """Shared memory for a result, taken when its turn comes. nbytes: of what `take` returns."""

    nbytes: int
    take: Callable[[], ArrayRef]


@dataclass(eq=False, slots=True)
class ImageJob:
    """work: its size. seconds: what it is predicted to take."""

    message: ToImageProcessor
    answer: asyncio.Future[PreparedImages | ComposedImage]
    work: ImageWork
    seconds: float = 0.0
    caller: Caller = field(default_factory=Caller)
    room: Room | None = None  # None: none is needed, or it was taken
    held: int = 0  # bytes of the room that was taken
    request_id: str = field(default_factory=current_request)  # whose it is, for the log
    deaths: int = 0  # processors that died with it in hand
    is_abandoned: bool = False  # its caller was cancelled: not worth a second try

    @property
    def is_result(self) -> bool:
        return isinstance(self.message, ComposeImage)

    def fail(self, error: Exception) -> None:
        """Answer its caller with `error`."""
        self.answer.set_exception(error)


class JobQueue:
    """Jobs from `push` until `remove`: those that wait, and those that processors have.

    Owners share the processors' time fairly (`FairQueue`), and among one owner's jobs the order is that of the
    edits, but that results go before uploads of the same class that came less than PATIENCE_SECONDS before. A result is
    the last of its request's work, and frees its memory; behind a burst of uploads, a finished edit would wait for all
    of them.
    """

    def __init__(self) -> None:
        self._queue: FairQueue[ImageJob] = FairQueue()
        self._claims: dict[ImageJob, Claim[ImageJob]] = {}
        self._numbers = count()

    @property
    def num_waiting(self) -> int:
        return sum(not claim.has_begun for claim in self._claims.values())

    def push(self, job: ImageJob) -> None:
        """Line up."""
        caller = job.caller
        due = caller.counts_as_due - (PATIENCE_SECONDS if job.is_result else 0.0)
        urgency = due, caller.arrival, f"{next(self._numbers):020}"
        claim = self._claims[job] = Claim(job, caller.owner, caller.priority, urgency, job.seconds)
        self._queue.add(claim)

    def next(self, may_begin: Callable[[ImageJob], bool]) -> ImageJob | None:
        """The first one that waits and may begin."""
        waiting = (job for job in self._queue.in_order() if not self._claims[job].has_begun)
        return next(filter(may_begin, waiting), None)

    def begin(self, job: ImageJob) -> None:
        """A processor has it."""
        self._queue.begin(self._claims[job])

    def give_back(self, job: ImageJob) -> None:
        """Its processor died: it waits again, where it would be had it not begun."""
        self._queue.give_back(self._claims[job])

    def remove(self, job: ImageJob, took: float | None = None) -> None:
        """It is answered, after so many seconds if it was done, or nobody wants it. Raises KeyError when it is not
        here.
        """
        self._queue.remove(self._claims.pop(job), took)

    def is_waiting(self, job: ImageJob) -> bool:
        return job in self._claims and not self._claims[job].has_begun


def upload_work(message: PrepareImages) -> ImageWork:
    """The size of the work on an upload."""
    nbytes = sum(ref.size for ref in (message.image, message.mask) if ref is not None)
    width, height = message.canvas_size or (0, 0)
    return ImageWork("prepare", nbytes / 1e6, width * height / 1e6)
