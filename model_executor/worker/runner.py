"""Runner: computes a worker's batches. Batch -> tensors -> forward pass -> BatchResult.

The runner has no state per request: inputs and outputs are named by the plan and lie in the tensor store. Most ops
compute one item at a time, so an error fails that item only. Denoising steps and priming chunks compute all items in
one forward pass, which fails as a whole and is then tried in halves (`attempt_in_halves`).

A pass that fails leaves nothing behind, so it can be repeated. Steps store new tensors only after all are computed.
Pages and pixels, which are written in place, are not read before the result reports them done, and the next attempt
writes them from the start. What is computed once for all steps (modulation, active tokens, a prompt's embedding) is
stored when complete, and does not depend on anything that changes.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Sequence
from functools import partial

import torch

from core.failure import Failure
from core.graph.op import OPS
from core.ipc.logs import of_request
from core.messages.worker import Batch, BatchResult, Item, ItemResult
from core.scheduling.halving import attempt_in_halves
from model_executor.worker.device_failures import free_memory, our_error, wait_for_device
from model_executor.worker.ops import HANDLERS, Handler
from model_executor.worker.ops.context import WorkerContext

logger = logging.getLogger("stencil.worker")


class Runner:
    """Runs the batches of one worker."""

    def __init__(self, rank: int, context: WorkerContext) -> None:
        self._rank = rank
        self._context = context

    @torch.inference_mode()
    def run(self, batch: Batch) -> BatchResult:
        """Run a batch. Items that fail carry their Failure in the result. Raises only errors of a broken device, on
        which everything would fail."""
        started = time.monotonic()
        attempt = partial(self._attempt, HANDLERS[batch.op], batch.model)
        share_pass = OPS[batch.op].sharing == "together"
        groups = [batch.items] if share_pass else [(item,) for item in batch.items]
        self._context.exchange.begin_batch(batch)
        done = [attempt_in_halves(group, attempt, free_memory) for group in groups]
        self._context.exchange.finish_batch()
        return BatchResult(
            batch_id=batch.id,
            rank=self._rank,
            started=started,
            seconds=time.monotonic() - started - self._context.exchange.take_waited(),
            items=tuple(result for results, _ in done for result in results),
            num_parts=1 + sum(num_parts - 1 for _, num_parts in done),
        )

    def _attempt(self, handler: Handler, model: str, items: Sequence[Item]) -> list[ItemResult] | Failure:
        """The results of items that succeed or fail together. After a failure nothing refers to what was computed.
        Raises if the device itself is broken: after a failed kernel all later ones fail, and only a new process helps.
        """
        try:
            results = handler(self._context, model, items)
            wait_for_device()  # results contain the time taken, and a failed kernel raises only here
            return results
        except Exception as error:  # the outermost handler: every failure becomes a message to the waiting requests
            failure, cause = Failure.of(our_error(error), traceback.format_exc()), f"{type(error).__name__}: {error}"
        names = ", ".join(item.request_id for item in items)
        logger.warning("%s of %s failed: %s", items[0].node, names, cause, extra=of_request(""))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return failure
