"""The n images of one edit: which request makes which, and what has become of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.messages.engine import Aborted, EditRequest, Failed, Finished, TemplatePrimed

if TYPE_CHECKING:
    from engine.router.router import Router

Ending = Finished | TemplatePrimed | Failed | Aborted
"""The terminal output of a request."""


@dataclass(slots=True)
class EditImage:
    """One of them."""

    index: int
    seed: int
    request: EditRequest
    engine: int | None = None  # where it was done, once it is
    num_partials: int = 0  # partial images handed out so far
    is_done: bool = False  # its terminal output has come
    ended: float | None = None  # when that was, if it is finished
    was_retried: bool = False  # an engine that had it has died


class EditImages:
    """By the id of their request; empty until they are submitted."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._by_id: dict[str, EditImage] = {}

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def __getitem__(self, request_id: str) -> EditImage:
        return self._by_id[request_id]

    def add(self, picture: EditImage) -> None:
        """It was submitted."""
        self._by_id[picture.request.request_id] = picture

    def note_end(self, output: Ending, now: float) -> None:
        """The terminal output of one comes at `now`. The router is asked for what it forgets thereafter."""
        picture = self[output.request_id]
        picture.is_done = True
        picture.ended = now if isinstance(output, Finished) else None
        picture.engine = self._router.engine_of(output.request_id)
        picture.was_retried = self._router.was_retried(output.request_id)

    @property
    def ids(self) -> tuple[str, ...]:
        """Of their requests."""
        return tuple(self._by_id)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of those whose terminal output has yet to come."""
        return tuple(request_id for request_id, picture in self._by_id.items() if not picture.is_done)

    @property
    def last_ended(self) -> float | None:
        """When the last of them was finished; None unless all of them are."""
        ends = [picture.ended for picture in self._by_id.values()]
        return None if None in ends else max((end for end in ends if end is not None), default=None)

    @property
    def has_begun(self) -> bool:
        """Whether a worker has begun any of them."""
        return any(map(self._router.has_begun, self._by_id))

    @property
    def was_retried(self) -> bool:
        """Whether an engine has died that had one of them."""
        pictures = self._by_id.items()
        return any(picture.was_retried or self._router.was_retried(request_id) for request_id, picture in pictures)
