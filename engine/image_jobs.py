"""Jobs for the image processors, and whose turn it is. Knows nothing of processes."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from core.ipc.logs import current_request
from core.messages.image_processor import ComposedImage, ComposeImage, PreparedEdit, ToImageProcessor

MEAN_OVER = 8
"""Jobs that a mean time is taken over, more or less."""


@dataclass(eq=False, slots=True)
class ImageJob:
    message: ToImageProcessor
    answer: asyncio.Future[PreparedEdit | ComposedImage]
    request_id: str = field(default_factory=current_request)  # whose it is, for the log
    deaths: int = 0  # processors that died with it in hand
    is_abandoned: bool = False  # its caller was cancelled: not worth a second try

    def fail(self, error: Exception) -> None:
        """Answer its caller with `error`."""
        self.answer.set_exception(error)


@dataclass(slots=True)
class JobTimes:
    """Seconds that a processor takes of late, for an upload and for a result; 0 before the first."""

    prepare: float = 0.0
    compose: float = 0.0

    def of(self, message: ToImageProcessor) -> float:
        """What such a job takes."""
        return self.compose if isinstance(message, ComposeImage) else self.prepare

    def observe(self, message: ToImageProcessor, seconds: float) -> None:
        """A job has taken so long, without its wait."""
        if isinstance(message, ComposeImage):
            self.compose = _mean(self.compose, seconds)
        else:
            self.prepare = _mean(self.prepare, seconds)


def _mean(before: float, seconds: float) -> float:
    return before + (seconds - before) / MEAN_OVER if before else seconds


class JobQueue:
    """Jobs that wait. Results go before uploads, each first come first served.

    A result is the last of its request's work, and frees its memory; behind a burst of uploads, a finished edit would
    wait for all of them. Uploads are not starved: a result comes from an upload that had its turn.
    """

    def __init__(self) -> None:
        self._results: deque[ImageJob] = deque()
        self._uploads: deque[ImageJob] = deque()

    def __len__(self) -> int:
        return len(self._results) + len(self._uploads)

    def __contains__(self, job: ImageJob) -> bool:
        return job in self._line(job)

    def seconds(self, times: JobTimes) -> float:
        """How long one processor will take for all of them."""
        return len(self._results) * times.compose + len(self._uploads) * times.prepare

    def push(self, job: ImageJob) -> None:
        """Line up."""
        self._line(job).append(job)

    def push_first(self, job: ImageJob) -> None:
        """Go back to the head of its line: a job that had its turn, through no fault of its own, in vain."""
        self._line(job).appendleft(job)

    def pop(self) -> ImageJob:
        """The next one. Raises IndexError when there is none."""
        return (self._results or self._uploads).popleft()

    def remove(self, job: ImageJob) -> None:
        """Raises ValueError when it does not wait."""
        self._line(job).remove(job)

    def _line(self, job: ImageJob) -> deque[ImageJob]:
        return self._results if isinstance(job.message, ComposeImage) else self._uploads
