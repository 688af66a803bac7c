"""AdmissionController: whether an edit is let in, given how long it is predicted to take. Owned by one AsyncEngine.

It looks twice: before the upload is touched, when an edit counts as the smallest of late, and once its mask is known.
The rule is core's (admission.py); here are the facts that it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

from core.costs.image_backlog import ImageBacklog, Share
from core.costs.prediction_margin import PredictionMargin
from core.errors import DeadlineExceededError, OverloadedError
from core.routing.admission import Outlook, RefusedFor, Verdict
from core.routing.fleet import EditShape
from engine.client.edit_types import EditInput
from engine.client.image_seconds import ImageSeconds
from engine.images.image_jobs import Caller

if TYPE_CHECKING:
    from engine.client.async_engine import AsyncEngine

RECENT_EDITS = 32
"""Edits whose size a newcomer's is guessed from."""


class AdmissionController:
    """What all edits share: the objective, how far predictions are off, who is being prepared, and the image work that
    is left of all.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.slo_seconds = engine.config.slo_seconds
        self.margin = PredictionMargin()
        self.preparing: dict[Hashable, float] = {}  # ticket -> seconds of the engines' time that it will take
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
