"""Traces: what a request passed, when and for how long, as spans. Without an endpoint nothing is recorded.

Spans are told with their times once these are known, never opened around code: they come from the same clock readings
as the response's `stencil.ms`. Times are seconds of CLOCK_MONOTONIC. Only `otlp_tracing` imports OpenTelemetry.
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
    """Something that happened at one moment of a span."""

    name: str
    time: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


class Span(Protocol):
    """A span that has begun."""

    @property
    def traceparent(self) -> str:
        """W3C trace context, to be handed to whoever goes on with the work; "" where nothing is recorded."""

    def child(
        self, name: str, start: float, end: float, attributes: Mapping[str, Value], events: Sequence[Event] = ()
    ) -> None:
        """Record a part of it that is over."""

    def end(self, time: float, attributes: Mapping[str, Value], error: str = "") -> None:
        """It is over; error: why it failed, if it did. Attributes begin with `stencil.` or are OpenTelemetry's own."""


class Tracer(Protocol):
    """Records the spans of one process."""

    def begin(self, name: str, kind: SpanKind, carrier: Mapping[str, str], start: float) -> Span:
        """A span below the one that the carrier's `traceparent` names, if it names one. Carriers are headers."""

    def close(self) -> None:
        """Send what is recorded; takes at most FLUSH_SECONDS."""


FLUSH_SECONDS = 2.0
"""How long the last spans may take to reach the collector; an engine has 5 s to leave."""


class NoSpan:
    """Records nothing."""

    traceparent = ""

    def child(
        self, name: str, start: float, end: float, attributes: Mapping[str, Value], events: Sequence[Event] = ()
    ) -> None:
        pass

    def end(self, time: float, attributes: Mapping[str, Value], error: str = "") -> None:
        pass


class NoTracer:
    """Records nothing."""

    def begin(self, name: str, kind: SpanKind, carrier: Mapping[str, str], start: float) -> Span:
        return NO_SPAN

    def close(self) -> None:
        pass


NO_SPAN = NoSpan()
_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def create_tracer(endpoint: str, process: str) -> Tracer:
    """A tracer that sends to an OTLP/HTTP `endpoint`, ``http://host:4318/v1/traces``; "" = none. process: what the
    spans are said to come from. Raises ConfigError where OpenTelemetry is not installed.
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
    """Code inside, and tasks started inside, work for this span."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)


def current_span() -> Span:
    """Whom work done here is for."""
    return _current.get()
