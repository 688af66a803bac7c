"""The n images of one edit: which request makes which, what has become of each, and what waits to be delivered."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from core.messages.engine import Aborted, EngineRequest, Failed, Finished, PartialImage, TemplatePrimed
from engine.router.engine_client import RequestOutput
from engine.router.router import Router

Ending = Finished | TemplatePrimed | Failed | Aborted
"""The terminal output of a request."""


@dataclass(slots=True)
class EditImage:
    """One of them."""

    index: int
    seed: int
    request: EngineRequest
    engine: int | None = None  # where it was done, once it is
    num_partials: int = 0  # partial images handed out so far
    is_done: bool = False  # its terminal output has come
    ended: float | None = None  # when that was, if it is finished
    was_retried: bool = False  # an engine that had it has died


class EditImages:
    """By the id of their request; empty until they are submitted."""

    def __init__(self, router: Router, done: asyncio.Event) -> None:
        """done: set once all have their terminal output."""
        self._router = router
        self._done = done
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._by_id: dict[str, EditImage] = {}

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def submit(self, image: EditImage) -> None:
        """Hand its request to the engines. Raises EngineDeadError, MessageError."""
        self._router.submit(image.request, self.hear)
        self._by_id[image.request.request_id] = image

    def hear(self, output: RequestOutput) -> None:
        """An output comes from the router."""
        if not isinstance(output, PartialImage):
            self._note_end(output)
            if not self.running:
                self._done.set()
        self._outputs.put_nowait(output)

    def _note_end(self, output: Ending) -> None:
        """The router is asked for what it forgets once it has told a terminal output."""
        image = self._by_id[output.request_id]
        image.is_done = True
        image.ended = time.monotonic() if isinstance(output, Finished) else None
        image.engine = self._router.engine_of(output.request_id)
        image.was_retried = self._router.was_retried(output.request_id)

    async def next_output(self) -> tuple[EditImage, RequestOutput]:
        """Wait for the next output that was not delivered yet; with the image that it is of."""
        output = await self._outputs.get()
        return self._by_id[output.request_id], output

    @property
    def ids(self) -> tuple[str, ...]:
        """Of their requests."""
        return tuple(self._by_id)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of those whose terminal output has yet to come."""
        return tuple(request_id for request_id, image in self._by_id.items() if not image.is_done)

    @property
    def last_ended(self) -> float | None:
        """When the last of them was finished; None unless all of them are."""
        ends = [image.ended for image in self._by_id.values()]
        return None if None in ends else max((end for end in ends if end is not None), default=None)

    @property
    def has_begun(self) -> bool:
        """Whether a worker has begun any of them."""
        return any(map(self._router.has_begun, self._by_id))

    @property
    def was_retried(self) -> bool:
        """Whether an engine has died that had one of them."""
        images = self._by_id.items()
        return any(image.was_retried or self._router.was_retried(request_id) for request_id, image in images)
