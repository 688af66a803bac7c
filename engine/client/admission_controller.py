"""AdmissionController: whether an edit is let in, given how long it is predicted to take. Owned by one AsyncEngine.

It looks twice: before the upload is touched, when an edit counts as the smallest of late, and once its mask is known.
The rule is core's (admission.py); here are the facts that it needs.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from core.costs.image_backlog import ImageBacklog, Share
from core.errors import DeadlineExceededError, OverloadedError
from core.routing.admission import Outlook, PredictionMargin, RefusedFor, Terms, Verdict, judge
from core.routing.fleet import EditShape
from engine.client.edit_types import EditInput
from engine.images.image_jobs import Caller

if TYPE_CHECKING:
    from engine.client.async_engine import AsyncEngine

RECENT_EDITS = 32
"""Edits whose size a newcomer's is guessed from."""


@dataclass(frozen=True, slots=True)
class ImageSeconds:
    """Predicted time of one image processor for an edit. prepare: its upload. compose: one file of its. composes: all
    its files, one after the other.
    """

    prepare: float
    compose: float
    composes: float


class AdmissionController:
    """What all edits share: the objective, how far predictions are off, who is being prepared, and the image work that
    is left of all.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.slo_seconds = engine.config.slo_seconds
        self.margin = PredictionMargin()
        self.preparing: dict[AdmissionTicket, float] = {}  # -> seconds of the engines' time that it will take
        self.sizes: deque[tuple[int, int]] = deque(maxlen=RECENT_EDITS)  # (image tokens, active tokens) of late
        self.image_backlog = ImageBacklog()
        self._engine = engine

    def caller(self, edit_id: str, edit: EditInput, arrival: float) -> Caller:
        """Whose an edit's image jobs are, and when they are due."""
        limits = [seconds for seconds in (edit.sampling.timeout, self.slo_seconds) if seconds]
        due = arrival + min(limits) if limits else None
        return Caller(edit_id, edit.owner, edit.sampling.priority, arrival, due)

    def outlook_of_upload(
        self, shape: EditShape, num_images: int, images: ImageSeconds, share: Share
    ) -> Outlook | None:
        """What is predicted of an edit whose images have yet to be prepared; None while nobody knows. share: what it
        will add to the image backlog.
        """
        ahead = self._engine.router.outlook(shape)
        if ahead is None:
            return None
        engines = max(images.prepare + ahead.alone, ahead.seconds + sum(self.preparing.values()))
        return self._outlook(shape, num_images, images, share, replace(ahead, seconds=engines))

    def outlook_of_edit(self, shape: EditShape, num_images: int, images: ImageSeconds, share: Share) -> Outlook | None:
        """Likewise, of one that is prepared."""
        ahead = self._engine.router.outlook(shape)
        return None if ahead is None else self._outlook(shape, num_images, images, share, ahead)

    def _outlook(
        self, shape: EditShape, num_images: int, images: ImageSeconds, share: Share, engines: Outlook
    ) -> Outlook:
        """engines: until they are done with its first picture. Files are made while others are computed: what takes
        longer counts.
        """
        done = engines.seconds + (num_images - 1) * self.work_seconds(shape) + images.compose
        alone = images.prepare + engines.alone + images.composes
        wait = self.image_backlog.before(share) / self._engine.config.image.image_workers
        is_idle = engines.is_idle and not self.preparing and not self.image_backlog
        return Outlook(max(done, wait + alone), alone, is_idle)

    @property
    def drain_seconds(self) -> float:
        """Predicted time until all image work is done."""
        return self.image_backlog.seconds / self._engine.config.image.image_workers

    def work_seconds(self, shape: EditShape) -> float:
        """How much later the engines are done for one image."""
        return self._engine.router.work_seconds(shape)

    def refuse(self, reason: RefusedFor, outlook: Outlook, verdict: Verdict) -> OverloadedError | DeadlineExceededError:
        """Count it, and say why."""
        self._engine.metrics.observe_rejected("slo" if reason == "slo" else "timeout")
        if reason == "hopeless":
            return DeadlineExceededError(
                f"The request's timeout is too short: this edit is predicted to take {outlook.alone:.3g} s when the "
                "server is idle."
            )
        what = "its timeout" if reason == "timeout" else "the server's latency objective"
        message = (
            f"The server is too busy: this edit is predicted to take {outlook.seconds:.3g} s, which misses {what}."
        )
        return OverloadedError(message, retry_after=self._engine.bounded_retry(verdict.retry_after))


