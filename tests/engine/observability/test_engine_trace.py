"""The spans of an engine's requests, however these end, and that no state of them is kept."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, make_edit

from core.config import SchedulerConfig
from core.errors import ConfigError
from core.failure import Failure
from core.messages.engine import EngineRequest
from core.messages.worker import BatchResult
from core.scheduling.scheduler import StepScheduler
from engine.observability.engine_trace import EngineTrace
from engine.observability.tracing import (
    NO_SPAN,
    Event,
    Span,
    SpanKind,
    Value,
    create_tracer,
    current_span,
    span_context,
)

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Recorded:
    """A recorded span."""

    start: float
    traceparent: str
    children: list[tuple[str, float, float, int]] = field(default_factory=list)  # name, start, end, number of events
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""
    num_ends: int = 0

    def child(
        self, name: str, start: float, end: float, attributes: Mapping[str, Value], events: Sequence[Event] = ()
    ) -> None:
        assert not self.num_ends
        self.children.append((name, start, end, len(events)))

    def end(self, time: float, attributes: Mapping[str, Value], error: str = "") -> None:
        assert time >= self.start
        self.attributes, self.error = attributes, error
        self.num_ends += 1


class Recorder:
    """A tracer that stores its spans."""

    def __init__(self) -> None:
        self.spans: list[Recorded] = []

    def begin(self, name: str, kind: SpanKind, carrier: Mapping[str, str], start: float) -> Span:
        assert (name, kind) == ("engine", "internal")
        self.spans.append(Recorded(start, carrier["traceparent"]))
        return self.spans[-1]

    def close(self) -> None:
        pass


class Engine:
    """A scheduler with workers that compute nothing, traced as in an EngineCore."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.trace = EngineTrace(self.recorder)
        self.scheduler = StepScheduler(SchedulerConfig(), {"m": MODEL})
        self.workers = FakeWorkers()

    def add(self, request_id: str, context: str = CONTEXT, *, steps: int = 3) -> EngineRequest:
        request = msgspec.structs.replace(make_edit(request_id, steps=steps), trace_context=context)
        self.trace.received(request)
        self.scheduler.add(request)
        return request

    def run(self, rounds: int = 50) -> None:
        """Plan, compute, apply."""
        for now in range(rounds):
            if (plan := self.scheduler.schedule(float(now))) is None:
                break
            self.trace.planned(plan)
            self.workers.submit(plan)
            for result in self.workers.run_one(0):
                assert isinstance(result, BatchResult)
                self.trace.received(result)
                self.scheduler.apply(result)
            self.tell()

    def tell(self) -> None:
        self.trace.sent(self.scheduler.take_outputs())

    def assert_nothing_kept(self) -> None:
        assert not self.trace._traced
        assert not self.trace._batches


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_two_requests_that_share_steps_have_their_own_stages(engine: Engine) -> None:
    engine.add("a", steps=3)
    engine.add("b", steps=5)
    engine.run()
    for span, steps in zip(engine.recorder.spans, (3, 5), strict=True):
        assert span.traceparent == CONTEXT
        assert sorted(name for name, *_ in span.children) == ["decode", "denoise", "image_encode", "text_encode"]
        (denoise,) = [child for child in span.children if child[0] == "denoise"]
        assert denoise[3] == steps
        assert (span.num_ends, span.error, span.attributes["stencil.cache"]) == (1, "", "off")
    engine.assert_nothing_kept()


def test_requests_that_are_not_traced_leave_nothing(engine: Engine) -> None:
    engine.add("a", context="")
    engine.run()
    assert engine.recorder.spans == []
    engine.assert_nothing_kept()


def test_an_abort_ends_the_span_with_what_was_done(engine: Engine) -> None:
    engine.add("a", steps=9)
    engine.run(rounds=4)
    engine.scheduler.abort(["a"])
    engine.tell()
    (span,) = engine.recorder.spans
    assert (span.num_ends, span.error, span.attributes) == (1, "", {"stencil.aborted": True})
    (denoise,) = [child for child in span.children if child[0] == "denoise"]
    assert 0 < denoise[3] < 9
    engine.assert_nothing_kept()


def test_the_span_of_a_failure_has_its_reason(engine: Engine) -> None:
    engine.add("a")
    engine.scheduler.fail_all(Failure.of(RuntimeError("the worker burnt down")))
    engine.tell()
    (span,) = engine.recorder.spans
    assert (span.num_ends, span.children) == (1, [])
    assert "burnt down" in span.error
    engine.assert_nothing_kept()


def test_a_rank_that_dies_is_seen_in_the_spans_of_what_it_ran(engine: Engine) -> None:
    engine.add("a", steps=6)
    engine.add("not traced", context="", steps=6)
    engine.run(rounds=3)
    plan = engine.scheduler.schedule(3.0)
    assert plan is not None
    engine.trace.planned(plan)
    engine.workers.submit(plan)
    engine.workers.lose(0)
    engine.scheduler.lose_rank(0, Failure("engine_dead", "it died"))
    engine.trace.lost(0)
    engine.workers.join(0)
    engine.scheduler.join_rank(0, ())
    engine.run()
    (span,) = engine.recorder.spans
    names = [name for name, *_ in span.children]
    assert names.count("rank_died") == 1
    assert names.count("text_encode") == 2, "it is done again"
    engine.assert_nothing_kept()


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "engine.observability.otlp_tracing", raising=False)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint .* pip install 'stencil-serve\[otel\]'"):
        create_tracer("http://localhost:4318/v1/traces", "api")


def test_without_an_endpoint_spans_are_nothing() -> None:
    tracer = create_tracer("", "api")
    span = tracer.begin("request", "server", {"traceparent": CONTEXT}, 0.0)
    assert span.traceparent == ""
    assert current_span() is NO_SPAN
    recorded = Recorded(0.0, "")
    with span_context(recorded):
        assert current_span() is recorded
    assert current_span() is NO_SPAN
