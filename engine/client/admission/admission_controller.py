"""AdmissionController: admits requests in the API server, or refuses those that have no queue place or no chance.

An edit's time is checked twice: before its upload is decoded, when the edit is assumed to be as small as the smallest
recent one, and once its mask is known. The rule is in core/routing/admission.py; this class gathers the facts for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

from core.config import StencilConfig
from core.costs.image_backlog import BacklogShare, ImageBacklog
from core.costs.prediction_margin import PredictionMargin, UsualDelay
from core.errors import DeadlineExceededError, EngineDeadError, InvalidRequestError, OverloadedError
from core.routing.admission import Outlook, Terms, Verdict, judge
from core.routing.queue_places import Newcomer
from core.routing.request_shape import RequestShape
from engine.client.edit_types import EditInput
from engine.client.sessions.image_work import ImageSeconds
from engine.client.sessions.running_sessions import RunningSessions
from engine.client.sessions.session import Session
from engine.client.sessions.upload_place import UploadPlace
from engine.images.image_jobs import Caller
from engine.observability.metrics import Metrics
from engine.router.router import Router

RECENT_EDITS = 32
"""Number of edits from which the size of a new one is estimated."""

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
"""Bounds of a refusal's retry-after; the OpenAI SDK ignores values above 120 s."""


@dataclass(frozen=True, slots=True)
class EditWork:
    """The work of one edit. shape: what the engines compute for one image. share: the image work that it adds to the
    backlog.
    """

    shape: RequestShape
    num_images: int
    images: ImageSeconds
    share: BacklogShare


