"""OtlpTracer: sends spans by OTLP over HTTP with OpenTelemetry. Imported only if traces are enabled.

Uses a provider of its own, not OpenTelemetry's global one. The usual environment variables apply: OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_SCHEDULE_DELAY and so on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.observability.tracing import FLUSH_SECONDS, Event, Span, SpanKind, Value

_KINDS: dict[SpanKind, trace.SpanKind] = {"server": trace.SpanKind.SERVER, "internal": trace.SpanKind.INTERNAL}
_PROPAGATOR = TraceContextTextMapPropagator()
_SERVICE = "stencil"


class OtlpTracer:
    """A Tracer. Recording a span takes some microseconds; a thread of OpenTelemetry's SDK sends it."""

    def __init__(self, endpoint: str, process: str) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", _SERVICE)
        resource = Resource.create({"service.name": name, "process.pid": os.getpid(), "stencil.process": process})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer(_SERVICE)
        self._offset_ns = time.time_ns() - time.monotonic_ns()  # wall clock minus CLOCK_MONOTONIC

    def begin(self, name: str, kind: SpanKind, carrier: Mapping[str, str], start: float) -> Span:
        context = _PROPAGATOR.extract(carrier)
        span = self._tracer.start_span(name, context, _KINDS[kind], start_time=self.wall_ns(start))
        return OtlpSpan(self, span)

    def child(self, parent: trace.Span, name: str, start: float) -> trace.Span:
        context = trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context, start_time=self.wall_ns(start))

    def wall_ns(self, moment: float) -> int:
        """A time of CLOCK_MONOTONIC in seconds as nanoseconds since 1970."""
        return int(moment * 1e9) + self._offset_ns

    def close(self) -> None:
        # In a thread: the SDK waits up to 30 s for a collector that does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="otlp-close", daemon=True)
        closing.start()
        closing.join(FLUSH_SECONDS)


class OtlpSpan:
    """Implements `Span`."""

    def __init__(self, tracer: OtlpTracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        return carrier.get("traceparent", "")

    def child(
        self, name: str, start: float, end: float, attributes: Mapping[str, Value], events: Sequence[Event] = ()
    ) -> None:
        span = self._tracer.child(self._span, name, start)
        span.set_attributes(attributes)
        for event in events:
            span.add_event(event.name, event.attributes, self._tracer.wall_ns(event.time))
        span.end(self._tracer.wall_ns(end))

    def end(self, time: float, attributes: Mapping[str, Value], error: str = "") -> None:
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end(self._tracer.wall_ns(time))
