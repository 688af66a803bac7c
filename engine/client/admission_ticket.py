"""AdmissionTicket: one edit's way through admission, from its arrival to what the server learns from its end."""

from __future__ import annotations

import time
from dataclasses import replace

from core.routing.admission import Terms
from core.routing.fleet import RequestShape
from engine.client.admission_controller import AdmissionController, EditWork
from engine.client.image_work import ImageSeconds
from engine.images.image_jobs import Caller


class AdmissionTicket:
    """One edit's way through the door: look_at_upload, look_at_edit, finished or missed; leave at any time.

    deadline: when its own timeout ends, None = never. objective: when its pictures are to be finished, None = whenever;
    known after look_at_edit. Both absolute. caller: whose the edit is.
    """

    def __init__(self, admission: AdmissionController, caller: Caller, timeout: float | None, num_images: int) -> None:
        self.deadline = None if timeout is None else caller.arrival + timeout
        self.objective: float | None = None
        self._goal = caller.arrival + admission.slo_seconds if admission.slo_seconds else None
        self._controller = admission
        self._num_images = num_images
        self._caller = caller
        self._compose_seconds = 0.0  # of one file
        self._foretold: tuple[float, float] | None = None  # when it was let in, and the seconds then predicted
        self._allowed = 0.0  # seconds that these were taken to be with the margin

    def look_at_upload(self, shape: RequestShape, images: ImageSeconds) -> None:
        """Before its images are prepared: the sizes in `shape` are replaced by the smallest of late.

        Raises OverloadedError, DeadlineExceededError.
        """
        share = self._caller.share(images.prepare + images.composes)
        if self._is_bound and self._controller.sizes:
            shape = _guess(shape, *min(self._controller.sizes))
            work = EditWork(shape, self._num_images, images, share)
            self._controller.check_upload_time(work, self._terms())
            self._controller.preparing[self] = self._num_images * self._controller.work_seconds(shape)
        self._controller.image_backlog.set(self._caller.edit_id, share)

    def look_at_edit(self, shape: RequestShape, images: ImageSeconds) -> None:
        """Once it is prepared. Raises OverloadedError, DeadlineExceededError."""
        self.leave()
        self._controller.sizes.append((shape.image_tokens, shape.active_tokens))
        self._compose_seconds = images.compose
        share = self._caller.share(images.composes)
        if self._is_bound:
            work = EditWork(shape, self._num_images, images, share)
            outlook, verdict = self._controller.check_edit_time(work, self._terms())
            if verdict.has_objective:
                self.objective = self._goal
            if outlook is not None:
                self._foretold = time.monotonic(), outlook.seconds
                self._allowed = outlook.seconds * self._controller.margin.high
        self._controller.image_backlog.set(self._caller.edit_id, share)

    def note_image_work(self, seconds: float) -> None:
        """So much of its image work is left."""
        self._controller.image_backlog.set(self._caller.edit_id, self._caller.share(seconds))

    @property
    def worker_objective(self) -> float | None:
        """When a worker is to be done with it, so that its file is made in time."""
        return None if self.objective is None else self.objective - self._compose_seconds

    def finished(self, ended: float) -> None:
        """Workers were done with its last picture at `ended`: learn how far off the prediction was."""
        self._learn(ended + self._compose_seconds)

    def missed(self) -> None:
        """It is given up, since it would be too late: it would have taken all the time that it had. Where that is less
        than was allowed for, since an idle server lets in on doubt, it says nothing: the real time is not known.
        """
        if self._foretold is None:
            return
        ends = [end for end in (self.deadline, self.objective) if end is not None]
        end = max(time.monotonic(), min(ends, default=0.0))
        if end >= self._foretold[0] + self._allowed:
            self._learn(end)

    def _learn(self, end: float) -> None:
        if self._foretold is not None:
            start, predicted = self._foretold
            self._controller.margin.observe(predicted, end - start)

    def is_met(self, ended: float) -> bool | None:
        """Whether a picture that workers were done with at `ended` met the server's objective; None where there is
        none. Its file counts as made in the time that this takes on average: the real one waits for the reader.
        """
        return None if self._goal is None else ended + self._compose_seconds <= self._goal

    def leave(self) -> None:
        """It is not being prepared any more, or given up."""
        self._controller.preparing.pop(self, None)
        self._controller.image_backlog.drop(self._caller.edit_id)

    @property
    def _is_bound(self) -> bool:
        return self.deadline is not None or self._goal is not None

    def _terms(self) -> Terms:
        now = time.monotonic()
        timeout, slo = (None if end is None else end - now for end in (self.deadline, self._goal))
        return Terms(timeout, slo)


def _guess(shape: RequestShape, image_tokens: int, active_tokens: int) -> RequestShape:
    is_exact = shape.full_steps == shape.num_steps
    return replace(shape, image_tokens=image_tokens, active_tokens=image_tokens if is_exact else active_tokens)
