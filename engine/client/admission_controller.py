"""AdmissionController: whether a request is let in: by its places in the queue, and by its predicted time.

It looks at an edit's time twice: before the upload is touched, when an edit counts as the smallest of the recent ones,
and once its mask is known. The rule is core's (core/routing/admission.py); here are the facts that it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace

from core.config import StencilConfig
from core.costs.image_backlog import ImageBacklog, Share
from core.costs.prediction_margin import PredictionMargin
from core.errors import DeadlineExceededError, EngineDeadError, InvalidRequestError, OverloadedError
from core.routing.admission import Outlook, RefusedFor, Terms, Verdict, judge
from core.routing.fleet import EditShape
from core.routing.queue_places import Newcomer
from engine.client.edit_types import EditInput
from engine.client.image_work import ImageSeconds
from engine.client.running_sessions import RunningSessions
from engine.client.session import Session
from engine.client.upload_place import UploadPlace
from engine.images.image_jobs import Caller
from engine.observability.metrics import Metrics
from engine.router.router import Router

RECENT_EDITS = 32
"""Edits whose size a newcomer's is guessed from."""

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
"""Bounds of the retry-after of a refusal; clients of the OpenAI SDK ignore more than 120 s."""


@dataclass(frozen=True, slots=True)
class EditWork:
    """What an edit asks of the server. shape: of one image, for the engines. share: what its image work adds to the
    backlog.
    """

    shape: EditShape
    num_images: int
    images: ImageSeconds
    share: Share


class AdmissionController:
    """What all edits share: the queue's places, the objective, how far predictions are off, who is being prepared, and
    the image work that is left of all.
    """

    def __init__(self, config: StencilConfig, sessions: RunningSessions, router: Router, metrics: Metrics) -> None:
        self.slo_seconds = config.slo_seconds
        self.margin = PredictionMargin()
        self.preparing: dict[Hashable, float] = {}  # ticket -> seconds of the engines' time that it will take
        self.sizes: deque[tuple[int, int]] = deque(maxlen=RECENT_EDITS)  # (image tokens, active tokens) of late
        self.image_backlog = ImageBacklog()
        self._max_queue = config.max_queue
        self._image_workers = config.image.image_workers
        self._sessions = sessions
        self._router = router
        self._metrics = metrics
        self._highest_class = 0  # of all requests so far, that of the default at least

    # ---------------------------------------------------------------------------------- places in the queue

    def check_queue(self, session: Session) -> None:
        """Whether the queue has a place for each image of a session, all or none; waiting sessions of lower classes, or
        of owners that hold more places, make room.

        Raises EngineDeadError, InvalidRequestError for more images than the queue ever takes, OverloadedError.
        """
        if self._router.error is not None:
            raise EngineDeadError(str(self._router.error))
        self._highest_class = min(self._highest_class, session.priority)
        if session.num_images > self._max_queue:
            message = f"Invalid 'n': {session.num_images} images; this server takes at most {self._max_queue}, "
            raise InvalidRequestError(message + "as many as its queue holds (--max-queue).", param="n")
        num_missing = self._sessions.num_admitted + session.num_images - self._max_queue
        if num_missing > 0 and not self._sessions.make_room(session, num_missing):
            raise self._queue_full()

    def check_upload(self, owner: str, uploads: Collection[UploadPlace]) -> None:
        """Whether one more body, of this owner, may be read while `uploads` are; those of owners that hold more places
        are refused for it. Raises OverloadedError when the queue would be full even if all of them were of the highest
        class seen so far.
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
        """Seconds after which a refused client is likely to find room: the predicted time to drain what is here."""
        return _bounded_retry(max(self._router.drain_seconds, self.drain_seconds))

    # ---------------------------------------------------------------------------------- predicted time

    def caller(self, edit_id: str, edit: EditInput, arrival: float) -> Caller:
        """Whose an edit's image jobs are, and when they are due."""
        limits = [seconds for seconds in (edit.sampling.timeout, self.slo_seconds) if seconds]
        due = arrival + min(limits) if limits else None
        return Caller(edit_id, edit.owner, edit.sampling.priority, arrival, due)

    def check_upload_time(self, work: EditWork, terms: Terms) -> None:
        """Whether to let in an edit whose images have yet to be prepared. Raises as `check_edit_time`."""
        ahead = self._router.outlook(work.shape)
        if ahead is not None:
            engines = max(work.images.prepare + ahead.alone, ahead.seconds + sum(self.preparing.values()))
            self._judge(self._outlook(work, replace(ahead, seconds=engines)), terms)

    def check_edit_time(self, work: EditWork, terms: Terms) -> tuple[Outlook | None, Verdict]:
        """Whether to let in an edit that is prepared; what is predicted of it, None while nobody knows. Raises
        OverloadedError, and DeadlineExceededError where even an idle server would miss its timeout.
        """
        ahead = self._router.outlook(work.shape)
        if ahead is None:
            return None, Verdict()
        outlook = self._outlook(work, ahead)
        return outlook, self._judge(outlook, terms)

    def _judge(self, outlook: Outlook, terms: Terms) -> Verdict:
        verdict = judge(outlook, terms, self.margin)
        if verdict.refused:
            raise self._refuse(verdict.refused, outlook, verdict)
        return verdict

    def _outlook(self, work: EditWork, engines: Outlook) -> Outlook:
        """engines: until they are done with its first picture. Files are made while others are computed: what takes
        longer counts.
        """
        done = engines.seconds + (work.num_images - 1) * self.work_seconds(work.shape) + work.images.compose
        alone = work.images.prepare + engines.alone + work.images.composes
        wait = self.image_backlog.before(work.share) / self._image_workers
        is_idle = engines.is_idle and not self.preparing and not self.image_backlog
        return Outlook(max(done, wait + alone), alone, is_idle)

    @property
    def drain_seconds(self) -> float:
        """Predicted time until all image work is done."""
        return self.image_backlog.seconds / self._image_workers

    def work_seconds(self, shape: EditShape) -> float:
        """How much later the engines are done for one image."""
        return self._router.work_seconds(shape)

    def _refuse(
        self, reason: RefusedFor, outlook: Outlook, verdict: Verdict
    ) -> OverloadedError | DeadlineExceededError:
        """Count it, and say why."""
        self._metrics.observe_rejected("slo" if reason == "slo" else "timeout")
        if reason == "hopeless":
            return DeadlineExceededError(
                f"The request's timeout is too short: this edit is predicted to take {outlook.alone:.3g} s when the "
                "server is idle."
            )
        what = "its timeout" if reason == "timeout" else "the server's latency objective"
        message = (
            f"The server is too busy: this edit is predicted to take {outlook.seconds:.3g} s, which misses {what}."
        )
        return OverloadedError(message, retry_after=_bounded_retry(verdict.retry_after))


def _bounded_retry(seconds: float) -> float:
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))
