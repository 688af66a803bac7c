"""Recovery: finds what requests have lost with a dead rank, and lets them resume from what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from core.costs.load_report import RequestLoad
from core.failure import Failure
from core.graph.workflow import Node
from core.handles import ModelKey
from core.messages.worker import BatchResult, ItemResult
from core.scheduling.node_cache import NodeCache
from core.scheduling.ranks.in_flight import Flight, InFlight, LostWork
from core.scheduling.ranks.quarantine import Suspects
from core.scheduling.recovery.checkpoints import Checkpoints
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request, Status
from core.scheduling.values.request_values import restart, resume
from core.scheduling.values.values import ValueTable


@dataclass(frozen=True, slots=True)
class Blame:
    """What a rank ran when it died."""

    keys: ModelKeys  # the components that it computed with
    suspects: Suspects


@dataclass(slots=True)
class Aftermath:
    """The consequences of a rank's death, which the scheduler carries out."""

    requests: dict[str, Request]  # id -> request whose state has changed
    blame: Blame | None  # None: it ran nothing, or what no request waits for any more
    failed: list[tuple[Request, Failure]] = field(default_factory=list)  # requests that may have caused too many deaths
    # (id of a job of the cache that may have caused too many deaths, a result that says that it failed)
    failed_jobs: list[tuple[str, BatchResult]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request that resumes after a rank's death. Steps are rounds of all its loops."""

    request_id: str
    steps_done: int  # steps that it need not repeat
    steps_repeated: int
    steps_between: int  # steps from one checkpoint to the next, as of the last one; 0: it had none


@dataclass(slots=True)
class Recovery:
    """The mechanism of one scheduler.

    A request that has lost runs in flight, values that nodes still read, or pages is *set back*: nothing more of it is
    sent, and the results of its runs on other ranks do not count. Once all of them are answered, it resumes: the nodes
    that made the lost values run again, from the last values that survive.

    The requests whose batch a rank ran when it died are suspects. A request that was a suspect twice runs alone. A
    request that was a suspect more often than `max_retries` fails.
    """

    requests: LiveRequests
    values: ValueTable
    cache: NodeCache
    in_flight: InFlight
    checkpoints: Checkpoints
    remaining_load: Callable[[Request], RequestLoad]  # a request's remaining work
    max_retries: int
    steps_repeated: int = 0  # since start
    _job_deaths: Counter[str] = field(default_factory=Counter)  # id of a job of the cache -> deaths it may have caused
    _resumed: list[Resumed] = field(default_factory=list)  # since `take_resumed`

    # ------------------------------------------------------------------------------------------------- a death

    def lose(self, rank: int, failure: Failure, culprit: str | ModelKey | None = None) -> Aftermath:
        """Note that a rank has died with everything that it had. failure: why it died. culprit: what is to blame, see
        `StepScheduler.lose_rank`; nothing else is suspected then. None: nobody knows.
        """
        lost = self.in_flight.lose(rank)
        blame = self._blame(lost.running, culprit)
        if culprit is not None:
            lost = replace(lost, running=None)
        for request in self.requests:
            request.lose_rank(rank)
        ids = [*self._land_lost_work(lost), *self._lose_values(rank), *self._readers_of_deliveries(rank)]
        ids += [*self.cache.lose_rank(rank), *self._suspects(lost.running)]
        aftermath = Aftermath({request_id: self.requests[request_id] for request_id in ids}, blame)
        for request in aftermath.requests.values():
            request.is_set_back = request.progress.is_restarting = True
        for request in self.requests:
            self.checkpoints.note_loss(request)
        self._judge(lost, aftermath, failure)
        return aftermath

    def set_back_alone(self, request: Request, node: Node) -> None:
        """Note that a batch of several ranks with this node has failed, which changed nothing. The request runs on one
        rank from now on. If no rank's death was the cause, that finds the item that fails, because one rank halves a
        failed batch until that item is alone.
        """
        request.progress.land(node)
        request.runs_on_one_rank = request.is_set_back = request.progress.is_restarting = True

    def make_room(self, waiting: Request | None) -> bool:
        """Make room in the arena if it is full and nothing is in flight, so that no room would ever be made otherwise.
        The least urgent other request that has values in the arena gives them up, and resumes from what ranks have.
        waiting: the request whose inputs find no room; None: there is none. Returns whether room was made.
        """
        if waiting is None or self.in_flight.has_any:
            return False
        others = [each for each in self.requests.live() if each is not waiting and self.values.is_in_arena(each.id)]
        if not others:
            return False
        request = others[-1]
        self.checkpoints.drop(request)
        request.lost += self.values.leave_arena(request.id)
        request.fixed_inputs.clear()  # they name places in the arena
        if request.lost:
            request.is_set_back = request.progress.is_restarting = True
        self.settle(request)
        return True

    def forget_job(self, job_id: str) -> None:
        """Note that a job of the cache has ended."""
        self._job_deaths.pop(job_id, None)

    def _land_lost_work(self, lost: LostWork) -> Iterator[str]:
        """Note that the lost work is not in flight any more; ids of the requests that it was for."""
        for item in (item for flight in lost.flights if not flight.job_id for item in flight.batch.items):
            request = self.requests[item.request_id]
            request.progress.land(request.workflow.node(item.node))
            yield request.id
        for key in lost.transfers:
            self.values.fail_move(key)
            self.requests[key.request_id].num_moving -= 1
            yield key.request_id

    def _lose_values(self, rank: int) -> Iterator[str]:
        """Note the values that are nowhere any more; ids of their requests."""
        for key in self.values.lose(rank):
            self.requests[key.request_id].lost.append(key)
            yield key.request_id

    def _readers_of_deliveries(self, rank: int) -> Iterator[str]:
        """Ids of requests in batches on other ranks that may wait for a value from the dead rank."""
        for item in (item for flight in self.in_flight.flights for item in flight.batch.items):
            if any(ref.is_deferred and ref.rank == rank for ref in item.inputs):
                yield item.request_id

    def _blame(self, running: Flight | None, culprit: str | ModelKey | None) -> Blame | None:
        if running is None:
            return None
        if running.job_id:
            waiters = self.cache.waiters_of(running.job_id)
            suspects = Suspects(frozenset({running.job_id, *waiters}), frozenset(waiters.values()))
            return Blame(running.keys, suspects) if waiters and culprit is None else None
        ids = [item.request_id for item in running.batch.items if culprit in (None, item.request_id)]
        if not (requests := [self.requests[request_id] for request_id in ids]):
            return None
        owners = frozenset(request.head.owner for request in requests)
        return Blame(running.keys, Suspects(frozenset(request.id for request in requests), owners))

    def _suspects(self, running: Flight | None) -> list[str]:
        return [] if running is None or running.job_id else [item.request_id for item in running.batch.items]

    def _judge(self, lost: LostWork, aftermath: Aftermath, failure: Failure) -> None:
        """Count the death, and decide which requests and jobs fail because of it."""
        for request_id in dict.fromkeys(self._suspects(lost.running)):
            request = aftermath.requests[request_id]
            request.num_deaths += 1
            if request.num_deaths > self.max_retries:
                aftermath.failed.append((request, self._too_many(request.num_deaths, failure)))
        if lost.running is not None and lost.running.job_id:
            self._job_deaths[lost.running.job_id] += 1
        for flight in lost.flights:
            if flight.job_id:
                self._judge_job(flight, aftermath, failure)

    def _judge_job(self, flight: Flight, aftermath: Aftermath, failure: Failure) -> None:
        deaths = self._job_deaths[flight.job_id]
        if deaths <= self.max_retries:
            self.cache.undo(flight.job_id)
            return
        too_many = self._too_many(deaths, failure)
        items = tuple(ItemResult(item.request_id, item.node, failure=too_many) for item in flight.batch.items)
        aftermath.failed_jobs.append((flight.job_id, BatchResult(flight.batch.id, 0, 0.0, 0.0, items)))

    def _too_many(self, deaths: int, failure: Failure) -> Failure:
        times = f"{deaths} workers" if deaths > 1 else "The worker"
        message = f"{times} died while running this request (retries allowed: {self.max_retries})"
        return Failure("rank_dead", f"{message}: {failure.message}")

    # ------------------------------------------------------------------------------------------------- going on

    def take_resumed(self) -> list[Resumed]:
        """Requests that have resumed since the last call."""
        resumed, self._resumed = self._resumed, []
        return resumed

    def settle(self, request: Request) -> None:
        """Let a request that was set back resume, or one that has lost pages without waiting for them restart, once
        nothing of it is in flight.
        """
        if self.cache.must_restart(request):
            request.progress.is_restarting = True
        if not request.is_live or not request.progress.is_restarting or request.has_work_in_flight:
            return
        if request.is_set_back:
            self._resume(request)
        if self.cache.must_restart(request):
            self.checkpoints.drop(request)
            self.cache.note_restart(request)
            restart(self.values, request)
            self.cache.set_back(request)
        self.requests.note_progress(request)

    def _resume(self, request: Request) -> None:
        done = request.progress.steps_done
        resume(self.values, request)
        self.checkpoints.note_loss(request)
        self.cache.set_back(request)
        repeated, between = done - request.progress.steps_done, max(request.rounds_between.values(), default=0)
        self.steps_repeated += repeated
        self._resumed.append(Resumed(request.id, request.progress.steps_done, repeated, between))
        if request.runs_alone and request.status is Status.RUNNING:
            request.move_to(Status.WAITING)
            request.waiting_load = None
            request.kept_work = None
            self.requests.send_back(request.id, self.remaining_load(request))
