"""Endings: ends requests, each with exactly one terminal message, which is sent when no worker can touch its arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from core.failure import NEVER_BEGUN, Failure
from core.handles import TensorKey
from core.messages.engine import Aborted, Failed, Finished, Output
from core.messages.worker import Free
from core.scheduling.node_cache import CacheOutcome, NodeCache
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request, Status
from core.scheduling.values.values import ValueTable


@dataclass(slots=True)
class Endings:
    """Ends the requests of one scheduler, to whose lists it appends messages and orders."""

    requests: LiveRequests
    values: ValueTable
    cache: NodeCache
    on_end: Callable[[str], None]  # called with the id of each request that gets its terminal message
    outputs: list[Output]  # messages for clients
    free: list[Free]  # orders for workers
    # Request id -> its terminal message, which is sent when nothing of the request is in flight.
    _messages: dict[str, Finished | Failed | Aborted] = field(default_factory=dict)

    def end(self, request: Request, status: Status, message: Finished | Failed | Aborted) -> None:
        """End a request. Its message is sent when no worker can touch its arrays any more."""
        request.move_to(status)
        self._messages[request.id] = message
        self.requests.end(request.id)
        self.finish(request)

    def fail(self, request: Request, failure: Failure) -> None:
        """End a request that has failed, unless it has ended already."""
        if request.is_live:
            self.end(request, Status.FAILED, Failed(request_id=request.id, failure=failure))

    def fail_each(self, failed: Iterable[tuple[Request, Failure]]) -> None:
        """End these requests, unless they have ended already."""
        for request, failure in failed:
            self.fail(request, failure)

    def finish(self, request: Request) -> None:
        """Send the message of a request that has ended, if nothing of it is in flight."""
        if request.id not in self._messages or request.has_work_in_flight:
            return
        # A job may read its template for others, even if it has finished: its own pages may have been loaded meanwhile.
        if not self.cache.is_lent(request):
            self._remove(request)
            self.outputs.append(self._messages.pop(request.id))

    def finish_lenders(self) -> None:
        """Send the messages of requests that have ended, after a job has read a template that one of them may have
        lent, or its rank has died.
        """
        for request_id in list(self._messages):
            self.finish(self.requests[request_id])

    def fail_all(self, failure: Failure) -> None:
        """End every request now, because the workers are gone. Requests that no worker had begun get the code
        NEVER_BEGUN, because they cannot be the cause.
        """
        bystander = msgspec.structs.replace(failure, code=NEVER_BEGUN)
        for request in self.requests:
            cause = bystander if request.status is Status.WAITING else failure
            message = self._messages.pop(request.id, Failed(request_id=request.id, failure=cause))
            self._remove(request)
            self.outputs.append(message)

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the requests that have ended have a message."""
        assert set(self._messages) == {request.id for request in self.requests if not request.is_live}

    def _remove(self, request: Request) -> None:
        self.on_end(request.id)
        self.requests.remove(request.id)
        self.values.forget(request.id)
        self.cache.forget(request)
        if request.progress.has_started:
            self.free.append(Free(TensorKey(request.id, "", ""), tuple(request.ranks)))


def finished(request: Request, cache: CacheOutcome) -> Finished:
    """The terminal message of a request whose output is made. cache: what the cache has done for it."""
    assert request.started is not None
    assert request.made is not None
    ms = {"queue": (request.started - request.head.arrival) * 1e3}
    ms |= {part: seconds * 1e3 for part, seconds in request.part_seconds.items()}
    ms["prime"] = cache.prime_seconds * 1e3
    return Finished(
        request_id=request.id,
        ms=ms,
        text_tokens=request.text_tokens,
        prompt_truncated=request.prompt_truncated,
        cache=cache.result,
        tier=cache.tier,
        is_primed=cache.result == "miss",
        full_blocks=cache.full_blocks,
        made=request.made,
        degrees=tuple(request.degrees.values()),
        steps_without_lora=request.steps_without_lora,
        active_tokens=request.active_tokens,
        mask_score=request.mask_score,
        shapes=dict(request.result_shapes),
    )