class AdmissionController:
    """Admission state of all requests: the latency objective, the error of predictions, the edits in preparation, and
    the image work left. Edits report to it, most of it through their AdmissionTickets. Queue places are counted by
    RunningSessions.
    """

    def __init__(self, config: StencilConfig, sessions: RunningSessions, router: Router, metrics: Metrics) -> None:
        self.slo_seconds = config.slo_seconds
        self._margin = PredictionMargin()
        self._delivery = UsualDelay()  # of files after the workers' end, beyond an image processor's time for them
        self._preparing = set[str]()  # ids of edits in preparation
        self._sizes: deque[tuple[int, int]] = deque(maxlen=RECENT_EDITS)  # (image, active tokens) of recent edits
        self._image_backlog = ImageBacklog()
        self._max_queue = config.max_queue
        self._image_workers = config.image.image_workers
        self._sessions = sessions
        self._router = router
        self._metrics = metrics
        self._highest_class = 0  # most urgent priority of all requests so far; 0 is the default's

    # ---------------------------------------------------------------------------------- places in the queue

    def check_queue(self, session: Session) -> None:
        """Check that the queue has a place for each image of a session; sessions of lower classes, or of owners that
        hold more places, are displaced.

        Raises EngineDeadError, InvalidRequestError for more images than the whole queue holds, OverloadedError.
        """
        if self._router.engines.error is not None:
            raise EngineDeadError(str(self._router.engines.error))
        self._highest_class = min(self._highest_class, session.priority)
        if session.num_images > self._max_queue:
            message = f"Invalid 'n': {session.num_images} images; this server takes at most {self._max_queue}, "
            raise InvalidRequestError(message + "as many as its queue holds (--max-queue).", param="n")
        num_missing = self._sessions.num_admitted + session.num_images - self._max_queue
        if num_missing > 0 and not self._sessions.make_room(session, num_missing):
            raise self._queue_full()

    def check_upload(self, owner: str, uploads: Collection[UploadPlace]) -> None:
        """Check whether one more body, of this owner, may be read while `uploads` are; those of owners that hold more
        places are refused for it. Raises OverloadedError if the queue would be full even with all of them of the
        highest class seen so far.
        """
        num_missing = self._sessions.num_admitted + len(uploads) + 1 - self._max_queue
        if num_missing <= 0:
            return
        newcomer = Newcomer(owner, 1, self._highest_class)
        leaving = self._sessions.uploads_leaving_for(newcomer, num_missing, uploads)
        if leaving is None:
            raise self._queue_full()
        for upload in leaving:
            upload.refuse(self._queue_full(" A request of another API key, which holds fewer places, goes first."))

    def _queue_full(self, why: str = "") -> OverloadedError:
        self._metrics.observe_rejected("queue_full")
        return OverloadedError(f"The queue is full.{why}", retry_after=self.retry_after())

    def retry_after(self) -> float:
        """Retry-after in seconds: the predicted time until the present work is done, within the bounds above."""
        return _bounded_retry(max(self._router.drain_seconds, self.drain_seconds))

    # ---------------------------------------------------------------------------------- predicted time

    def caller(self, edit_id: str, edit: EditInput, arrival: float) -> Caller:
        """The Caller of an edit's image jobs. arrival: seconds of CLOCK_MONOTONIC."""
        limits = [seconds for seconds in (edit.sampling.timeout, self.slo_seconds) if seconds]
        due = arrival + min(limits) if limits else None
        return Caller(edit_id, edit.owner, edit.sampling.priority, arrival, due)

    def admit_upload(self, edit_id: str, work: EditWork, terms: Terms) -> None:
        """Check the predicted time of an edit whose images are not prepared yet, as if it were the smallest of the
        recent ones, and count it as in preparation until `forget`. Raises as `admit_edit`.
        """
        if self._sizes and _has_limit(terms):
            guessed = replace(work, shape=_resized(work.shape, *min(self._sizes)))
            ahead = self._router.outlook(guessed.shape)
            if ahead is not None:
                self._judge(self._outlook(guessed, ahead), terms)
            self._preparing.add(edit_id)
        self._image_backlog.set(edit_id, work.share)

    def admit_edit(self, edit_id: str, work: EditWork, terms: Terms) -> tuple[Outlook | None, Verdict]:
        """Check the predicted time of a prepared edit, and count the image work that is left of it. Returns the
        prediction, None if there is none or no limit, and the verdict. Raises DeadlineExceededError if even an idle
        server would miss its timeout.
        """
        self.forget(edit_id)
        self._sizes.append((work.shape.image_tokens, work.shape.active_tokens))
        outlook, verdict = None, Verdict()
        ahead = self._router.outlook(work.shape) if _has_limit(terms) else None
        if ahead is not None:
            outlook = self._outlook(work, ahead)
            verdict = self._judge(outlook, terms)
        self._image_backlog.set(edit_id, work.share)
        return outlook, verdict

    def _judge(self, outlook: Outlook, terms: Terms) -> Verdict:
        verdict = judge(outlook, terms, self._margin)
        if verdict.is_hopeless:
            self._metrics.observe_rejected("timeout")
            raise DeadlineExceededError(
                f"The request's timeout is too short: this edit is predicted to take {outlook.alone:.3g} s when the "
                "server is idle."
            )
        return verdict

    def _outlook(self, work: EditWork, engines: Outlook) -> Outlook:
        """engines: the prediction for its first picture. Image work and engines run in parallel, so the slower of the
        two counts.
        """
        done = engines.seconds + (work.num_images - 1) * self._router.work_seconds(work.shape) + work.images.compose
        alone = work.images.prepare + engines.alone + work.images.composes
        wait = self._image_backlog.before(work.share) / self._image_workers
        is_idle = engines.is_idle and not self._preparing and not self._image_backlog
        return Outlook(max(done, wait + alone), alone, is_idle, engines.starts_load)

    @property
    def drain_seconds(self) -> float:
        """Predicted seconds until all image work is done."""
        return self._image_backlog.seconds / self._image_workers

    def with_margin(self, seconds: float) -> float:
        """The time that most edits with this predicted time take at most."""
        return seconds * self._margin.high

    def usual_delay(self, now: float) -> float:
        """Seconds that files take on their way beyond their predicted time, as seen at `now`."""
        return self._delivery.seconds(now)

    # ---------------------------------------------------------------------------------- what edits report

    def set_image_work(self, caller: Caller, seconds: float) -> None:
        """Set how many seconds of an edit's image work are left."""
        self._image_backlog.set(caller.edit_id, caller.share(seconds))

    def note_delivery(self, predicted: float, actual: float, now: float) -> None:
        """Learn from a file that was made so many seconds after the workers had finished."""
        self._delivery.observe(predicted, actual, now)

    def note_time(self, predicted: float, actual: float) -> None:
        """Learn from an edit's predicted and actual time, in seconds."""
        self._margin.observe(predicted, actual)

    def forget(self, edit_id: str) -> None:
        """Count an edit no longer as in preparation, and none of its image work."""
        self._preparing.discard(edit_id)
        self._image_backlog.drop(edit_id)


def _bounded_retry(seconds: float) -> float:
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))


def _resized(shape: RequestShape, image_tokens: int, active_tokens: int) -> RequestShape:
    """The shape with these tokens; an exact edit computes all of them."""
    is_exact = shape.full_steps == shape.num_steps
    loops = tuple(loop._replace(image_tokens=image_tokens) if loop.is_final else loop for loop in shape.loops)
    active_tokens = image_tokens if is_exact else active_tokens
    return replace(shape, image_tokens=image_tokens, active_tokens=active_tokens, loops=loops)


def _has_limit(terms: Terms) -> bool:
    return terms.timeout is not None or terms.slo is not None
