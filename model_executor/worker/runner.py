"""Runner: computes a worker's batches. Batch -> tensors -> forward pass -> BatchResult.

The runner has no state per request: inputs and outputs are named by the plan and lie in the tensor store. Most ops
compute one item at a time, so an error fails that item only. Denoising steps and priming chunks compute all items in
one forward pass, which fails as a whole and is then tried in halves (`attempt_in_halves`).

A batch of several ranks is computed by all of them together and is not halved: where one fails, it leaves the group,
and so the batch fails on all. A rank that ran out of memory frees some first, since the retry may be its own.

A pass that fails leaves nothing behind, so it can be repeated. Steps store new tensors only after all are computed.
Pages and pixels, which are written in place, are not read before the result reports them done, and the next attempt
writes them from the start. What is computed once for all steps (modulation, active tokens, a prompt's embedding) is
stored when complete, and does not depend on anything that changes.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch

from core.errors import GroupBrokenError
from core.failure import Failure
from core.graph.op import OPS
from core.ipc.logs import of_request
from core.messages.worker import Batch, BatchResult, Item, ItemResult
from model_executor.device_failures import free_memory, our_error, wait_for_device
from model_executor.parallel.groups import Groups
from model_executor.worker.halving import attempt_in_halves
from model_executor.worker.ops import HANDLERS, Handler
from model_executor.worker.ops.context import WorkerContext

logger = logging.getLogger("stencil.worker")

Attempt = Callable[[Sequence[Item]], list[ItemResult] | Failure]


class Runner:
    """Runs the batches of one worker."""

    def __init__(self, rank: int, context: WorkerContext, groups: Groups | None = None) -> None:
        """groups: None in an engine with one rank."""
        self._rank = rank
        self._context = context
        self._groups = groups

    @torch.inference_mode()
    def run(self, batch: Batch) -> BatchResult:
        """Run a batch. Items that fail carry their Failure in the result. Raises only errors of a broken device, on
        which everything would fail."""
        started = time.monotonic()
        attempt = partial(self._attempt, HANDLERS[batch.op], batch)
        share_pass = OPS[batch.op].sharing == "together"
        passes = [batch.items] if share_pass else [(item,) for item in batch.items]
        self._context.exchange.begin_batch(batch)
        with self._context.weights(batch.items[0].model, OPS[batch.op].component):
            if len(batch.ranks) == 1 or OPS[batch.op].parallel == "none":
                done = [attempt_in_halves(items, attempt, self._free_memory) for items in passes]
            else:
                done = [(self._attempt_together(batch, attempt), 1)]
        self._context.exchange.finish_batch()
        return BatchResult(
            batch_id=batch.id,
            rank=self._rank,
            started=started,
            seconds=time.monotonic() - started - self._context.exchange.take_waited(),
            items=tuple(result for results, _ in done for result in results),
            num_parts=1 + sum(num_parts - 1 for _, num_parts in done),
        )

    def _free_memory(self) -> None:
        """Free what only makes things faster before the next attempt: graphs of steps, and unused memory."""
        for family in self._context.models.values():
            family.drop_graphs()
        free_memory()

    def _attempt_together(self, batch: Batch, attempt: Attempt) -> list[ItemResult]:
        """The results of a batch of several ranks, which succeed or fail together."""
        assert self._groups is not None, "an engine with one rank has no groups"
        try:
            self._context.group = self._groups.of(batch.ranks, batch.epoch, batch.port)
            results = attempt(batch.items)
        except GroupBrokenError as error:
            results = Failure.of(error)
        finally:
            self._context.group = None
        if not isinstance(results, Failure):
            return results
        self._groups.abort(batch.ranks)
        if results.kind == "out_of_memory":
            self._free_memory()
        failure = msgspec.structs.replace(results, kind="group_broken")
        return [ItemResult(item.request_id, item.node, failure=failure) for item in batch.items]

    def _attempt(self, handler: Handler, batch: Batch, items: Sequence[Item]) -> list[ItemResult] | Failure:
        """The results of items that succeed or fail together. After a failure nothing refers to what was computed.
        Raises if the device itself is broken: after a failed kernel all later ones fail, and only a new process helps.
        """
        try:
            results = handler(self._context, items)
            if self._context.group is not None:
                self._context.group.meet()
            wait_for_device()  # results contain the time taken, and a failed kernel raises only here
            return results
        except Exception as error:  # the outermost handler: every failure becomes a message to the waiting requests
            failure, cause = Failure.of(our_error(error), traceback.format_exc()), f"{type(error).__name__}: {error}"
        names = ", ".join(item.request_id for item in items)
        logger.warning("%s of %s failed: %s", items[0].node, names, cause, extra=of_request(""))
        if self._context.group is not None and self._groups is not None:
            # First: what is queued may wait for members that have failed, too, and they for this one.
            self._context.group = None  # its connections close with the last reference
            self._groups.abort(batch.ranks)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return failure