class AdmissionTicket:
    """One edit's way through the door: look_at_upload, look_at_edit, finished or missed; leave at any time.

    deadline: when its own timeout ends, None = never. objective: when its pictures are to be finished, None = whenever;
    known after look_at_edit. Both absolute. caller: whose the edit is.
    """

    def __init__(
        self, door: AdmissionController, arrival: float, timeout: float | None, num_images: int, caller: Caller
    ) -> None:
        self.deadline = None if timeout is None else arrival + timeout
        self.objective: float | None = None
        self._goal = arrival + door.slo_seconds if door.slo_seconds else None
        self._door = door
        self._num_images = num_images
        self._caller = caller
        self._compose_seconds = 0.0  # of one file
        self._foretold: tuple[float, float] | None = None  # when it was let in, and the seconds then predicted
        self._allowed = 0.0  # seconds that these were taken to be with the margin

    def look_at_upload(self, shape: EditShape, images: ImageSeconds) -> None:
        """Before its images are prepared: the sizes in `shape` are replaced by the smallest of late.

        Raises OverloadedError, DeadlineExceededError.
        """
        share = self._caller.share(images.prepare + images.composes)
        if self._is_bound and self._door.sizes:
            shape = _guess(shape, *min(self._door.sizes))
            self._judge(self._door.outlook_of_upload(shape, self._num_images, images, share))
            self._door.preparing[self] = self._num_images * self._door.work_seconds(shape)
        self._door.image_backlog.set(self._caller.edit_id, share)

    def look_at_edit(self, shape: EditShape, images: ImageSeconds) -> None:
        """Once it is prepared. Raises OverloadedError, DeadlineExceededError."""
        self.leave()
        self._door.sizes.append((shape.image_tokens, shape.active_tokens))
        self._compose_seconds = images.compose
        share = self._caller.share(images.composes)
        if self._is_bound:
            outlook = self._door.outlook_of_edit(shape, self._num_images, images, share)
            if self._judge(outlook).has_objective:
                self.objective = self._goal
            if outlook is not None:
                self._foretold = time.monotonic(), outlook.seconds
                self._allowed = outlook.seconds * self._door.margin.high
        self._door.image_backlog.set(self._caller.edit_id, share)

    def note_image_work(self, seconds: float) -> None:
        """So much of its image work is left."""
        self._door.image_backlog.set(self._caller.edit_id, self._caller.share(seconds))

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
            self._door.margin.observe(predicted, end - start)

    def is_met(self, ended: float) -> bool | None:
        """Whether a picture that workers were done with at `ended` met the server's objective; None where there is
        none. Its file counts as made in the time that this takes on average: the real one waits for the reader.
        """
        return None if self._goal is None else ended + self._compose_seconds <= self._goal

    def leave(self) -> None:
        """It is not being prepared any more, or given up."""
        self._door.preparing.pop(self, None)
        self._door.image_backlog.drop(self._caller.edit_id)

    @property
    def _is_bound(self) -> bool:
        return self.deadline is not None or self._goal is not None

    def _judge(self, outlook: Outlook | None) -> Verdict:
        if outlook is None:
            return Verdict()
        verdict = judge(outlook, self._terms(), self._door.margin)
        if verdict.refused:
            raise self._door.refuse(verdict.refused, outlook, verdict)
        return verdict

    def _terms(self) -> Terms:
        now = time.monotonic()
        timeout, slo = (None if end is None else end - now for end in (self.deadline, self._goal))
        return Terms(timeout, slo)


def _guess(shape: EditShape, image_tokens: int, active_tokens: int) -> EditShape:
    is_exact = shape.full_steps == shape.num_steps
    return replace(shape, image_tokens=image_tokens, active_tokens=image_tokens if is_exact else active_tokens)
