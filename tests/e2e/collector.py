"""An OpenTelemetry collector that stores the spans it receives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class SentSpan:
    """A received span. Ids are hex, times are nanoseconds since 1970."""

    name: str
    process: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    is_error: bool


@dataclass
class Collector:
    url: str
    spans: list[SentSpan] = field(default_factory=list)

    def receive(self, body: bytes) -> None:
        """Store the spans of one export."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _attributes(resource.resource.attributes)
            assert about["service.name"] == "stencil"
            for scope in resource.scope_spans:
                self.spans += [_span(span, about["stencil.process"]) for span in scope.spans]


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.receive(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield collector
        server.shutdown()
        thread.join()


def _span(span: Any, process: str) -> SentSpan:
    return SentSpan(
        name=span.name,
        process=process,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
