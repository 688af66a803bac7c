"""SchedulingPass: chooses the content of the next plan, within the budgets of one iteration.

A short-lived object, made for one pass. It advances requests (`Progress.start`, `move_to`) as it chooses them; its
results are `batches`, their sizes (`works`), the priming `jobs` among them, `transfers` and `begun`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from core.cache.page_reservations import PageReservations
from core.cache.priming import Chunk, PrimingJob
from core.config import PRIME_SHARE, SchedulerConfig
from core.graph.op import Op
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.handles import ModelKey, TensorKey, Tier
from core.messages.worker import Batch, Item, Transfer
from core.scheduling.batch_items import chunk_items, chunk_work, inputs_elsewhere, latents_item, make_item, node_work
from core.scheduling.deadlines import MayJoin
from core.scheduling.ops.prime import PRIME
from core.scheduling.ops.template_encode import TEMPLATE_ENCODE
from core.scheduling.request import Request, Status
from core.scheduling.values import ValueTable

PAGE_RANK = 0
"""The rank that has the page tier: jobs of the activation cache run there."""

PredictWork = Callable[[str, Op, Work], float]
"""(model, op, work) -> predicted seconds of running the op once."""

BlockPlan = Callable[[Request, list[tuple[Tier, int]]], tuple[int, ...]]
"""The blocks to compute in full at a request's next step while entries of (tier, bytes) are being loaded."""


