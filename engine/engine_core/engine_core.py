"""EngineCore: the loop of the engine process: drain the mailbox, schedule plans and submit them, emit results.

One actor owns the scheduler; requests, aborts and results reach it only through its mailbox. Sockets, signals and
processes are in engine_process.py. It never touches a pixel.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import isinf
from typing import NoReturn, Protocol

from core.config import EngineConfig
from core.errors import EngineDeadError
from core.failure import Failure
from core.ipc.logs import of_request, with_facts
from core.messages.engine import (
    Abort,
    Drain,
    DropTemplate,
    EngineFailed,
    EngineOutputs,
    EngineRequest,
    Failed,
    FromEngine,
    Output,
    PrimeTemplate,
    ToEngine,
    UseAdapters,
    WorkflowAdded,
)
from core.messages.worker import (
    AdapterLoaded,
    Addition,
    BatchResult,
    DropAdapter,
    DropWorkflow,
    FromWorker,
    LoadAdapter,
    LoadWorkflow,
    ModelFailed,
    ModelLoaded,
    PageCopied,
    Removal,
    StepPlan,
    TransferDone,
    WorkerFailed,
    WorkerReady,
    WorkflowLoaded,
)
from core.restarts import Restarts
from core.scheduling.scheduler import StepScheduler
from engine.engine_core.rank_additions import Answer, RankAdditions
from engine.engine_core.watchdog import Watchdog
from engine.observability.engine_trace import EngineTrace
from engine.observability.tracing import NoTracer

logger = logging.getLogger("stencil.engine")

REPORT_SECONDS = 1.0
"""How old an engine's last report may get while it works."""

PROVEN_SECONDS = 10.0
"""A worker that has served for this long starts again with 0 restarts in a row. What kills a worker by itself, such as
a broken device, does so within its first batches."""

LOAD_SECONDS = 120.0
"""How much longer a worker may take for an answer while it loads adapters that came as it served: its batches may wait
for these, and file systems are slow at times. Each one that it has loaded starts its time limit again."""


