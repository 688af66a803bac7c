"""Door: whether an edit is let in, given how long it is predicted to take. Owned by one AsyncEngine.

It looks twice: before the upload is touched, when an edit counts as the smallest of late, and once its mask is known.
The rule is core's (admission.py); here are the facts that it needs.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from core.admission import Margin, Outlook, RefusedFor, Terms, Verdict, judge
from core.errors import DeadlineExceededError, OverloadedError
from core.fleet import EditShape

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine

RECENT_EDITS = 32
"""Edits whose size a newcomer's is guessed from."""


class Door:
    """What all edits share: the objective, how far predictions are off, and who is being prepared."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.slo_seconds = engine.config.slo_seconds
        self.margin = Margin()
        self.preparing: dict[Passage, float] = {}  # -> seconds of the engines' time that it will take
        self.sizes: deque[tuple[int, int]] = deque(maxlen=RECENT_EDITS)  # (image tokens, active tokens) of late
        self._engine = engine

    def outlook_of_upload(self, shape: EditShape, num_images: int) -> Outlook | None:
        """What is predicted of an edit whose images have yet to be prepared; None while nobody knows."""
        images, ahead = self._engine.images, self._engine.router.outlook(shape)
        if ahead is None:
            return None
        prepare, compose = images.times.prepare, images.times.compose
        later = ahead.seconds + sum(self.preparing.values())
        seconds = max(images.wait_seconds + prepare + ahead.alone, later) + self._others(shape, num_images) + compose
        return Outlook(seconds, prepare + ahead.alone + compose, ahead.is_idle and not self.preparing)

    def outlook_of_edit(self, shape: EditShape, num_images: int) -> Outlook | None:
        """Likewise, of one that is prepared."""
        ahead, compose = self._engine.router.outlook(shape), self.compose_seconds
        if ahead is None:
            return None
        seconds = ahead.seconds + self._others(shape, num_images) + compose
        return Outlook(seconds, ahead.alone + compose, ahead.is_idle)

    def work_seconds(self, shape: EditShape) -> float:
        """How much later the engines are done for one image."""
        return self._engine.router.work_seconds(shape)

    @property
    def compose_seconds(self) -> float:
        """What making a file of a result takes."""
        return self._engine.images.times.compose

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

    def _others(self, shape: EditShape, num_images: int) -> float:
        return (num_images - 1) * self.work_seconds(shape)


class Passage:
    """One edit's way through the door: look_at_upload, look_at_edit, finished or missed; leave at any time.

    deadline: when its own timeout ends, None = never. objective: when its pictures are to be finished, None = whenever;
    known after look_at_edit. Both absolute.
    """

    def __init__(self, door: Door, arrival: float, timeout: float | None, num_images: int) -> None:
        self.deadline = None if timeout is None else arrival + timeout
        self.objective: float | None = None
        self._goal = arrival + door.slo_seconds if door.slo_seconds else None
        self._door = door
        self._num_images = num_images
        self._foretold: tuple[float, float] | None = None  # when it was let in, and the seconds then predicted
        self._allowed = 0.0  # seconds that these were taken to be with the margin

    def look_at_upload(self, shape: EditShape) -> None:
        """Before its images are prepared: the sizes in `shape` are replaced by the smallest of late.

        Raises OverloadedError, DeadlineExceededError.
        """
        if not self._is_bound or not self._door.sizes:
            return
        shape = _guess(shape, *min(self._door.sizes))
        self._judge(self._door.outlook_of_upload(shape, self._num_images))
        self._door.preparing[self] = self._num_images * self._door.work_seconds(shape)

    def look_at_edit(self, shape: EditShape) -> None:
        """Once it is prepared. Raises OverloadedError, DeadlineExceededError."""
        self.leave()
        self._door.sizes.append((shape.image_tokens, shape.active_tokens))
        if not self._is_bound:
            return
        outlook = self._door.outlook_of_edit(shape, self._num_images)
        if self._judge(outlook).has_objective:
            self.objective = self._goal
        if outlook is not None:
            self._foretold = time.monotonic(), outlook.seconds
            self._allowed = outlook.seconds * self._door.margin.high

    def finished(self, ended: float) -> None:
        """Workers were done with its last picture at `ended`: learn how far off the prediction was."""
        self._learn(ended + self._door.compose_seconds)

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
        return None if self._goal is None else ended + self._door.compose_seconds <= self._goal

    def leave(self) -> None:
        """It is not being prepared any more."""
        self._door.preparing.pop(self, None)

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
