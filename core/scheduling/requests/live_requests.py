"""LiveRequests: the requests of one scheduler, by id and in scheduling order, which is fair between owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from core.costs.load_report import Begun, Dequeued, Ended, QueueChange, Queued, RequestLoad
from core.scheduling.requests.bindings import Needs
from core.scheduling.requests.deadlines import due, urgency
from core.scheduling.requests.fair_queue import Claim, FairQueue
from core.scheduling.requests.request import Request, Status


class LiveRequests:
    """Requests from their arrival until their terminal message: waiting, running, and ended ones of which a worker
    still has work.
    """

    def __init__(self) -> None:
        self._claims: dict[str, Claim[Request]] = {}  # request id -> its claim
        self._queue: FairQueue[Request] = FairQueue()  # holds all claims
        self._order: _Replayed | None = None  # the queue's order; None: it has changed since
        self._running: dict[str, Request] = {}  # id -> request, from `begin` until `end`
        self._pending: set[str] = set()  # ids of requests with a preview that is being prepared or runs
        self._moved: dict[str, Request] = {}  # id -> request whose progress or status has changed since `take_moved`
        self._num_due = 0  # requests with a due time
        self.version = 0  # of which requests wait and run
        self._num_with = Counter[Needs]()  # needs -> requests that have them; no zeros
        self._needs: tuple[Needs, ...] | None = ()  # see `needs`; None: it has changed
        self._changes: list[QueueChange] = []  # since `take_changes`

    def add(self, request: Request, load: RequestLoad) -> None:
        """Add a request. load: its predicted work; 0 seconds: unknown."""
        self._queue_up(request, load)
        self._num_with[request.needs] += 1
        if self._num_with[request.needs] == 1:
            self._needs = None
        self._num_due += due(request.head) is not None

    def _queue_up(self, request: Request, load: RequestLoad) -> None:
        head = request.head
        claim = Claim(request, head.owner, head.priority, urgency(request), load.seconds)
        self._claims[request.id] = claim
        self.version += 1
        self._changes.append(Queued(request.id, load, claim.urgency[0]))
        self._queue.add(claim)
        self._order = None

    def begin(self, request_id: str, predict: Callable[[Request], float]) -> None:
        """Note that a worker was given a request. predict: request -> its predicted seconds, called only if they were
        unknown when it was added.
        """
        claim = self._claims[request_id]
        claim.seconds = claim.seconds or predict(claim.item)
        self._queue.begin(claim)
        self._running[request_id] = claim.item
        self.version += 1
        self._changes.append(Begun(request_id, claim.seconds))
        if self._queue.num_owners > 1:  # among the requests of one owner the order does not depend on who has begun
            self._order = None

    def send_back(self, request_id: str, load: RequestLoad) -> None:
        """Note that a request that had begun waits again. load: its remaining work. Its owner stays charged for the
        work that was done for it, and pays for the remaining work when that begins.
        """
        request = self._running.pop(request_id)
        self._moved[request_id] = request
        claim = self._claims[request_id]
        took = max(0.0, claim.cost - load.seconds)
        self._changes.append(Dequeued(request_id, took))
        self._queue.remove(claim, took)
        self._queue_up(request, load)

    def end(self, request_id: str) -> None:
        """Note that a request has ended whose terminal message has to wait until no worker has work of it."""
        running = self._running.pop(request_id, None)
        self.version += 1
        if running is None:
            self._changes.append(Ended(request_id))
        else:
            self._moved[request_id] = running

    def note_progress(self, request: Request) -> None:
        """Note that work of a request was sent or answered. A request that is removed already is ignored."""
        if request.id in self._claims:
            self._moved[request.id] = request
            (self._pending.add if request.progress.pending else self._pending.discard)(request.id)

    def remove(self, request_id: str) -> None:
        """Remove a request whose terminal message is made."""
        claim = self._claims.pop(request_id)
        self.version += 1
        self._num_with[claim.item.needs] -= 1
        if not self._num_with[claim.item.needs]:
            del self._num_with[claim.item.needs]
            self._needs = None
        self._queue.remove(claim)
        self._running.pop(request_id, None)
        self._pending.discard(request_id)
        self._moved[request_id] = claim.item
        self._changes.append(Dequeued(request_id))
        self._num_due -= due(claim.item.head) is not None
        self._order = None

    def get(self, request_id: str) -> Request | None:
        """The request with this id; None if there is none."""
        claim = self._claims.get(request_id)
        return None if claim is None else claim.item

    def __getitem__(self, request_id: str) -> Request:
        return self._claims[request_id].item

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._claims

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[Request]:
        """All requests, in the order of their arrival."""
        return (claim.item for claim in list(self._claims.values()))

    def in_order(self) -> Iterable[Request]:
        """All requests, the next one first. Lazy: its cost grows with the number of requests that are taken."""
        if self._order is None:  # kept for many steps of the same requests
            self._order = _Replayed(self._queue.in_order())
        return self._order

    def live(self) -> Iterator[Request]:
        """Requests that have not ended, the next one first."""
        return (request for request in self.in_order() if request.is_live)

    @property
    def running(self) -> list[Request]:
        """Requests that have begun and not ended, in the order in which they began."""
        return list(self._running.values())

    @property
    def needs(self) -> tuple[Needs, ...]:
        """What they are computed with, each once. The same object until it changes."""
        if self._needs is None:
            self._needs = tuple(self._num_with)
        return self._needs

    @property
    def has_pending_previews(self) -> bool:
        """Whether a preview of any request is being prepared or runs."""
        return bool(self._pending)

    def take_changes(self) -> tuple[QueueChange, ...]:
        """Changes of the queue since the last call, in order."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def take_moved(self) -> list[Request]:
        """Requests that were sent, answered, ended or removed since the last call."""
        moved, self._moved = list(self._moved.values()), {}
        return moved

    @property
    def has_due(self) -> bool:
        """Whether any request has a due time."""
        return self._num_due > 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless everything that is kept beside the queue agrees with it."""
        assert set(self._running) == {request.id for request in self if request.status is Status.RUNNING}
        assert self._pending == {request.id for request in self if request.progress.pending}
        assert self._num_due == sum(due(claim.item.head) is not None for claim in self._claims.values())
        assert {*self.needs} == {request.needs for request in self}
        assert list(self.in_order()) == list(self._queue.in_order())

    @property
    def counts(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        num_running = len(self._running)
        return num_running, len(self) - num_running


class _Replayed(Iterable[Request]):
    """Makes an iterator iterable many times, by keeping the items that were taken from it."""

    def __init__(self, source: Iterator[Request]) -> None:
        self._source = source
        self._taken: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        for index in count():
            if index == len(self._taken):
                following = next(self._source, None)
                if following is None:
                    return
                self._taken.append(following)
            yield self._taken[index]