class PlanSink(Protocol):
    """Sends plans to the workers; implemented by `model_executor.executor.Executor`."""

    def submit(self, plan: StepPlan) -> None: ...
    def tell(self, rank: int, message: Addition | Removal) -> None: ...
    def kill(self, rank: int) -> None: ...
    def restart(self, rank: int, wait_seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request whose message could not be decoded, except for its id."""

    request_id: str
    failure: Failure


class _ReportDue:
    """Sent by EngineCore to itself: changes that were not reported at once are to be reported now."""


class _PassDue:
    """Sent by EngineCore to itself: the scheduler has asked for a pass at this time."""


class EngineCore:
    """`emit` sends a message to the API server and must not block. hang_seconds: see Watchdog."""

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: PlanSink,
        emit: Callable[[FromEngine], None],
        trace: EngineTrace | None = None,
        hang_seconds: float = EngineConfig().hang_seconds,
    ) -> None:
        self.mailbox: asyncio.Queue[ToEngine | FromWorker | RefusedRequest | _ReportDue | _PassDue] = asyncio.Queue()
        self._scheduler = scheduler
        self._executor = executor
        self._emit = emit
        self._trace = trace or EngineTrace(NoTracer())
        self._additions = RankAdditions(
            scheduler.num_workers,
            executor.tell,
            [(info.parent, info.patch) for info in scheduler.models.values() if info.parent],
        )
        self._answers: list[Output] = []  # of what ranks were to take in use
        self._tried: list[WorkflowAdded] = []  # answers that wait until the classes are loaded
        self._watchdog = Watchdog(hang_seconds, self._on_hang)
        self._restarts = [Restarts() for _ in range(scheduler.num_workers)]  # by rank
        self._unwatched: set[int] = set()  # ranks that have answered, or were sent something, since the last look
        self._is_draining = False
        self._is_idle = True
        self._num_running_reported = 0
        self._is_report_due = False
        self._next_report: asyncio.TimerHandle | None = None
        self._next_pass: asyncio.TimerHandle | None = None
        self._stats_sent = -REPORT_SECONDS

    async def run(self) -> None:
        """Serve until a Drain message was received and all requests have ended. Raises EngineDeadError when all workers
        keep dying, after every request got its terminal output."""
        for restarts in self._restarts:
            restarts.note_up(time.monotonic())
        self._step()  # models that no request waits for are loaded from here on
        self._send_report()
        try:
            while not (self._is_draining and self._scheduler.num_requests == 0):
                await self._drain_mailbox()
                self._step()
                self._note_trials()
                self._report()
                self._tell()
        finally:
            self._watchdog.close()
            for timer in filter(None, (self._next_report, self._next_pass)):
                timer.cancel()

    def _step(self) -> None:
        plan = self._scheduler.schedule(time.monotonic())
        while plan is not None:
            self._trace.planned(plan)
            self._executor.submit(plan)
            self._unwatched.update(rank for batch in plan.batches for rank in batch.ranks)
            self._unwatched.update(transfer.source for transfer in plan.transfers)
            plan = self._scheduler.schedule(time.monotonic(), again=True)
        for rank, busy in self._scheduler.busy_ranks(self._unwatched).items():
            if not self._watchdog.is_watching(rank):
                loading = LOAD_SECONDS if self._additions.is_loading(rank) else 0.0
                self._watchdog.expect(rank, busy.predicted, busy.allowed + loading)
        self._unwatched.clear()
        self._set_next_pass(self._scheduler.next_pass)

    def _set_next_pass(self, at: float) -> None:
        """Make a pass at this time of the loop's clock, which is the scheduler's; inf: none."""
        if self._next_pass is not None:
            self._next_pass.cancel()
        loop = asyncio.get_running_loop()
        self._next_pass = None if isinf(at) else loop.call_at(at, self.mailbox.put_nowait, _PassDue())

    def _note_answer(self, rank: int) -> None:
        self._watchdog.note_answer(rank)
        self._unwatched.add(rank)

    def _on_hang(self, rank: int, seconds: float) -> None:
        logger.error("worker %d gave no answer in %.1f s and is killed", rank, seconds, extra=of_request(""))
        self._executor.kill(rank)
        self._watchdog.extend()

    def _report(self) -> None:
        """Report outputs and requests that begin at once, and all else within REPORT_SECONDS. A new request need not be
        reported, as the router knows what it has sent.
        """
        outputs = (*self._scheduler.take_outputs(), *self._answers)
        self._answers.clear()
        num_running, _ = self._scheduler.counts
        if outputs or self._is_report_due or num_running != self._num_running_reported:
            self._num_running_reported = num_running
            self._send_report(outputs)
        elif self._next_report is None:
            self._next_report = asyncio.get_running_loop().call_later(
                REPORT_SECONDS, self.mailbox.put_nowait, _ReportDue()
            )
        was_idle, self._is_idle = self._is_idle, self._scheduler.num_requests == 0
        if self._is_idle and not was_idle:  # once per idle period: it visits all cached entries
            self._scheduler.check_integrity()

    def _tell(self) -> None:
        for text in self._scheduler.take_refused():
            logger.error("%s", text, extra=of_request(""))
        for each in self._scheduler.take_resumed():
            facts = asdict(each)
            extra = of_request(facts.pop("request_id")) | with_facts(**facts)
            logger.info("goes on after a worker's death", extra=extra)

    def _send_report(self, outputs: tuple[Output, ...] = ()) -> None:
        if self._next_report is not None:
            self._next_report.cancel()
        self._next_report, self._is_report_due = None, False
        now, is_idle = time.monotonic(), self._scheduler.num_requests == 0
        stats = None
        if is_idle or now - self._stats_sent >= REPORT_SECONDS:
            stats, self._stats_sent = self._scheduler.stats(), now
        self._trace.sent(outputs)
        self._emit(EngineOutputs(outputs=outputs, load=self._scheduler.load_report(), stats=stats))

    async def _drain_mailbox(self) -> None:
        """Wait for a message, then take all that have arrived: one scheduling pass serves them all."""
        self._receive(await self.mailbox.get())
        while not self.mailbox.empty():
            self._receive(self.mailbox.get_nowait())

    def _receive(self, message: ToEngine | FromWorker | RefusedRequest | _ReportDue | _PassDue) -> None:
        match message:
            case _PassDue():
                pass  # a pass follows whatever has come
            case _ReportDue():
                self._is_report_due = True
            case RefusedRequest():
                self._scheduler.refuse(message.request_id, message.failure)
            case _:
                self._take(message)

    def _take(self, message: ToEngine | FromWorker) -> None:
        self._trace.received(message)
        match message:
            case EngineRequest():
                self._scheduler.add(message)
            case UseAdapters():
                self._scheduler.use_adapters(message)
            case PrimeTemplate():
                self._scheduler.add_template(message)
            case DropTemplate():
                self._scheduler.drop_template(message)
            case LoadAdapter():
                self._additions.load(message)
            case LoadWorkflow():  # its requests may come before the ranks have answered: they load its classes first
                self._scheduler.add_workflow(
                    message.workflow, message.classes, message.roles if message.model else None
                )
                if message.classes:
                    self._additions.load(message)
                else:  # ranks have nothing to load for it
                    self._answers.append(WorkflowAdded(message.request_id, message.workflow.name))
            case DropAdapter():
                self._additions.drop(message)
            case DropWorkflow():
                self._scheduler.drop_workflow(message.name)
                self._additions.drop(message)
            case AdapterLoaded() | WorkflowLoaded():
                self._note_additions([self._additions.note(message)])
                if self._additions.is_loading(message.rank):  # a single load says nothing of the batches beside it
                    self._note_answer(message.rank)
            case Abort():
                self._scheduler.abort(message.request_ids)
            case Drain():
                self._is_draining = True
            case BatchResult():
                self._note_answer(message.rank)
                self._restarts[message.rank].note_work(message.started + message.seconds)
                self._scheduler.apply(message)
            case TransferDone():
                self._note_answer(message.rank)
                self._scheduler.apply_transfer(message)
            case PageCopied():
                self._scheduler.apply_copy(message)
            case ModelLoaded() | ModelFailed():
                self._scheduler.apply_load(message, time.monotonic())
            case WorkerFailed():
                self._lose(message)
            case WorkerReady():
                self._join(message)

    def _note_additions(self, answers: Iterable[Answer | None]) -> None:
        """Note answers to what ranks were to take in use. Classes are loaded before any request may name them, so that
        a workflow of those that cannot be replaces no other one."""
        for answer in answers:
            if isinstance(answer, WorkflowAdded):
                self._scheduler.try_workflow(answer.name)
                self._tried.append(answer)
            elif answer is not None:
                self._answers.append(answer)

    def _note_trials(self) -> None:
        """Answer those whose classes are loaded, or cannot be."""
        for added in list(self._tried):
            outcome = self._scheduler.trial_of(added.name, time.monotonic())
            if outcome is False:
                continue
            answer: Answer = added if outcome is True else Failed(added.request_id, outcome)
            self._tried.remove(added)
            self._answers.append(answer)

    def _lose(self, message: WorkerFailed) -> None:
        """Restart a dead worker, while the others go on; or give up if no other lives and it keeps dying."""
        rank, failure, restarts = message.rank, message.failure, self._restarts[message.rank]
        self._watchdog.note_answer(rank)
        self._unwatched.discard(rank)
        now, is_fast = time.monotonic(), not restarts.has_proven(PROVEN_SECONDS)
        is_solved = message.culprit is not None  # it does not keep dying by itself; what is to blame is refused
        if not is_solved and not restarts.may_restart(now, PROVEN_SECONDS) and not self._has_others(rank):
            self._fail(message)
        if failure.detail:
            logger.error("worker %d failed: %s\n%s", rank, failure.message, failure.detail, extra=of_request(""))
        if rank not in self._scheduler.ranks.up:  # its restart has failed
            self._scheduler.ranks.note_death(rank)
        else:
            self._scheduler.lose_rank(rank, failure, now, is_fast=is_fast, culprit=message.culprit)
            self._note_additions(self._additions.lose(rank, failure.message))
            self._trace.lost(rank)
        seconds = 0.0 if is_solved else restarts.next_wait()
        text = "worker %d is restarted in %.0f s, restart %d in a row: %s"
        logger.error(text, rank, seconds, restarts.in_a_row, failure.message, extra=of_request(""))
        self._executor.restart(rank, seconds)
        self._is_report_due = True

    def _has_others(self, rank: int) -> bool:
        """Whether another rank lives, or may still be restarted for the first times."""
        others = [other for other in range(self._scheduler.num_workers) if other != rank]
        return any(other in self._scheduler.ranks.up or not self._restarts[other].is_spent for other in others)

    def _join(self, message: WorkerReady) -> None:
        """Give work to a worker that was restarted."""
        if {info.name: info for info in message.models} != self._scheduler.models:
            why = f"worker {message.rank} no longer serves its models in the same way"
            self._fail(WorkerFailed(rank=message.rank, failure=Failure("config", why)))
        logger.info("worker %d serves again", message.rank, extra=of_request(""))
        self._restarts[message.rank].note_up(time.monotonic())
        self._additions.join(message.rank)
        self._scheduler.join_rank(message.rank, message.components, message.port)
        self._is_report_due = True

    def _fail(self, message: WorkerFailed) -> NoReturn:
        # The other workers must not touch a request's memory once its terminal output was sent.
        for rank in range(self._scheduler.num_workers):
            self._executor.kill(rank)
        # "engine_dead" whatever ended the worker, so that the router retries the requests on another engine.
        self._scheduler.fail_all(Failure("engine_dead", message.failure.message))
        outputs = self._scheduler.take_outputs()
        self._trace.sent(outputs)
        # In one message: after a separate report, the router would take the engine for idle and send it the retries.
        self._emit(EngineFailed(failure=message.failure, outputs=outputs))
        raise EngineDeadError(message.failure.message)
