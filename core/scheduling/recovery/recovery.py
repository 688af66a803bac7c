"""Recovery: what a rank's death takes from the requests, and how they go on from what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from core.costs.load_report import RequestLoad
from core.failure import Failure
from core.graph.workflow import Node
from core.messages.worker import BatchResult, ItemResult
from core.scheduling.node_cache import NodeCache
from core.scheduling.ranks.in_flight import Flight, InFlight, Lost
from core.scheduling.recovery.checkpoints import Checkpoints
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request, Status
from core.scheduling.values.request_values import begin_again, go_on
from core.scheduling.values.values import ValueTable


@dataclass(slots=True)
class Loss:
    """What is to be done after a rank's death."""

    requests: dict[str, Request]  # id -> request whose state has changed
    failed: list[tuple[Request, Failure]] = field(default_factory=list)  # requests that may have caused too many deaths
    failed_jobs: list[tuple[str, BatchResult]] = field(default_factory=list)  # likewise jobs of the cache, as if failed


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request that goes on after a rank's death. Steps are rounds of all its loops."""

    request_id: str
    steps_done: int  # that it need not repeat
    steps_repeated: int
    steps_between: int  # from one checkpoint to the next, at the last one; 0: it had none


@dataclass(slots=True)
class Recovery:
    """The mechanism of one scheduler.

    A request that has lost runs in flight, values that nodes still read, or pages, is *set back*: nothing more of it is
    sent, and what the other ranks still have of it does not count. Once they have answered, it goes on: the nodes that
    made what was lost run again, from the last values that survive.

    The requests whose batch a rank ran when it died are suspects. One that has been so twice goes on when no other
    runs, and no other runs beside it; after more deaths than it may have retries it fails.
    """

    requests: LiveRequests
    values: ValueTable
    cache: NodeCache
    out: InFlight
    checkpoints: Checkpoints
    left_of: Callable[[Request], RequestLoad]  # a request's remaining work
    max_retries: int
    steps_repeated: int = 0  # since start
    _job_deaths: Counter[str] = field(default_factory=Counter)  # id of a job of the cache -> deaths it may have caused
    _resumed: list[Resumed] = field(default_factory=list)  # since they were taken

    # ------------------------------------------------------------------------------------------------- a death

    def lose(self, rank: int, failure: Failure) -> Loss:
        """Note that a rank is gone with all that it had. failure: why."""
        lost = self.out.lose(rank)
        for request in self.requests:
            request.lose_rank(rank)
        of_batches = [*self._land(lost), *self._of_values(rank), *self._of_deliveries(rank)]
        names = [*of_batches, *self.cache.lose_rank(rank), *self._suspects(lost.running)]
        loss = Loss({name: self.requests[name] for name in names})
        for request in loss.requests.values():
            request.is_set_back = request.progress.is_restarting = True
        for request in self.requests:
            self.checkpoints.note_loss(request)
        self._judge(lost, loss, failure)
        return loss

    def set_back_alone(self, request: Request, node: Node) -> None:
        """Note that a batch of several ranks with this node has failed, which changed nothing. What failed in it, if no
        rank died, is found on one rank, where a batch is halved until it fails alone.
        """
        request.progress.land(node)
        request.runs_on_one_rank = request.is_set_back = request.progress.is_restarting = True

    def make_room(self, waiting: Request | None) -> bool:
        """Let the last request but this one that has values in the arena leave it, if the inputs of this one find no
        room there and nothing is in flight: so none would ever be made. What leaves goes back to what ranks have.
        waiting: None: none does. Returns whether one has left.
        """
        if waiting is None or self.out.has_any:
            return False
        others = [each for each in self.requests.live() if each is not waiting and self.values.is_in_arena(each.id)]
        if not others:
            return False
        request = others[-1]
        self.checkpoints.drop(request)
        request.lost += self.values.leave_arena(request.id)
        request.fixed_inputs.clear()  # these name places in the arena
        if request.lost:
            request.is_set_back = request.progress.is_restarting = True
        self.settle(request)
        return True

    def forget_job(self, job_id: str) -> None:
        """Note that a job of the cache has ended."""
        self._job_deaths.pop(job_id, None)

    def _land(self, lost: Lost) -> Iterator[str]:
        """Note that what the rank had is not in flight any more; the requests that it was for."""
        for item in (item for flight in lost.flights if not flight.job_id for item in flight.batch.items):
            request = self.requests[item.request_id]
            request.progress.land(request.workflow.node(item.node))
            yield request.id
        for key in lost.transfers:
            self.values.fail_move(key)
            self.requests[key.request_id].num_moving -= 1
            yield key.request_id

    def _of_values(self, rank: int) -> Iterator[str]:
        """The requests of values that are nowhere any more."""
        for key in self.values.lose(rank):
            self.requests[key.request_id].lost.append(key)
            yield key.request_id

    def _of_deliveries(self, rank: int) -> Iterator[str]:
        """The requests of batches on other ranks that may wait for a value from this one."""
        for item in (item for flight in self.out.flights for item in flight.batch.items):
            if any(ref.is_deferred and ref.rank == rank for ref in item.inputs):
                yield item.request_id

    def _suspects(self, running: Flight | None) -> list[str]:
        return [] if running is None or running.job_id else [item.request_id for item in running.batch.items]

    def _judge(self, lost: Lost, loss: Loss, failure: Failure) -> None:
        """Count the death, and decide what fails because of it."""
        for request_id in dict.fromkeys(self._suspects(lost.running)):
            request = loss.requests[request_id]
            request.num_deaths += 1
            if request.num_deaths > self.max_retries:
                loss.failed.append((request, self._too_many(request.num_deaths, failure)))
        if lost.running is not None and lost.running.job_id:
            self._job_deaths[lost.running.job_id] += 1
        for flight in lost.flights:
            if flight.job_id:
                self._judge_job(flight, loss, failure)

    def _judge_job(self, flight: Flight, loss: Loss, failure: Failure) -> None:
        deaths = self._job_deaths[flight.job_id]
        if deaths <= self.max_retries:
            self.cache.undo(flight.job_id)
            return
        told = self._too_many(deaths, failure)
        items = tuple(ItemResult(item.request_id, item.node, failure=told) for item in flight.batch.items)
        loss.failed_jobs.append((flight.job_id, BatchResult(flight.batch.id, 0, 0.0, 0.0, items)))

    def _too_many(self, deaths: int, failure: Failure) -> Failure:
        times = f"{deaths} workers" if deaths > 1 else "The worker"
        message = f"{times} died while running this request (retries allowed: {self.max_retries})"
        return Failure("rank_dead", f"{message}: {failure.message}")

    # ------------------------------------------------------------------------------------------------- going on

    def take_resumed(self) -> list[Resumed]:
        """Requests that go on since the last call."""
        resumed, self._resumed = self._resumed, []
        return resumed

    def settle(self, request: Request) -> None:
        """Let a request go on that was set back, or begin again because pages were lost that it did not wait for, if
        nothing of it is in flight.
        """
        if self.cache.is_spoilt(request):
            request.progress.is_restarting = True
        if not request.is_live or not request.progress.is_restarting or request.has_work_out:
            return
        if request.is_set_back:
            self._go_on(request)
        if self.cache.is_spoilt(request):
            self.checkpoints.drop(request)
            self.cache.begin_again(request)
            begin_again(self.values, request)
            self.cache.set_back(request)
        self.requests.note_progress(request)

    def _go_on(self, request: Request) -> None:
        done = request.progress.steps_done
        go_on(self.values, request)
        self.checkpoints.note_loss(request)
        self.cache.set_back(request)
        repeated, between = done - request.progress.steps_done, max(request.rounds_between.values(), default=0)
        self.steps_repeated += repeated
        self._resumed.append(Resumed(request.id, request.progress.steps_done, repeated, between))
        if request.runs_alone and request.status is Status.RUNNING:
            request.move_to(Status.WAITING)
            request.waiting_load = None
            self.requests.send_back(request.id, self.left_of(request))
