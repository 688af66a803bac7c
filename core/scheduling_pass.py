"""SchedulingPass: one look at the requests with the budgets of one iteration; chooses what goes into the next plan.

It dies with the pass. It moves requests on (`Progress.start`, `move_to`) as it chooses them; what it leaves behind is
`batches`, the `works` that say how large each batch is, and `transfers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from core.config import SchedulerConfig
from core.cost_model import Work
from core.handles import ModelKey, TensorKey, TensorRef
from core.messages import (
    Batch,
    Transfer,
)
from core.request import Request, Status
from core.stage_work import exports_needed, make_item, work_tokens
from core.stages import Node, Placement, Workflow

Predict = Callable[[Request, Node], float]
"""Seconds that running a node once takes for a request alone."""


@dataclass(slots=True)
class SchedulingPass:
    """Made with everything it may look at; `run` is called once."""

    config: SchedulerConfig
    workflow: Workflow
    placement: Placement
    open_ranks: set[int]  # ranks that may be given work
    predict: Predict
    batch_ids: Iterator[int]
    batches: list[Batch] = field(default_factory=list)
    works: dict[int, Work] = field(default_factory=dict)  # batch id -> its size
    transfers: list[Transfer] = field(default_factory=list)
    _candidates: list[tuple[Request, list[Node]]] = field(default_factory=list)  # most urgent first, with ready nodes
    _stage_ms: dict[int, float] = field(default_factory=dict)  # rank -> predicted milliseconds of stage work chosen

    def run(self, requests: Iterable[Request]) -> None:
        """Choose among live requests, given most urgent first. Finishing work first (it frees places), then encoding,
        previews, and the step."""
        self._candidates = [(request, request.progress.ready(self.workflow)) for request in self._admit(requests)]
        self._choose_transfers()
        for is_wanted in (self._is_output, self._is_source, _is_side):
            self._choose_stage_work(is_wanted)
        self._choose_step()

    def _admit(self, requests: Iterable[Request]) -> list[Request]:
        """Those that run, and as many waiting ones as there are places among those that have steps to do."""
        requests = list(requests)
        stepping = sum(r.status is Status.RUNNING and r.progress.steps_left > 0 for r in requests)
        places = self.config.max_num_seqs - stepping
        admitted = []
        for request in requests:
            if request.status is Status.RUNNING:
                admitted.append(request)
            elif places > 0:
                places -= 1
                admitted.append(request)
        return admitted

    # ------------------------------------------------------------------------------------------------ stage work

    def _choose_stage_work(self, is_wanted: Callable[[Node], bool]) -> None:
        for request, ready in self._candidates:
            nodes = [node for node in ready if is_wanted(node) and self._can_run(request, node)]
            if nodes:
                self._choose_nodes(request, nodes)

    def _is_output(self, node: Node) -> bool:
        return node.name == self.workflow.output

    def _is_source(self, node: Node) -> bool:
        return node.kind == "once" and not self._is_output(node)

    def _can_run(self, request: Request, node: Node) -> bool:
        is_open = self.placement[node.name] in self.open_ranks
        return is_open and not exports_needed(request, node, self.placement)

    def _choose_nodes(self, request: Request, nodes: Sequence[Node]) -> None:
        """All of these nodes or, where the time budget of a rank is spent, none. One item always goes."""
        rank = self.placement[nodes[0].name]
        ms = sum(self.predict(request, node) for node in nodes) * 1e3
        spent = self._stage_ms.get(rank)
        if spent is not None and spent + ms > self.config.max_stage_ms:
            return
        self._stage_ms[rank] = (spent or 0.0) + ms
        for node in nodes:
            self._add(node, [request])
        if request.status is Status.WAITING:
            request.move_to(Status.RUNNING)

    # ------------------------------------------------------------------------------------------------ the step

    def _choose_step(self) -> None:
        """One batch per model of the most urgent requests that fit; one above the token budget runs alone."""
        loop = self.workflow.loop
        chosen: dict[str, list[Request]] = {}  # model -> requests
        num_seqs = num_tokens = 0
        for request, ready in self._candidates:
            if loop not in ready or not self._can_run(request, loop):
                continue
            tokens = num_tokens + request.num_step_tokens
            if num_seqs == self.config.max_num_seqs or (num_seqs and tokens > self.config.max_num_batched_tokens):
                break
            chosen.setdefault(request.edit.model, []).append(request)
            num_seqs, num_tokens = num_seqs + 1, tokens
        for requests in chosen.values():
            self._add(loop, requests)

    # ------------------------------------------------------------------------------------------------ between ranks

    def _choose_transfers(self) -> None:
        """Export what a ready node on another rank reads; a request has one place in shared memory for that."""
        for request, ready in self._candidates:
            for node in ready:
                missing = exports_needed(request, node, self.placement)
                if missing and self._is_handle_free(request):
                    self._export(request, missing[0])

    def _is_handle_free(self, request: Request) -> bool:
        """Whether nothing writes or reads the request's place in shared memory. What lies there unread (a preview that
        the last step overtook) may be overwritten."""
        readers = (node for node in self.workflow.nodes if node.stage == "decode")
        return request.exporting is None and not any(node.name in request.progress.in_flight for node in readers)

    def _export(self, request: Request, key: TensorKey) -> None:
        rank = self.placement[key.node]
        if rank in self.open_ranks:
            request.exported.clear()
            request.exporting = key
            self.transfers.append(Transfer(TensorRef(key, rank, handle=request.edit.latents), rank))

    # ------------------------------------------------------------------------------------------------ batches

    def _add(self, node: Node, requests: Sequence[Request]) -> None:
        """Add the requests' items to the batch of the same stage, model and rank, or make it."""
        items = tuple(make_item(request, node, self.placement) for request in requests)
        for request in requests:
            request.progress.start(node)
        batch = self._take_batch(node, ModelKey(requests[0].edit.model, node.component))
        before = self.works[batch.id].queries if batch.id in self.works else ()
        self.works[batch.id] = Work.of([*before, *(work_tokens(request, node) for request in requests)])
        self.batches.append(Batch(batch.id, batch.stage, batch.model, batch.ranks, batch.items + items))

    def _take_batch(self, node: Node, model: ModelKey) -> Batch:
        """The batch chosen so far that takes such items, off the list; else an empty one."""
        ranks = (self.placement[node.name],)
        for batch in self.batches:
            if (batch.stage, batch.model, batch.ranks) == (node.stage, model, ranks):
                self.batches.remove(batch)
                return batch
        return Batch(next(self.batch_ids), node.stage, model, ranks, ())


def _is_side(node: Node) -> bool:
    return node.kind == "side"
