"""AdmissionTicket: one edit's state in admission, from arrival to comparing its prediction with its actual time."""

from __future__ import annotations

import time

from core.routing.admission import Terms
from core.routing.request_shape import RequestShape
from engine.client.admission.admission_controller import AdmissionController, EditWork
from engine.client.sessions.image_work import ImageSeconds
from engine.images.image_jobs import Caller

MOST_DELAY = 0.25
"""Share of the time that an edit has for the way of its picture to its file, at most."""


class AdmissionTicket:
    """Called by EditSession: look_at_upload, look_at_edit, note_delivered for each final file, then finished or missed.

    deadline: end of its own timeout, None = none. objective: when its pictures should be finished, None = no limit; set
    by look_at_edit. Both are seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, admission: AdmissionController, caller: Caller, timeout: float | None, num_images: int) -> None:
        self.deadline = None if timeout is None else caller.arrival + timeout
        self.objective: float | None = None
        self._goal = caller.arrival + admission.slo_seconds if admission.slo_seconds else None
        self._controller = admission
        self._num_images = num_images
        self._caller = caller
        self._compose_seconds = 0.0  # of one file
        self._prediction: tuple[float, float] | None = None  # time of admission, and the seconds predicted then
        self._allowed = 0.0  # these seconds with the margin

    def look_at_upload(self, shape: RequestShape, images: ImageSeconds) -> None:
        """First check, before its images are prepared; the sizes in `shape` are not known yet. Raises
        DeadlineExceededError.
        """
        terms, share = self._terms(), self._caller.share(images.prepare + images.composes)
        work = EditWork(shape, self._num_images, images, share)
        self._controller.admit_upload(self._caller.edit_id, work, terms)

    def look_at_edit(self, shape: RequestShape, images: ImageSeconds) -> None:
        """Second check, once it is prepared. Raises DeadlineExceededError."""
        self._compose_seconds = images.compose
        terms, share = self._terms(), self._caller.share(images.composes)
        work = EditWork(shape, self._num_images, images, share)
        outlook, verdict = self._controller.admit_edit(self._caller.edit_id, work, terms)
        if verdict.has_objective:
            self.objective = self._goal
        if outlook is not None:
            self._prediction = time.monotonic(), outlook.seconds
            self._allowed = self._controller.with_margin(outlook.seconds)

    @property
    def worker_deadline(self) -> float | None:
        """The latest time for a worker to finish before its timeout, so that there is time left to deliver the file."""
        return None if self.deadline is None else self.deadline - self._delivery_seconds(self.deadline)

    @property
    def worker_objective(self) -> float | None:
        """The latest time for a worker to finish before its objective, likewise."""
        return None if self.objective is None else self.objective - self._delivery_seconds(self.objective)

    def _delivery_seconds(self, end: float) -> float:
        """What pictures wait for on their way, and files for an image processor or it for a core, counts as a share of
        the time until `end` at most: else a backlog of files that has long gone could leave none for the next edits.
        """
        most = MOST_DELAY * (end - self._caller.arrival)
        return self._compose_seconds + min(most, self._controller.usual_delay(time.monotonic()))

    def note_delivered(self, seconds: float) -> None:
        """Learn from a file that was made so long after the workers had finished."""
        self._controller.note_delivery(self._compose_seconds, seconds, time.monotonic())

    def finished(self, ended: float) -> None:
        """Learn from an edit whose last picture the workers finished at `ended`."""
        self._learn(ended + self._compose_seconds)

    def missed(self) -> None:
        """Learn from an edit that was given up for lateness: it took at least all the time it had. Nothing is learnt if
        that is less than the prediction with its margin (an idle server admits such edits): the real time is unknown.
        """
        if self._prediction is None:
            return
        ends = [end for end in (self.deadline, self.objective) if end is not None]
        end = max(time.monotonic(), min(ends, default=0.0))
        if end >= self._prediction[0] + self._allowed:
            self._learn(end)

    def _learn(self, end: float) -> None:
        if self._prediction is not None:
            start, predicted = self._prediction
            self._controller.note_time(predicted, end - start)

    def is_met(self, ended: float) -> bool | None:
        """Whether a picture that workers finished at `ended` met the server's objective; None if the server has none.
        Its encoding counts with the predicted time: the actual one includes waiting for a slow reader.
        """
        return None if self._goal is None else ended + self._compose_seconds <= self._goal

    def _terms(self) -> Terms:
        now = time.monotonic()
        timeout, slo = (None if end is None else end - now for end in (self.deadline, self._goal))
        return Terms(timeout, slo)
