"""StepScheduler: which requests denoise one step together, and which other stage work goes along.

Step-level continuous batching: every iteration re-forms the batch, a request joins at the next step and leaves right
after its last. Pure: time is an argument, effects are the returned plan. It knows nothing of tensors, processes or
HTTP.

One iteration is schedule -> (a worker runs the plan) -> apply; `take_outputs` says what clients are to be told.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from core.config import SchedulerConfig
from core.cost_model import CostKey, CostModel, Work
from core.errors import DeadlineExceededError
from core.failure import Failure
from core.handles import ModelKey, TensorKey
from core.messages import (
    Aborted,
    Batch,
    BatchResult,
    EditRequest,
    Failed,
    Finished,
    ItemResult,
    LoadReport,
    ModelInfo,
    PartialImage,
    StepPlan,
    TransferDone,
)
from core.request import Request, Status
from core.scheduling_pass import SchedulingPass
from core.stage_work import work_tokens
from core.stages import INPAINT, Node, Placement, Progress, Workflow, place, preview_steps

Output = PartialImage | Finished | Failed | Aborted

PATIENCE_SECONDS = 60.0
"""How much younger a request with a deadline may be and still go first."""


@dataclass(slots=True)
class Flight:
    """A batch that is out."""

    batch: Batch
    work: Work


@dataclass(slots=True)
class Counters:
    """Totals since start, for the load report."""

    steps: int = 0
    batch_tokens: int = 0
    batch_requests: int = 0
    busy_seconds: float = 0.0


def urgency(request: Request) -> tuple[int, float, float, str]:
    """Sort key: priority, then when it should be done, then arrival; the id makes it total.

    A request without a deadline, or with a far one, counts as due PATIENCE_SECONDS after its arrival: nearer deadlines
    overtake it, but only so long.
    """
    edit = request.edit
    patience_ends = edit.arrival + PATIENCE_SECONDS
    due = patience_ends if edit.deadline is None else min(edit.deadline, patience_ends)
    return edit.sampling.priority, due, edit.arrival, edit.request_id


class StepScheduler:
    """Owns every Request from `add` until its terminal output."""

    def __init__(
        self,
        config: SchedulerConfig,
        models: Mapping[str, ModelInfo],
        num_workers: int = 1,
        workflow: Workflow = INPAINT,
    ) -> None:
        self.config = config
        self.models = dict(models)
        self.workflow = workflow
        self.placement: Placement = place(workflow, num_workers)
        self.cost = CostModel()
        self._num_workers = num_workers
        self._requests: dict[str, Request] = {}  # request id -> Request, until its terminal output
        self._order: list[Request] = []  # the same requests, most urgent first
        self._endings: dict[str, Failed | Aborted] = {}  # request id -> what to say once nothing of it is in flight
        self._flights: dict[int, Flight] = {}  # batch id -> batch that is out
        self._plans_out: list[dict[int, int]] = [
            {} for _ in range(num_workers)
        ]  # per rank: plan seq -> results awaited
        self._plan_of: dict[int | TensorKey, int] = {}  # batch id or tensor under transfer -> plan seq
        self._free: list[TensorKey] = []
        self._outputs: list[Output] = []
        self._counters = Counters()
        self._plan_seqs = count()
        self._batch_ids = count()

    # ------------------------------------------------------------------------------------------------- requests

    def add(self, edit: EditRequest) -> None:
        """Take a request in. An id that is already here raises ValueError."""
        if edit.request_id in self._requests:
            raise ValueError(f"request {edit.request_id} is here already")
        num_steps = edit.sampling.num_denoising_steps
        progress = Progress(num_steps, preview_steps(num_steps, edit.num_partial_images))
        request = Request(edit, progress)
        self._requests[request.id] = request
        insort(self._order, request, key=urgency)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Give requests up. One that has ended already is no error: its terminal output crossed the abort on its
        way.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.is_live:
                self._end(request, Status.ABORTED, Aborted(request_id=request_id))

    def fail_all(self, failure: Failure) -> None:
        """The workers are gone: end every request now, whatever was in flight."""
        for request in list(self._requests.values()):
            ending = self._endings.pop(request.id, Failed(request_id=request.id, failure=failure))
            self._remove(request)
            self._outputs.append(ending)
        self._flights.clear()
        self._plan_of.clear()
        self._plans_out = [{} for _ in range(self._num_workers)]

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    # ------------------------------------------------------------------------------------------------- one iteration

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None when nothing can start before a result or a request comes in."""
        self._expire(now)
        chosen = SchedulingPass(
            self.config, self.workflow, self.placement, self._open_ranks(), self._predict, self._batch_ids
        )
        chosen.run(self.in_order())
        has_work = bool(chosen.batches or chosen.transfers)
        # Freeing alone can wait for the next plan with work, unless none is to be expected.
        if not has_work and (not self._free or any(self._plans_out)):
            return None
        return self._send(chosen)

    def apply(self, result: BatchResult) -> None:
        """Take in what came of one batch. An unknown batch raises KeyError: results are never guessed at."""
        flight = self._flights.pop(result.batch_id)
        self._settle(result.batch_id, result.rank)
        self._count(flight, result)
        for item in result.items:
            self._apply_item(self._requests[item.request_id], item, result)

    def apply_transfer(self, done: TransferDone) -> None:
        """A tensor lies in shared memory now."""
        self._settle(done.ref.key, done.rank)
        request = self._requests[done.ref.key.request_id]
        assert done.ref.handle is not None
        request.exporting = None
        request.exported[done.ref.key] = done.ref.handle
        self._finish_ending(request)

    def take_outputs(self) -> tuple[Output, ...]:
        """What clients are to be told, in order; each is handed out once."""
        outputs, self._outputs = tuple(self._outputs), []
        return outputs

    # ------------------------------------------------------------------------------------------------- what it knows

    def in_order(self) -> Iterator[Request]:
        """Live requests, most urgent first."""
        return (request for request in self._order if request.is_live)

    def cost_key(self, model: ModelKey, stage: str) -> CostKey:
        return CostKey(model, stage, self.models[model.model].device, 1)

    def load_report(self) -> LoadReport:
        running = sum(request.status is Status.RUNNING for request in self._order)
        stage_seconds = self._stage_seconds_left()
        return LoadReport(
            num_running=running,
            num_waiting=len(self._order) - running,
            drain_seconds=sum(stage_seconds.values()),
            stage_seconds=stage_seconds,
            resident_models=self._resident_models(),
            r_squared={key.stage: value for key, value in self.cost.r_squared().items()},
            page_digest="",
            steps=self._counters.steps,
            batch_tokens=self._counters.batch_tokens,
            batch_requests=self._counters.batch_requests,
            busy_seconds=self._counters.busy_seconds,
        )

    def check_integrity(self) -> None:
        """Every count agrees with every other; raises AssertionError otherwise. Cheap enough to run when idle."""
        assert {request.id for request in self._order} == set(self._requests)
        assert set(self._endings) <= set(self._requests)
        out = [item for flight in self._flights.values() for item in flight.batch.items]
        assert len(out) == sum(request.progress.num_in_flight for request in self._order)
        awaited = sum(sum(plans.values()) for plans in self._plans_out)
        assert awaited == len(self._plan_of)
        transfers = sum(request.exporting is not None for request in self._order)
        assert awaited == len(self._flights) + transfers
        assert all(request.is_live or request.id in self._endings for request in self._order)

    # ------------------------------------------------------------------------------------------------- inside

    def _open_ranks(self) -> set[int]:
        limit = self.config.max_plans_in_flight
        return {rank for rank, plans in enumerate(self._plans_out) if len(plans) < limit}

    def _send(self, chosen: SchedulingPass) -> StepPlan:
        seq = next(self._plan_seqs)
        for batch in chosen.batches:
            self._flights[batch.id] = Flight(batch, chosen.works[batch.id])
            self._await(seq, batch.ranks[0], batch.id)
        for transfer in chosen.transfers:
            self._await(seq, transfer.source, transfer.ref.key)
        free, self._free = tuple(self._free), []
        return StepPlan(seq=seq, batches=tuple(chosen.batches), transfers=tuple(chosen.transfers), free=free)

    def _predict(self, request: Request, node: Node) -> float:
        key = self.cost_key(ModelKey(request.edit.model, node.component), node.stage)
        return self.cost.predict(key, Work.of([work_tokens(request, node)]))

    def _await(self, seq: int, rank: int, what: int | TensorKey) -> None:
        plans = self._plans_out[rank]
        plans[seq] = plans.get(seq, 0) + 1
        self._plan_of[what] = seq

    def _settle(self, what: int | TensorKey, rank: int) -> None:
        plans, seq = self._plans_out[rank], self._plan_of.pop(what)
        plans[seq] -= 1
        if not plans[seq]:
            del plans[seq]

    def _apply_item(self, request: Request, item: ItemResult, result: BatchResult) -> None:
        node = self.workflow.node(item.node)
        seconds = request.stage_seconds
        seconds[node.stage] = seconds.get(node.stage, 0.0) + result.seconds
        request.started = min(request.started or result.started, result.started)
        if item.failure is not None:
            request.progress.land(node)
            if request.is_live:
                self._end(request, Status.FAILED, Failed(request_id=request.id, failure=item.failure))
        else:
            self._advance(request, node, item)
        self._finish_ending(request)

    def _advance(self, request: Request, node: Node, item: ItemResult) -> None:
        preview = request.progress.pending_preview
        request.progress.finish(node)
        if node.stage == "text_encode":
            request.text_tokens, request.prompt_truncated = item.text_tokens, item.prompt_truncated
        if not request.is_live:
            return
        if node.kind == "side":
            self._finish_preview(request, node, preview)
        elif node.name == self.workflow.output:
            self._finish(request)

    def _finish_preview(self, request: Request, node: Node, index: int | None) -> None:
        assert index is not None
        for edge in node.inputs:
            request.exported.pop(TensorKey(request.id, edge.source, edge.name), None)
        step = request.progress.previews[index]
        self._outputs.append(PartialImage(request_id=request.id, index=index, step=step))

    def _finish(self, request: Request) -> None:
        request.move_to(Status.FINISHED)
        assert request.started is not None
        ms = {"queue": (request.started - request.edit.arrival) * 1e3}
        ms |= {stage: seconds * 1e3 for stage, seconds in request.stage_seconds.items()}
        self._remove(request)
        self._outputs.append(
            Finished(
                request_id=request.id,
                ms=ms,
                text_tokens=request.text_tokens,
                prompt_truncated=request.prompt_truncated,
                full_blocks=0,
            )
        )

    def _end(self, request: Request, status: Status, message: Failed | Aborted) -> None:
        """End early. The client is told once no worker can touch the request's arrays any more."""
        request.move_to(status)
        self._endings[request.id] = message
        self._finish_ending(request)

    def _finish_ending(self, request: Request) -> None:
        if request.id in self._endings and not request.is_in_flight:
            self._remove(request)
            self._outputs.append(self._endings.pop(request.id))

    def _remove(self, request: Request) -> None:
        del self._requests[request.id]
        self._order.remove(request)
        if request.progress.has_started:
            self._free.append(TensorKey(request.id, "", ""))

    def _expire(self, now: float) -> None:
        for request in [r for r in self._order if r.is_live and r.edit.deadline is not None and r.edit.deadline <= now]:
            failure = Failure.of(DeadlineExceededError("The request's timeout passed before it finished."))
            self._end(request, Status.FAILED, Failed(request_id=request.id, failure=failure))

    def _count(self, flight: Flight, result: BatchResult) -> None:
        self._counters.busy_seconds += result.seconds
        if flight.batch.stage == "denoise":
            self._counters.steps += 1
            self._counters.batch_tokens += sum(flight.work.queries)
            self._counters.batch_requests += len(flight.batch.items)
        if not any(item.failure for item in result.items):
            self.cost.observe(self.cost_key(flight.batch.model, flight.batch.stage), flight.work, result.seconds)

    def _resident_models(self) -> tuple[ModelKey, ...]:
        components = sorted({node.component for node in self.workflow.nodes})
        return tuple(ModelKey(name, component) for name in self.models for component in components)

    def _stage_seconds_left(self) -> dict[str, float]:
        """Predicted worker time left per stage, if batches are as full as the queue lets them be."""
        times: Counter[tuple[Node, ModelKey, int]] = Counter()
        for request in self.in_order():
            for node in self.workflow.nodes:
                model = ModelKey(request.edit.model, node.component)
                times[node, model, work_tokens(request, node)] += request.progress.times_left(node)
        left: dict[str, float] = {}
        for (node, model, tokens), number in times.items():
            seconds = number * self._share(node, model, tokens)
            if seconds:
                left[node.stage] = left.get(node.stage, 0.0) + seconds
        return left

    def _share(self, node: Node, model: ModelKey, tokens: int) -> float:
        """Predicted seconds that one run of `node` over so many tokens adds to a batch."""
        size = min(self.config.max_num_seqs, max(1, len(self._order))) if node.kind == "loop" else 1
        return self.cost.predict(self.cost_key(model, node.stage), Work.of([tokens] * size)) / size
