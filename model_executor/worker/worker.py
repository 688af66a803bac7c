"""The worker's loop: executes the engine's plans in order. `runner.py` computes their batches."""

from __future__ import annotations

from core.messages.worker import (
    DropAdapter,
    DropWorkflow,
    LoadAdapter,
    LoadWorkflow,
    Shutdown,
    StepPlan,
    TransferDone,
)
from model_executor.worker.engine_link import EngineLink
from model_executor.worker.loading.adapter_loader import AdapterLoader
from model_executor.worker.loading.component_loader import ComponentLoader
from model_executor.worker.loading.workflow_loader import WorkflowLoader
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.orders import Orders
from model_executor.worker.runner import Runner


class Worker:
    """Executes one plan after the other, and sends each batch's result as soon as it is done."""

    def __init__(
        self,
        rank: int,
        link: EngineLink,
        orders: Orders,
        loader: ComponentLoader,
        context: WorkerContext,
        runner: Runner,
        adapters: AdapterLoader,
        workflows: WorkflowLoader,
    ) -> None:
        self._rank, self._link, self._orders, self._runner = rank, link, orders, runner
        self._loader, self._adapters, self._workflows = loader, adapters, workflows
        self._store, self._pages, self._exchange = context.store, context.pages, context.exchange

    def run(self) -> None:
        """Do as the engine says, until a Shutdown. Raises PeerClosedError when the engine is gone, MessageError for
        what cannot be decoded, and other errors that do not belong to one request, such as a tensor to move that is
        missing."""
        while not isinstance(message := self._orders.next(), Shutdown):
            match message:
                case StepPlan():
                    self._execute(message)
                case LoadAdapter():
                    self._adapters.load(message)
                case DropAdapter():
                    self._adapters.drop(message)
                case LoadWorkflow():
                    self._workflows.load(message)
                case DropWorkflow():
                    self._workflows.drop(message)

    def close(self) -> None:
        """End the I/O thread; queued copies are dropped, and no load is waited for."""
        self._pages.close()
        self._exchange.close()

    def _execute(self, plan: StepPlan) -> None:
        """Execute a plan in the order that StepPlan defines."""
        for free in plan.free:
            self._store.free(free.key)
        for load in plan.loads:
            for component in load.drop:
                self._loader.unload(component)
            for component in load.load:
                self._loader.load(component)
        self._pages.forget(each.key for each in plan.forget)
        self._pages.delete(plan.delete)
        for copy in plan.copies:
            self._pages.start(copy)
        self._exchange.begin_plan(plan.seq, plan.deliveries, plan.batches)
        for transfer in plan.transfers:
            self._link.send(TransferDone(rank=self._rank, ref=self._store.export(transfer.ref)))
        for batch in plan.batches:
            result = self._runner.run(batch)
            self._exchange.end_batch(batch)
            self._link.send(result)
