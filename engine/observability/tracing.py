"""Tracing: the interfaces Tracer and Span, and the span of the current request. Records only if an endpoint is given.

Child spans are recorded with start and end once these are known, not opened around code, so that they use the same
clock readings as the response's `stencil.ms`. Times are seconds of CLOCK_MONOTONIC. Only `otlp_tracing` imports
OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Protocol

from core.errors import ConfigError

Value = str | bool | int | float
SpanKind = Literal["server", "internal"]


@dataclass(frozen=True, slots=True)
class Event:
    """An event at one moment of a span."""

    name: str
    time: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


class Span(Protocol):
    """A span that has begun."""

    @property
    def traceparent(self) -> str:
        """W3C trace context, to be sent along with the work to other processes; "" if nothing is recorded."""

    def child(
        self, name: str, start: float, end: float, attributes: Mapping[str, Value], events: Sequence[Event] = ()
    ) -> None:
        """Record a child span that has ended."""

    def end(self, time: float, attributes: Mapping[str, Value], error: str = "") -> None:
        """End it. error: why it failed, if it did. Attributes begin with `stencil.` or are OpenTelemetry's own."""


class Tracer(Protocol):
    """Records the spans of one process."""

    def begin(self, name: str, kind: SpanKind, carrier: Mapping[str, str], start: float) -> Span:
        """Begin a span. carrier: HTTP headers; if they have a `traceparent`, it names the parent span."""

    def close(self) -> None:
        """Send the recorded spans; takes at most FLUSH_SECONDS."""


FLUSH_SECONDS = 2.0
"""How long sending the last spans may take; an engine has 5 s to exit."""


class NoSpan:
    """A Span that records nothing."""

    traceparent = ""

    def child(
        self, name: str, start: float, end: float, attributes: Mapping[str, Value], events: Sequence[Event] = ()
    ) -> None:
        pass

    def end(self, time: float, attributes: Mapping[str, Value], error: str = "") -> None:
        pass


class NoTracer:
    """A Tracer that records nothing."""

    def begin(self, name: str, kind: SpanKind, carrier: Mapping[str, str], start: float) -> Span:
        return NO_SPAN

    def close(self) -> None:
        pass


NO_SPAN = NoSpan()
_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def create_tracer(endpoint: str, process: str) -> Tracer:
    """A tracer that sends to an OTLP/HTTP `endpoint`, such as ``http://host:4318/v1/traces``; "" = no tracing. process:
    name of this process in the spans. Raises ConfigError if OpenTelemetry is not installed.
    """
    if not endpoint:
        return NoTracer()
    try:
        from engine.observability.otlp_tracing import OtlpTracer
    except ImportError as error:
        message = f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'stencil-serve[otel]'"
        raise ConfigError(message) from error
    return OtlpTracer(endpoint, process)


@contextmanager
def span_context(span: Span) -> Iterator[None]:
    """Make `span` the current one for the code inside and for tasks started inside."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)


def current_span() -> Span:
    """The span of the request that the calling code works for."""
    return _current.get()
