"""SimulatedEngine: a StepScheduler, with ranks that let time pass and compute nothing.

A rank may die at a batch. Then it is started again as EngineCore does it, or the engine gives up. Batches of several
ranks must not die.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import inf

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.durations import Durations, batch_work
from benchmarks.simulation.ranks import (
    BatchEnded,
    LoadEnded,
    LoadsBegun,
    PlanBegun,
    RankClocks,
    RankEvent,
    TransferEnded,
)
from core.failure import Failure
from core.graph.op import OPS
from core.handles import LoadedComponent, ModelKey, RankIds, TensorKey, TensorRef
from core.messages.engine import EngineRequest, Output, PartialImage
from core.messages.worker import (
    Batch,
    BatchResult,
    Item,
    ItemResult,
    Load,
    PageCopied,
    PageCopy,
    StepPlan,
    Transfer,
    TransferDone,
)
from core.restarts import Restarts
from core.scheduling.model_loads import LoadAnswer
from core.scheduling.ops.image_encode import ImageEncode
from core.scheduling.scheduler import StepScheduler
from engine.engine_core.engine_core import PROVEN_SECONDS

DIED = Failure("engine_dead", "the worker died")


class Ranks:
    """What the ranks of an engine do when their clocks say so. These do nothing, and name what real ones would make:
    all that their ops always make. They have the components of all models, and never die.
    """

    def begin(self, part: StepPlan, rank: int) -> None:
        """Begin a plan: free what it frees, and deliver what it delivers and the rank has."""

    def dies(self, batch: Batch) -> bool:
        """Whether a rank dies of its part of a batch, when that would end."""
        return False

    def run(self, batch: Batch, rank: int) -> tuple[ItemResult, ...]:
        """Do a rank's part of a batch, all of whose inputs are there, and deliver what it has made; its results."""
        names = [port.name for port in OPS[batch.op].outputs if not port.is_optional]
        return tuple(_item_result(item, names, rank) for item in batch.items)

    def export(self, transfer: Transfer) -> None:
        """Write a value to shared memory."""

    def has(self, key: ModelKey, rank: int) -> bool:
        """Whether a rank has a component now, so that an order to load it takes no time."""
        return True

    def begin_load(self, load: Load, rank: int) -> None:
        """Drop what the order says, and begin to load."""

    def end_load(self, key: ModelKey, rank: int, seconds: float) -> LoadAnswer:
        """End a load, which has taken so many seconds."""
        raise AssertionError(f"rank {rank} has everything, and is to load {key}")

    def start(self, rank: int) -> tuple[LoadedComponent, ...]:
        """Start the process of a dead rank again; what it has loaded when it accepts plans."""
        return ()


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
        self._num_steps = 0  # so far
        self.has_given_up = False  # because a rank kept dying; every later request fails at once
        self._lives = [0] * scheduler.num_workers  # per rank: its deaths so far
        self._restarts = [Restarts() for _ in range(scheduler.num_workers)]  # per rank
        for restarts in self._restarts:
            restarts.note_up(clock.now)
        self._requests: dict[str, EngineRequest] = {}  # id -> request, until its terminal output
        self._link_free: dict[str, float] = {"device": 0.0, "host": 0.0}  # by target: each way has its own link

    def add(self, request: EngineRequest) -> None:
        """Receive a request."""
        self._requests[request.request_id] = request
        if self.has_given_up:
            self.scheduler.refuse(request.request_id, DIED)
        else:
            self.scheduler.add(request)
        self.step()

    def step(self) -> None:
        """What EngineCore does after each message. To be called after the scheduler was given one, such as an abort."""
        plan = None if self.has_given_up else self.scheduler.schedule(self._clock.now)
        while plan is not None:
            for event in self.clocks.submit(plan, self._batch_seconds, self._load_seconds, self._clock.now):
                self._expect(event, event.ranks, event.when)
            plan = self.scheduler.schedule(self._clock.now, again=True)
        self._set_next_pass()
        outputs = self.scheduler.take_outputs()
        for output in outputs:
            if not isinstance(output, PartialImage):
                self._requests.pop(output.request_id, None)
        self._note(outputs)

    def _set_next_pass(self) -> None:
        """Step again when the policy has asked for it, unless another step comes first."""
        self._num_steps += 1
        due, number = self.scheduler.next_pass, self._num_steps
        if due < inf and not self.has_given_up:
            self._clock.at(max(due, self._clock.now), lambda: self.step() if number == self._num_steps else None)

    def _batch_seconds(self, batch: Batch) -> float:
        work = batch_work(batch, self._requests, self.scheduler.workflows)
        return self._durations.batch_seconds(batch, work)

    def _load_seconds(self, key: ModelKey, rank: int) -> float:
        return 0.0 if self._ranks.has(key, rank) else self._durations.load_seconds(key)

    def _expect(self, event: RankEvent | PageCopied, ranks: RankIds, when: float) -> None:
        """Handle an event of some ranks at a time, unless one of them dies before."""
        lives = [self._lives[rank] for rank in ranks]

        def happen() -> None:
            if [self._lives[rank] for rank in ranks] == lives:
                self._handle(event)
            elif isinstance(event, BatchEnded) and not self.has_given_up:
                assert len(ranks) == 1, "a rank has died that computes together with others"
                self.clocks.busy_seconds[ranks[0]] -= event.seconds

        self._clock.at(when, happen)

    def _handle(self, event: RankEvent | PageCopied) -> None:
        match event:
            case PlanBegun():
                self._ranks.begin(event.plan, event.rank)
                for copy in event.plan.copies:
                    self._copy(copy)
                return
            case BatchEnded():
                for rank in event.ranks:
                    if self._ranks.dies(event.batch):
                        self._lose(rank)
                        continue
                    self._restarts[rank].note_work(self._clock.now)
                    items = self._ranks.run(event.batch, rank)
                    self.scheduler.apply(BatchResult(event.batch.id, rank, event.started, event.seconds, items))
            case TransferEnded():
                self._ranks.export(event.transfer)
                self.scheduler.apply_transfer(TransferDone(event.transfer.source, event.transfer.ref))
            case PageCopied():
                self.scheduler.apply_copy(event)
            case LoadsBegun():
                self._ranks.begin_load(event.load, event.rank)
                return
            case LoadEnded():
                answer = self._ranks.end_load(event.key, event.rank, event.seconds)
                self.scheduler.apply_load(answer, self._clock.now)
        self.step()

    # ------------------------------------------------------------------------------------------------- deaths

    def _lose(self, rank: int) -> None:
        """What EngineCore does when a worker has died."""
        now, restarts = self._clock.now, self._restarts[rank]
        self._lives[rank] += 1
        self.clocks.lose(rank, now)
        is_fast = not restarts.has_proven(PROVEN_SECONDS)
        if not restarts.may_restart(now, PROVEN_SECONDS) and not self._has_others(rank):
            self.has_given_up = True
            self._lives = [life + 1 for life in self._lives]
            self.scheduler.fail_all(DIED)
            return
        self.scheduler.lose_rank(rank, DIED, now, is_fast=is_fast)
        self._clock.after(restarts.next_wait() + self._durations.start_seconds(), partial(self._join, rank))

    def _has_others(self, rank: int) -> bool:
        others = [other for other in range(self.scheduler.num_workers) if other != rank]
        return any(other in self.scheduler.ranks.up or not self._restarts[other].is_spent for other in others)

    def _join(self, rank: int) -> None:
        if self.has_given_up:
            return
        self._restarts[rank].note_up(self._clock.now)
        self.scheduler.join_rank(rank, self._ranks.start(rank))
        self.step()

    def _copy(self, copy: PageCopy) -> None:
        """Copies queue up, and run beside whatever is computed."""
        seconds = self._durations.copy_seconds(copy)
        end = max(self._clock.now, self._link_free[copy.target]) + seconds
        self._link_free[copy.target] = end
        done = PageCopied(copy.rank, copy.key, copy.nbytes, copy.source, copy.target, True, seconds)
        self._expect(done, (copy.rank,), end)


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
