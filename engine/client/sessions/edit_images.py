"""EditImages: the n images of one edit, with the request, the state and the undelivered outputs of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from core.messages.engine import EngineRequest, Finished, Output, PartialImage
from engine.client.recall.recalled import Recalled
from engine.router.router import Router


@dataclass(slots=True)
class EditImage:
    """One image of an edit."""

    index: int
    seed: int
    request: EngineRequest
    engine: int | None = None  # the engine that ended it, once it has ended
    num_partials: int = 0  # partial images delivered so far
    is_done: bool = False  # its terminal output was received
    ended: float | None = None  # when it was received, seconds of CLOCK_MONOTONIC; None unless it was Finished
    is_counted: bool = False  # its end is in the metrics; set by EditDelivery and EditSession
    was_retried: bool = False  # it was sent again after an engine's death
    recalled: Recalled | None = None  # what approximate caching did for it; None: it was not asked for


class EditImages:
    """The images by request id; empty until they are submitted."""

    def __init__(self, router: Router, done: asyncio.Event) -> None:
        """done: set here once all images have their terminal output."""
        self._router = router
        self._done = done
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._by_id: dict[str, EditImage] = {}

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def __iter__(self) -> Iterator[EditImage]:
        return iter(self._by_id.values())

    def submit(self, image: EditImage) -> None:
        """Send an image's request to an engine. Raises EngineDeadError, MessageError."""
        self._router.submit(image.request, self._on_output)
        self._by_id[image.request.request_id] = image

    def _on_output(self, output: Output) -> None:
        """Callback of the router for every output of these requests."""
        if not isinstance(output, PartialImage):
            self._note_end(output)
            if not self.running:
                self._done.set()
        self._outputs.put_nowait(output)

    def _note_end(self, output: Output) -> None:
        """Note how a request ended. output: its terminal one. The router forgets the request after this callback, so it
        is asked now.
        """
        image = self._by_id[output.request_id]
        image.is_done = True
        image.ended = time.monotonic() if isinstance(output, Finished) else None
        image.engine = self._router.engine_of(output.request_id)
        image.was_retried = self._router.was_retried(output.request_id)

    async def next_output(self) -> tuple[EditImage, Output]:
        """Wait for the next output; returns it with its image."""
        output = await self._outputs.get()
        return self._by_id[output.request_id], output

    @property
    def has_output(self) -> bool:
        """Whether `next_output` need not wait."""
        return not self._outputs.empty()

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all requests."""
        return tuple(self._by_id)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests without a terminal output so far."""
        return tuple(request_id for request_id, image in self._by_id.items() if not image.is_done)

    @property
    def last_ended(self) -> float | None:
        """When the last image was finished; None unless all are."""
        ends = [image.ended for image in self._by_id.values()]
        return None if None in ends else max((end for end in ends if end is not None), default=None)

    @property
    def has_begun(self) -> bool:
        """Whether a worker has begun any image."""
        return any(map(self._router.has_begun, self._by_id))

    @property
    def was_retried(self) -> bool:
        """Whether any image was sent again after its engine died."""
        images = self._by_id.items()
        return any(image.was_retried or self._router.was_retried(request_id) for request_id, image in images)
