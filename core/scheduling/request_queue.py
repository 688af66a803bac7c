"""RequestQueue: the requests of one scheduler in scheduling order: fair between owners, urgency within an owner."""

from __future__ import annotations

from collections.abc import Callable

from core.scheduling.deadlines import urgency
from core.scheduling.fair_queue import Claim, FairQueue
from core.scheduling.request import Request


class RequestQueue:
    """Waiting and running requests: owners share fairly, and of each owner the most urgent request goes first."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim[Request]] = {}  # request id -> its claim
        self._queue: FairQueue[Request] = FairQueue()  # of these claims
        self._order: tuple[Request, ...] | None = None  # the queue's; None: it has changed since

    def add(self, request: Request, seconds: float) -> None:
        """Enqueue a request. seconds: predicted time of all its work, 0 = unknown."""
        head = request.head
        claim = Claim(request, head.owner, head.priority, urgency(request), seconds)
        self._claims[request.id] = claim
        self._queue.add(claim)
        self._order = None

    def begin(self, request_id: str, predict: Callable[[Request], float]) -> None:
        """Note that a worker has got it. predict: its seconds, called only if they were unknown when it was added."""
        claim = self._claims[request_id]
        claim.seconds = claim.seconds or predict(claim.item)
        self._queue.begin(claim)
        if self._queue.num_owners > 1:  # among one owner's the order does not depend on who has begun
            self._order = None

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended."""
        self._queue.remove(self._claims.pop(request_id))
        self._order = None

    def in_order(self) -> tuple[Request, ...]:
        """All requests, the next one first."""
        if self._order is None:  # computed once for many steps of the same requests
            self._order = tuple(self._queue.in_order())
        return self._order