@dataclass(slots=True)
class SchedulingPass:
    """One pass; `run` is called once."""

    # Inputs, all from the scheduler.
    config: SchedulerConfig
    pages: PageReservations
    values: ValueTable
    open_ranks: set[int]  # ranks that may be given work
    idle_ranks: set[int]  # those of them that have none
    predict: PredictWork
    block_plan: BlockPlan | None  # None: a step waits until all of its pages are loaded
    batch_ids: Iterator[int]
    max_step_tokens: int  # token budget of a step together with what is primed beside it
    may_join: MayJoin | None  # None: no request has a due time; a free slot is enough
    # Results.
    batches: list[Batch] = field(default_factory=list)
    works: dict[int, Work] = field(default_factory=dict)  # batch id -> its size
    jobs: dict[int, tuple[PrimingJob, Chunk | None]] = field(default_factory=dict)  # batch id -> what it primes
    transfers: list[Transfer] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)  # ids of requests that were waiting before
    # State of the pass.
    _candidates: list[tuple[Request, list[Node]]] = field(default_factory=list)  # most urgent first, with ready nodes
    _stage_ms: dict[int, float] = field(default_factory=dict)  # rank -> predicted milliseconds of stage work chosen

    def run(self, requests: Iterable[Request]) -> None:
        """Choose among live requests, given most urgent first: work that finishes requests (it frees memory), template
        encodings, other encodings and previews, the step, and priming beside it."""
        self._candidates = [(request, request.progress.ready(request.workflow)) for request in self._admit(requests)]
        self._choose_transfers()
        self._choose_stage_work(self._is_output)
        self._choose_template_encodes()
        self._choose_stage_work(self._is_source_or_side)
        self._choose_priming(self._choose_step())

    def _admit(self, requests: Iterable[Request]) -> list[Request]:
        """The running requests, and as many waiting ones as there are free slots. A request that would make others late
        waits; one with `runs_alone` waits until nothing runs. No later request overtakes either of them.
        """
        requests = list(requests)
        if any(r.head.runs_alone and r.status is Status.RUNNING for r in requests):
            return [r for r in requests if r.status is Status.RUNNING]
        stepping = sum(r.status is Status.RUNNING and r.progress.steps_left > 0 for r in requests)
        slots = self.config.max_num_seqs - stepping
        is_idle = not any(r.status is Status.RUNNING for r in requests)
        admitted: list[Request] = []
        for request in requests:
            if request.status is Status.RUNNING:
                admitted.append(request)
            elif request.head.runs_alone:
                if is_idle and not admitted:
                    return [request]
                slots = 0
            elif slots > 0 and (self.may_join is None or self.may_join(request)):
                slots -= 1
                admitted.append(request)
            else:
                slots = 0
        return admitted

    # ------------------------------------------------------------------------------------------------ stage work

    def _choose_stage_work(self, is_wanted: Callable[[Request, Node], bool]) -> None:
        for request, ready in self._candidates:
            nodes = [node for node in ready if is_wanted(request, node) and self._can_run(request, node)]
            if nodes:
                self._choose_nodes(request, nodes)

    def _is_output(self, request: Request, node: Node) -> bool:
        return node.name == request.workflow.output

    def _is_source_or_side(self, request: Request, node: Node) -> bool:
        """Chosen together, so that encodings of new requests do not delay a preview that its request waits for."""
        return node.kind != "loop" and not self._is_output(request, node)

    def _can_run(self, request: Request, node: Node) -> bool:
        is_open = request.placement[node.name] in self.open_ranks
        return is_open and not inputs_elsewhere(request, node, self.values) and self._has_pages(request, node)

    def _has_pages(self, request: Request, node: Node) -> bool:
        """Whether the cached activations that the node reads are available."""
        reservation, step = request.reservation, request.progress.steps_scheduled
        use = op_of(node).pages
        if use == "latents":
            return reservation is None or (reservation.is_reserved and self.pages.has_latents(reservation.template))
        if use == "none" or not request.spec.is_masked_step(step):
            return True
        if reservation is None or not reservation.is_reserved or not self.pages.has_latents(reservation.template):
            return False
        may_load = self.block_plan is not None and not reservation.is_primed
        return self.pages.span(reservation, request.sigmas[step], may_load=may_load) is not None

    def _choose_nodes(self, request: Request, nodes: Sequence[Node]) -> None:
        """Choose all of these nodes, or none if they exceed the rank's time budget. The first choice always fits."""
        rank = request.placement[nodes[0].name]
        if not self._spend_stage_ms(rank, sum(self._predict_alone(request, node) for node in nodes) * 1e3):
            return
        for node in nodes:
            self._add([(request, node)])
        if request.status is Status.WAITING:
            request.move_to(Status.RUNNING)
            self.begun.append(request.id)

    def _predict_alone(self, request: Request, node: Node) -> float:
        return self.predict(request.head.model, op_of(node), node_work(request, node))

    def _spend_stage_ms(self, rank: int, ms: float) -> bool:
        """Charge predicted milliseconds to a rank's time budget; False if they exceed what is left."""
        spent = self._stage_ms.get(rank)
        if spent is not None and spent + ms > self.config.max_stage_ms:
            return False
        self._stage_ms[rank] = (spent or 0.0) + ms
        return True

    # ------------------------------------------------------------------------------------------------ the step

    def _choose_step(self) -> int:
        """Choose the most urgent requests that fit, in one batch per model and op; returns the step's tokens. A request
        above the token budget runs by itself.
        """
        chosen: dict[tuple[str, str], list[Request]] = {}  # (model, op of the loop) -> requests
        num_seqs = num_tokens = 0
        for request, ready in self._candidates:
            loop = request.workflow.loop
            if loop not in ready or not self._can_run(request, loop):
                continue
            tokens = num_tokens + request.num_step_tokens * request.spec.num_rows
            if num_seqs == self.config.max_num_seqs or (num_seqs and tokens > self.max_step_tokens):
                break
            self._plan_blocks(request)
            chosen.setdefault((request.head.model, loop.op), []).append(request)
            num_seqs, num_tokens = num_seqs + 1, tokens
        for requests in chosen.values():
            self._add([(request, request.workflow.loop) for request in requests])
        return num_tokens

    def _plan_blocks(self, request: Request) -> None:
        """Decide which blocks its next step computes in full because their pages are still being loaded."""
        reservation, step = request.reservation, request.progress.steps_scheduled
        if reservation is not None and self.block_plan is not None and request.spec.is_masked_step(step):
            loading = self.pages.loading(reservation, request.sigmas[step])
            reservation.full_blocks = self.block_plan(request, loading) if loading else ()

    # ------------------------------------------------------------------------------------------------ priming

    def _choose_priming(self, step_tokens: int) -> None:
        """Choose chunks of jobs, oldest first, within the tokens that the step leaves; at least one block."""
        budget = self.max_step_tokens - step_tokens
        if step_tokens:
            budget = min(budget, int(PRIME_SHARE * step_tokens))
        has_primed = False
        for job in self.pages.jobs():
            if not self._can_prime(job):
                continue
            if self.pages.needs_latents(job):
                if self.pages.is_idle_work(job):
                    self._encode_template(job)
            elif not has_primed or budget > 0:
                # Idle work runs block by block, so that a new request waits for at most one block.
                budget -= self._prime(job, 0 if self.pages.is_idle_work(job) else budget)
                has_primed = True

    def _choose_template_encodes(self) -> None:
        """Runs before new requests are encoded: those that wait for a template arrived earlier."""
        for job in self.pages.jobs():
            if self.pages.needs_latents(job) and not self.pages.is_idle_work(job) and self._can_prime(job):
                self._encode_template(job)

    def _can_prime(self, job: PrimingJob) -> bool:
        rank, is_idle_work = PAGE_RANK, self.pages.is_idle_work(job)
        has_time = rank in self.idle_ranks and not self.batches if is_idle_work else rank in self.open_ranks
        return has_time and self.pages.can_start(job)

    def _encode_template(self, job: PrimingJob) -> None:
        work = Work.of([job.template.num_tokens])
        if self._spend_stage_ms(PAGE_RANK, self.predict(job.template.model, TEMPLATE_ENCODE, work) * 1e3):
            self._add_job(job, None, TEMPLATE_ENCODE, (latents_item(job, self.pages),), work)

    def _prime(self, job: PrimingJob, budget: int) -> int:
        """Add the job's next chunk; returns its tokens."""
        chunk = self.pages.start_chunk(job, budget)
        self._add_job(job, chunk, PRIME, chunk_items(job, chunk, self.pages), chunk_work(job, chunk))
        return chunk.tokens

    def _add_job(self, job: PrimingJob, chunk: Chunk | None, op: Op, items: tuple[Item, ...], work: Work) -> None:
        """Add a batch for this job alone, since chunks of different jobs end at different times."""
        model = ModelKey(job.template.model, op.component)
        batch = Batch(next(self.batch_ids), op.name, model, (PAGE_RANK,), items)
        self.batches.append(batch)
        self.works[batch.id], self.jobs[batch.id] = work, (job, chunk)

    # ------------------------------------------------------------------------------------------------ between ranks

    def _choose_transfers(self) -> None:
        """Move values that ready nodes on other ranks read."""
        for request, ready in self._candidates:
            for node in ready:
                missing = inputs_elsewhere(request, node, self.values)
                if missing and self._can_send(missing):
                    transfers = self.values.move(missing) or ()
                    request.num_moving += len(transfers)
                    self.transfers += transfers

    def _can_send(self, keys: Sequence[TensorKey]) -> bool:
        """Whether the ranks that have these values may be given work."""
        return all((value := self.values.get(key)) and value.ref.rank in self.open_ranks for key in keys)

    # ------------------------------------------------------------------------------------------------ batches

    def _add(self, invocations: Sequence[tuple[Request, Node]]) -> None:
        """Add items for nodes of one op, model and rank to the batch of these; create it if there is none."""
        items = tuple(make_item(request, node, self.pages, self.values) for request, node in invocations)
        work = sum((node_work(request, node) for request, node in invocations), Work((), ()))
        for request, node in invocations:
            request.progress.start(node)
        request, node = invocations[0]
        model = ModelKey(request.head.model, op_of(node).component)
        batch = self._take_batch(node.op, model, (request.placement[node.name],))
        self.works[batch.id] = self.works.get(batch.id, Work((), ())) + work
        self.batches.append(Batch(batch.id, batch.op, batch.model, batch.ranks, batch.items + items))

    def _take_batch(self, op: str, model: ModelKey, ranks: tuple[int, ...]) -> Batch:
        """Remove and return the batch chosen so far that takes such items; without one, a new empty batch."""
        for batch in self.batches:
            if (batch.op, batch.model, batch.ranks) == (op, model, ranks) and batch.id not in self.jobs:
                self.batches.remove(batch)
                return batch
        return Batch(next(self.batch_ids), op, model, ranks, ())
