"""SimulatedEngine: a StepScheduler, with ranks that let time pass and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.durations import Durations, batch_work
from benchmarks.simulation.ranks import BatchEnded, PlanBegun, RankClocks, RankEvent, TransferEnded
from core.graph.op import OPS
from core.handles import TensorKey, TensorRef
from core.messages.engine import EngineRequest, PartialImage
from core.messages.worker import (
    Batch,
    BatchResult,
    Item,
    ItemResult,
    PageCopied,
    PageCopy,
    StepPlan,
    Transfer,
    TransferDone,
)
from core.scheduling.endings import Output
from core.scheduling.ops.image_encode import ImageEncode
from core.scheduling.scheduler import StepScheduler


class Ranks:
    """What the ranks of an engine do when their clocks say so. These do nothing, and name what real ones would make:
    all that their ops always make.
    """

    def begin(self, part: StepPlan, rank: int) -> None:
        """Begin a plan: free what it frees, and deliver what it delivers and the rank has."""

    def run(self, batch: Batch, rank: int) -> tuple[ItemResult, ...]:
        """Do a rank's part of a batch, all of whose inputs are there, and deliver what it has made; its results."""
        names = [port.name for port in OPS[batch.op].outputs if not port.is_optional]
        return tuple(_item_result(item, names, rank) for item in batch.items)

    def export(self, transfer: Transfer) -> None:
        """Write a value to shared memory."""


class SimulatedEngine:
    """One engine in simulated time. Its scheduler may have any number of ranks, any policy and any workflows."""

    def __init__(
        self,
        clock: Clock,
        scheduler: StepScheduler,
        durations: Durations,
        note: Callable[[tuple[Output, ...]], None],
        ranks: Ranks | None = None,
    ) -> None:
        """note: called after every scheduling pass, with what the scheduler has for clients; often nothing. ranks: by
        default they do nothing.
        """
        self.scheduler = scheduler
        self.clocks = RankClocks(scheduler.num_workers, durations)
        self._clock = clock
        self._durations = durations
        self._note = note
        self._ranks = ranks or Ranks()
        self._requests: dict[str, EngineRequest] = {}  # id -> request, until its terminal output
        self._link_free: dict[str, float] = {"device": 0.0, "host": 0.0}  # by target: each way has its own link

    def add(self, request: EngineRequest) -> None:
        """Receive a request."""
        self._requests[request.request_id] = request
        self.scheduler.add(request)
        self.step()

    def step(self) -> None:
        """What EngineCore does after each message. To be called after the scheduler was given one, such as an abort."""
        plan = self.scheduler.schedule(self._clock.now)
        while plan is not None:
            for event in self.clocks.submit(plan, self._batch_seconds, self._clock.now):
                self._clock.at(event.when, partial(self._handle, event))
            plan = self.scheduler.schedule(self._clock.now, again=True)
        outputs = self.scheduler.take_outputs()
        for output in outputs:
            if not isinstance(output, PartialImage):
                self._requests.pop(output.request_id, None)
        self._note(outputs)

    def _batch_seconds(self, batch: Batch) -> float:
        work = batch_work(batch, self._requests, self.scheduler.workflows)
        return self._durations.batch_seconds(batch, work)

    def _handle(self, event: RankEvent | PageCopied) -> None:
        match event:
            case PlanBegun():
                self._ranks.begin(event.plan, event.rank)
                for copy in event.plan.copies:
                    self._copy(copy)
                return
            case BatchEnded():
                for rank in event.batch.ranks:
                    items = self._ranks.run(event.batch, rank)
                    result = BatchResult(event.batch.id, rank, event.started, event.seconds, items)
                    self.scheduler.apply(result)
            case TransferEnded():
                self._ranks.export(event.transfer)
                self.scheduler.apply_transfer(TransferDone(event.transfer.source, event.transfer.ref))
            case PageCopied():
                self.scheduler.apply_copy(event)
        self.step()

    def _copy(self, copy: PageCopy) -> None:
        """Copies queue up, and run beside whatever is computed."""
        seconds = self._durations.copy_seconds(copy)
        end = max(self._clock.now, self._link_free[copy.target]) + seconds
        self._link_free[copy.target] = end
        done = PageCopied(copy.rank, copy.key, copy.nbytes, copy.source, copy.target, True, seconds)
        self._clock.at(end, lambda: self._handle(done))


def _item_result(item: Item, names: Sequence[str], rank: int) -> ItemResult:
    made = tuple(TensorRef(TensorKey(item.request_id, item.node, name, item.version), rank) for name in names)
    sigmas: tuple[float, ...] = ()
    if isinstance(item.work, ImageEncode):
        sigmas = _sigmas(item.work.num_inference_steps, item.work.num_denoising_steps)
    return ItemResult(item.request_id, item.node, made, sigmas=sigmas)


@cache
def _sigmas(num_levels: int, num_steps: int) -> tuple[float, ...]:
    """Noise levels of the last steps of a run: the levels are even from 1 to 0."""
    return tuple(1.0 - step / num_levels for step in range(num_levels - num_steps, num_levels + 1))
