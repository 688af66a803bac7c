"""EngineTrace: records trace spans of an engine's requests, from the messages, plans and outputs of its EngineCore.

Each request's span has one child per stage, timed by the worker; its denoising steps are one span with an event each.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from core.graph.catalog import WORKFLOWS, with_variants
from core.graph.workflow import Workflow
from core.messages.engine import AdaptersUsed, EngineRequest, Failed, Finished, Output, PartialImage, ToEngine
from core.messages.worker import Batch, BatchResult, DropWorkflow, FromWorker, LoadWorkflow, StepPlan
from engine.observability.tracing import Event, Span, Tracer


@dataclass(slots=True)
class _Steps:
    """The denoising steps of one request so far."""

    started: float = 0.0
    ended: float = 0.0
    seconds: float = 0.0
    events: list[Event] = field(default_factory=list)

    def add(self, batch: Batch, result: BatchResult) -> None:
        self.started = self.started or result.started
        self.ended = result.started + result.seconds
        self.seconds += result.seconds
        about_batch = {"stencil.batch_size": len(batch.items), "stencil.degree": len(batch.ranks)}
        facts = about_batch | {"stencil.ms": result.seconds * 1e3}
        self.events.append(Event("step", self.ended, facts))


@dataclass(slots=True)
class _Traced:
    """A traced request in the engine."""

    step_names: frozenset[str]
    span: Span
    steps: _Steps = field(default_factory=_Steps)

    def add(self, node: str, batch: Batch, result: BatchResult) -> None:
        if node in self.step_names:
            self.steps.add(batch, result)
        else:
            ended = result.started + result.seconds
            self.span.child(node, result.started, ended, {"stencil.batch_size": len(batch.items)})

    def end(self, output: Output) -> None:
        if self.steps.events:
            about_steps = {"stencil.steps": len(self.steps.events), "stencil.ms": self.steps.seconds * 1e3}
            self.span.child("denoise", self.steps.started, self.steps.ended, about_steps, self.steps.events)
        match output:
            case Finished():
                about_pages = {"stencil.cache": output.cache, "stencil.prime_ms": output.ms["prime"]}
                self.span.end(time.monotonic(), about_pages)
            case Failed():
                self.span.end(time.monotonic(), {}, output.failure.message)
            case _:
                self.span.end(time.monotonic(), {"stencil.aborted": True})


class EngineTrace:
    """One per EngineCore, which calls it for everything in order. Requests without trace context are ignored."""

    def __init__(self, tracer: Tracer, workflows: Mapping[str, Workflow] = WORKFLOWS) -> None:
        """workflows: that requests may have from the start, by name."""
        self._tracer = tracer
        self._workflows = dict(workflows)
        self._traced: dict[str, _Traced] = {}  # by request id
        self._batches: dict[int, Batch] = {}  # id -> submitted batch with a traced request

    def received(self, message: ToEngine | FromWorker) -> None:
        """EngineCore has taken a message from its mailbox."""
        match message:
            case EngineRequest(trace_context=context) if context:
                span = self._tracer.begin("engine", "internal", {"traceparent": context}, time.monotonic())
                workflow = self._workflows.get(message.workflow)
                names = frozenset[str]() if workflow is None else workflow.step_names
                self._traced[message.request_id] = _Traced(names, span)
            case LoadWorkflow(workflow=workflow):
                self._workflows |= {each.name: each for each in with_variants(workflow)}
            case DropWorkflow(name=name) if name in self._workflows:
                for each in with_variants(self._workflows[name]):
                    del self._workflows[each.name]
            case BatchResult(batch_id=batch_id, rank=rank) if batch_id in self._batches:
                if rank == self._batches[batch_id].ranks[0]:  # of several ranks the first one's times count
                    self._note(self._batches.pop(batch_id), message)

    def planned(self, plan: StepPlan) -> None:
        """EngineCore has submitted a plan to the workers."""
        for batch in plan.batches:
            if any(item.request_id in self._traced for item in batch.items):
                self._batches[batch.id] = batch

    def lost(self, rank: int) -> None:
        """A rank has died: a child span of no length shows it in the requests that it had a batch of."""
        now = time.monotonic()
        for batch in [batch for batch in self._batches.values() if rank in batch.ranks]:
            for name in {item.request_id for item in batch.items} & self._traced.keys():
                self._traced[name].span.child("rank_died", now, now, {"stencil.rank": rank})
            if batch.ranks[0] == rank:  # its times will not come
                del self._batches[batch.id]

    def sent(self, outputs: Iterable[Output]) -> None:
        """EngineCore has sent outputs to the API server."""
        for output in outputs:
            if not isinstance(output, PartialImage | AdaptersUsed) and (
                traced := self._traced.pop(output.request_id, None)
            ):
                traced.end(output)

    def _note(self, batch: Batch, result: BatchResult) -> None:
        for item in batch.items:
            if traced := self._traced.get(item.request_id):
                traced.add(item.node, batch, result)
