"""RequestQueue: the requests of one scheduler, in the order in which they are looked at."""

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
        """Line up. seconds: what all of it is predicted to take, 0 = unknown."""
        edit = request.edit
        claim = Claim(request, edit.owner, edit.sampling.priority, urgency(request), seconds)
        self._claims[request.id] = claim
        self._queue.add(claim)
        self._order = None

    def begin(self, request_id: str, predict: Callable[[Request], float]) -> None:
        """A worker has been given it. predict: what it takes, asked where that was unknown when it came."""
        claim = self._claims[request_id]
        claim.seconds = claim.seconds or predict(claim.item)
        self._queue.begin(claim)
        if self._queue.num_owners > 1:  # among one owner's the order does not depend on who has begun
            self._order = None

    def remove(self, request_id: str) -> None:
        """It has ended."""
        self._queue.remove(self._claims.pop(request_id))
        self._order = None

    def in_order(self) -> tuple[Request, ...]:
        """First whose turn it is."""
        if self._order is None:  # reckoned once for many steps of the same requests
            self._order = tuple(self._queue.in_order())
        return self._order
