"""StepScheduler: which requests denoise one step together, and which other stage work goes along.

Step-level continuous batching: every iteration re-forms the batch, a request joins at the next step and leaves right
after its last. Pure: time is an argument, effects are the returned plan. It knows nothing of tensors, processes or
HTTP.

One iteration is schedule -> (a worker runs the plan) -> apply; `take_outputs` says what clients are to be told.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from core.config import SchedulerConfig
from core.cost_model import CostKey, CostModel, Work
from core.errors import DeadlineExceededError
from core.messages import (
    Aborted,
    Batch,
    BatchResult,
    EditRequest,
    Failed,
    Failure,
    Finished,
    Item,
    ItemResult,
    LoadReport,
    ModelInfo,
    ModelKey,
    PartialImage,
    StepPlan,
    TensorKey,
    TensorRef,
    Transfer,
    TransferDone,
)
from core.request import Request, Status
from core.stage_work import exports_needed, make_item
from core.stages import INPAINT, Node, Placement, Progress, Workflow, place, preview_steps

Output = PartialImage | Finished | Failed | Aborted


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
    """Sort key: priority, then the nearer deadline, then arrival; the id makes it total."""
    edit = request.edit
    return edit.sampling.priority, edit.deadline or float("inf"), edit.arrival, edit.request_id


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
        self._next_seq = 0
        self._next_batch_id = 0

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
        planner = _Pass(self, self._open_ranks())
        planner.run()
        free, self._free = tuple(self._free), []
        if not (planner.batches or planner.transfers or free):
            return None
        return self._send(planner, free)

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

    def _send(self, planner: _Pass, free: tuple[TensorKey, ...]) -> StepPlan:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        for batch in planner.batches:
            self._flights[batch.id] = planner.flights[batch.id]
            self._await(seq, batch.ranks[0], batch.id)
        for transfer in planner.transfers:
            self._await(seq, transfer.source, transfer.ref.key)
        return StepPlan(seq=seq, batches=tuple(planner.batches), transfers=tuple(planner.transfers), free=free)

    def _await(self, seq: int, rank: int, what: int | TensorKey) -> None:
        plans = self._plans_out[rank]
        plans[seq] = plans.get(seq, 0) + 1
        self._plan_of[what] = seq

    def _settle(self, what: int | TensorKey, rank: int) -> None:
        plans, seq = self._plans_out[rank], self._plan_of.pop(what)
        plans[seq] -= 1
        if not plans[seq]:
            del plans[seq]

    def next_batch_id(self) -> int:
        self._next_batch_id += 1
        return self._next_batch_id

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
        left: dict[str, float] = {}
        for request in self.in_order():
            for node in self.workflow.nodes:
                times = request.progress.times_left(node)
                if times:
                    seconds = times * self._share(request, node)
                    left[node.stage] = left.get(node.stage, 0.0) + seconds
        return left

    def _share(self, request: Request, node: Node) -> float:
        """Predicted seconds that one run of `node` adds for this request, in a batch as full as it is allowed to be."""
        key = self.cost_key(ModelKey(request.edit.model, node.component), node.stage)
        size = min(self.config.max_num_seqs, max(1, len(self._order))) if node.kind == "loop" else 1
        work = Work.of([work_tokens(request, node)] * size)
        return self.cost.predict(key, work) / size


def work_tokens(request: Request, node: Node) -> int:
    """Tokens that running `node` once costs: those of a step for the denoiser, image tokens for the VAE, text tokens
    else.
    """
    match node.stage:
        case "denoise":
            return request.num_step_tokens
        case "text_encode":
            return request.edit.max_text_tokens
        case "image_encode" | "decode":
            return request.edit.num_tokens


@dataclass(slots=True)
class _Pass:
    """One scheduling pass: the budgets that are left, and what was chosen so far. It dies with the pass."""

    scheduler: StepScheduler
    open_ranks: set[int]  # ranks that may be given work
    batches: list[Batch] = field(default_factory=list)
    flights: dict[int, Flight] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    stage_ms: dict[int, float] = field(default_factory=dict)  # rank -> predicted milliseconds of stage work chosen

    def run(self) -> None:
        """Finishing work first (it frees places), then the step, then previews nobody waits for."""
        self._choose_transfers()
        self._choose_stage_work()
        self._choose_step()

    # Stage work: encoders, decoders ------------------------------------------------------------------------------

    def _choose_stage_work(self) -> None:
        for is_wanted in (self._is_output, self._is_source, self._is_side):
            for request in self.scheduler.in_order():
                nodes = [node for node in self._ready(request) if is_wanted(node)]
                if nodes and self._admits(request):
                    self._choose_nodes(request, nodes)

    def _is_output(self, node: Node) -> bool:
        return node.name == self.scheduler.workflow.output

    def _is_source(self, node: Node) -> bool:
        return node.kind == "once" and not self._is_output(node)

    def _is_side(self, node: Node) -> bool:
        return node.kind == "side"

    def _admits(self, request: Request) -> bool:
        """Running requests go on; a waiting one needs a place among those that have steps to do."""
        if request.status is Status.RUNNING:
            return True
        stepping = sum(
            other.status is Status.RUNNING and other.progress.steps_left > 0 for other in self.scheduler.in_order()
        )
        return stepping < self.scheduler.config.max_num_seqs

    def _choose_nodes(self, request: Request, nodes: list[Node]) -> None:
        """All of the request's nodes or, where the time budget of a rank is spent, none."""
        nodes = [node for node in nodes if self._is_open(node) and self._are_inputs_here(request, node)]
        ms = sum(self._predict_ms(request, node) for node in nodes)
        ranks = {self.scheduler.placement[node.name] for node in nodes}
        if any(self._is_over_budget(rank, ms) for rank in ranks):
            return
        for node in nodes:
            rank = self.scheduler.placement[node.name]
            self.stage_ms[rank] = self.stage_ms.get(rank, 0.0) + self._predict_ms(request, node)
            self._add(node, [request])
        if nodes and request.status is Status.WAITING:
            request.move_to(Status.RUNNING)

    def _is_over_budget(self, rank: int, ms: float) -> bool:
        """The first item of an iteration always goes; more only while they fit the budget."""
        spent = self.stage_ms.get(rank)
        return spent is not None and spent + ms > self.scheduler.config.max_stage_ms

    def _predict_ms(self, request: Request, node: Node) -> float:
        key = self.scheduler.cost_key(ModelKey(request.edit.model, node.component), node.stage)
        return self.scheduler.cost.predict(key, Work.of([work_tokens(request, node)])) * 1e3

    # The step ----------------------------------------------------------------------------------------------------

    def _choose_step(self) -> None:
        """One batch per model of the most urgent requests that fit; one above the token budget runs alone."""
        loop = self.scheduler.workflow.loop
        if not self._is_open(loop):
            return
        config = self.scheduler.config
        chosen: dict[str, list[Request]] = {}  # model -> requests
        tokens = 0
        for request in self.scheduler.in_order():
            if loop not in self._ready(request):
                continue
            seqs = sum(map(len, chosen.values()))
            if seqs == config.max_num_seqs or (
                seqs and tokens + request.num_step_tokens > config.max_num_batched_tokens
            ):
                break
            chosen.setdefault(request.edit.model, []).append(request)
            tokens += request.num_step_tokens
        for requests in chosen.values():
            self._add(loop, requests)

    # Between ranks -----------------------------------------------------------------------------------------------

    def _choose_transfers(self) -> None:
        """Export what a ready node on another rank reads. A request has one place in shared memory for it: one at a
        time.
        """
        for request in self.scheduler.in_order():
            for node in self._ready(request):
                missing = exports_needed(request, node, self.scheduler.placement)
                if missing and self._is_handle_free(request):
                    self._export(request, missing[0])

    def _is_handle_free(self, request: Request) -> bool:
        """Whether nothing writes or reads the request's place in shared memory. What lies there unread (a preview that
        the last step overtook) may be overwritten.
        """
        readers = (node for node in self.scheduler.workflow.nodes if node.stage == "decode")
        return request.exporting is None and not any(node.name in request.progress.in_flight for node in readers)

    def _export(self, request: Request, key: TensorKey) -> None:
        rank = self.scheduler.placement[key.node]
        if rank in self.open_ranks:
            request.exported.clear()
            request.exporting = key
            self.transfers.append(Transfer(TensorRef(key, rank, handle=request.edit.latents), rank))

    def _are_inputs_here(self, request: Request, node: Node) -> bool:
        return not exports_needed(request, node, self.scheduler.placement)

    # Common ------------------------------------------------------------------------------------------------------

    def _ready(self, request: Request) -> list[Node]:
        return request.progress.ready(self.scheduler.workflow)

    def _is_open(self, node: Node) -> bool:
        return self.scheduler.placement[node.name] in self.open_ranks

    def _add(self, node: Node, requests: list[Request]) -> None:
        """Add the requests' items, as a batch of their own or to one of the same stage and model."""
        items = tuple(make_item(request, node, self.scheduler.placement) for request in requests)
        for request in requests:
            request.progress.start(node)
        model = ModelKey(requests[0].edit.model, node.component)
        tokens = [work_tokens(request, node) for request in requests]
        batch = self._batch_for(node, model, items)
        before = self.flights[batch.id].work.queries if batch.id in self.flights else ()
        self.flights[batch.id] = Flight(batch, Work.of([*before, *tokens]))

    def _batch_for(self, node: Node, model: ModelKey, items: tuple[Item, ...]) -> Batch:
        rank = self.scheduler.placement[node.name]
        for i, batch in enumerate(self.batches):
            if batch.stage == node.stage and batch.model == model and batch.ranks == (rank,):
                self.batches[i] = Batch(batch.id, node.stage, model, (rank,), batch.items + items)
                return self.batches[i]
        self.batches.append(Batch(self.scheduler.next_batch_id(), node.stage, model, (rank,), items))
        return self.batches[-1]
