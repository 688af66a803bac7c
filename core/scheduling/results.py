"""Results: takes over what a batch has made: progress, values, what the cache needs to know, messages for clients."""

from __future__ import annotations

from dataclasses import dataclass

from core.graph.workflow import Node, op_of
from core.messages.engine import PartialImage
from core.messages.worker import Batch, BatchResult, ItemResult
from core.scheduling.endings import Endings, finished
from core.scheduling.node_cache import NodeCache
from core.scheduling.ops.request_op import request_op
from core.scheduling.ranks.in_flight import Flight
from core.scheduling.recovery.checkpoints import Checkpoints
from core.scheduling.recovery.recovery import Recovery
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request, Status
from core.scheduling.values.inputs import is_ahead
from core.scheduling.values.request_values import note_choice, note_values
from core.scheduling.values.values import ValueTable


@dataclass(frozen=True, slots=True)
class Results:
    """Part of one scheduler. It changes the requests of a batch; the scheduler notes the batch as a whole."""

    requests: LiveRequests
    values: ValueTable
    cache: NodeCache
    endings: Endings
    recovery: Recovery
    checkpoints: Checkpoints

    def is_in_turn(self, flight: Flight) -> bool:
        """Whether all runs that the batch has read from are noted. Another rank did them before, but may answer later
        than the ranks of this batch.
        """
        items = () if flight.job_id else flight.batch.items
        return not any(is_ahead(self.requests[item.request_id], item) for item in items)

    def apply(self, flight: Flight, result: BatchResult) -> None:
        """Note the result of a batch that is in turn. result: that of all its ranks."""
        if flight.job_id:
            return self.apply_job(flight.job_id, result)
        for item in result.items:
            self._apply_item(self.requests[item.request_id], item, result, flight.batch)

    def apply_job(self, job_id: str, result: BatchResult) -> None:
        """Note the result of a piece of the cache's job."""
        for request_id, failure in self.cache.finish(job_id, result).items():
            self.endings.fail(self.requests[request_id], failure)
        self.endings.outputs += self.cache.take_answers()
        self.endings.finish_lenders()

    def settle(self, request: Request) -> None:
        """Let a request resume or end if it has waited for something that is over now."""
        self.recovery.settle(request)
        self.endings.finish(request)

    def _apply_item(self, request: Request, item: ItemResult, result: BatchResult, batch: Batch) -> None:
        node = request.workflow.node(item.node)
        request.note_answer(node)
        seconds, part = request.part_seconds, op_of(node).part
        seconds[part] = seconds.get(part, 0.0) + result.seconds
        request.note_run(result.started, result.started + result.seconds)
        if request.is_set_back:
            request.progress.land(node)
        elif item.failure is not None and item.failure.kind == "pages_lost":
            request.progress.retry(node)
        elif item.failure is not None and item.failure.kind == "group_broken":
            self.recovery.set_back_alone(request, node)
        elif item.failure is not None:
            request.progress.land(node)
            self.endings.fail(request, item.failure)
        else:
            if node in request.workflow.counted_steps:
                request.steps_alone = max(0, request.steps_alone - 1)
            self._advance(request, node, item, batch)
            if node.region and request.is_live:
                self.checkpoints.note_round(request, node, result.seconds / len(batch.items))
        self.requests.note_progress(request)
        self.settle(request)

    def _advance(self, request: Request, node: Node, item: ItemResult, batch: Batch) -> None:
        """Note a run of a node that has succeeded, which may be the last one of its request."""
        progress = request.progress
        round_, index = progress.round_done(node), progress.pending.get(node.name, 0)
        progress.finish(node)
        if not request.is_live:  # its values are freed together: an earlier run may not have read them yet
            return
        request_op(node).note(request, item)
        note_values(self.values, request, node, round_, item.tensors, batch)
        if node.chooses:
            note_choice(self.values, request, node, item.chosen)
        self.cache.note_result(request, node, item)
        if request.workflow.is_preview(node):
            step = request.first_step(request.workflow.node(node.shows).region) + round_
            self.endings.outputs.append(PartialImage(request_id=request.id, index=index, step=step))
        elif self._has_ended(request, node) and not self.cache.must_restart(request):
            self.endings.end(request, Status.FINISHED, finished(request, self.cache.outcome(request)))

    @staticmethod
    def _has_ended(request: Request, node: Node) -> bool:
        """Whether a node has made the last of a request's results."""
        makers = request.workflow.output_names
        return node.name in makers and request.progress.over.issuperset(makers)
