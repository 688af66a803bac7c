"""RequestRecord: records an HTTP request for the server's operator: one log line, one span, and a count if it was
refused. Never contains a prompt, an image or a key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from starlette.types import Scope

from core.ipc.logs import request_context, with_facts
from engine.client.edit_types import EditReport
from engine.observability.metrics import Metrics, RejectReason
from engine.observability.tracing import NO_SPAN, Span, Tracer, span_context

MAX_LOGGED_CHARACTERS = 256
CLIENT_GONE_STATUS = 499  # recorded if the client disconnected; never sent
PROBES = ("/health", "/ready", "/metrics", "/v1/engine/stats")  # polled every few seconds, so logged at debug level
PAGE_FILES = "/playground/"  # two dozen files per page, so logged at debug level
# POSTs that give engines work.
TRACED = ("/v1/images/edits", "/v1/images/generations", "/v1/images/masks", "/v1/templates")

Outcome = Literal["finished", "refused", "failed", "cancelled"]

_SPAN_FACTS = ("images", "mask_ratio", "steps", "cache")

_REJECT_REASONS: dict[int, RejectReason] = {401: "unauthorized", 429: "rate_limit"}  # other 4xx: invalid

_log = logging.getLogger("stencil.access")


class RequestRecord:
    """The record of one request. Opened while the request is served; collects its outcome on the way."""

    def __init__(self, request_id: str, scope: Scope, metrics: Metrics, tracer: Tracer) -> None:
        self.request_id = request_id
        self.started = time.monotonic()
        self.status = 0  # of the answer; 0 until it begins
        self.is_client_gone = False
        self._scope = scope
        self._method = scope.get("method", "GET")  # an offer to speak WebSocket is a GET, whose scope does not say so
        self._metrics = metrics
        self._facts: dict[str, Any] = {}
        self._error: str | None = None
        self._span = self._begin_span(tracer)

    def _begin_span(self, tracer: Tracer) -> Span:
        method, path = self._method, self._scope["path"]
        if method != "POST" or path not in TRACED:
            return NO_SPAN
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in self._scope["headers"]}
        return tracer.begin(f"{method} {path}", "server", carrier, self.started)

    def note_error(self, code: str | None) -> None:
        """Note the error code that is sent to the client."""
        self._error = code

    def note_reports(self, reports: Iterable[EditReport]) -> None:
        """Note the reports of finished images. Each part of `ms` is the maximum; other facts are equal for all."""
        if not (reports := list(reports)):
            return
        first = reports[0]
        late = [report.steps_without_lora for report in reports if report.steps_without_lora is not None]
        self._facts = {
            "images": len(reports),
            "mask_ratio": round(first.mask_ratio, 4),
            "steps": first.num_inference_steps,
            "cache": first.cache,
            **({"steps_without_lora": late} if late else {}),
            "engines": sorted({report.engine for report in reports if report.engine is not None}),
            "ms": {part: round(max(report.ms[part] for report in reports), 1) for part in first.ms},
        }

    @contextmanager
    def open(self) -> Iterator[None]:
        """Attribute log lines and spans within the context to this request; write the record at its end."""
        with request_context(self.request_id), span_context(self._span):
            try:
                yield
            finally:
                self._close(time.monotonic())

    def _close(self, now: float) -> None:
        status = CLIENT_GONE_STATUS if self.is_client_gone or not self.status else self.status
        outcome = outcome_of(status, self._error)
        error = {"error": self._error} if self._error else {}
        self._log(outcome, status, now - self.started, error | self._facts)
        if outcome == "refused" and status != 503 and self._scope["path"].startswith("/v1/"):
            self._metrics.observe_rejected(_REJECT_REASONS.get(status, "invalid"))
        self._end_span(outcome, status, now)

    def _log(self, outcome: Outcome, status: int, seconds: float, facts: dict[str, Any]) -> None:
        scope = self._scope
        line = {
            "client": _printable(str((scope.get("client") or ("-",))[0])),  # a proxy may forward any text
            "method": self._method,
            "path": _printable(scope["path"]),
            "status": status,
            "seconds": round(seconds, 4),
        }
        is_quiet = scope["path"] in PROBES or scope["path"].startswith(PAGE_FILES)
        _log.log(logging.DEBUG if is_quiet else logging.INFO, outcome, extra=with_facts(**line, **facts))

    def _end_span(self, outcome: Outcome, status: int, now: float) -> None:
        attributes = {
            "http.request.method": self._method,
            "http.route": self._scope["path"],
            "http.response.status_code": status,
            "stencil.request_id": self.request_id,
            "stencil.outcome": outcome,
        }
        about_images = {f"stencil.{name}": self._facts[name] for name in _SPAN_FACTS if name in self._facts}
        self._span.end(now, attributes | about_images, (self._error or str(status)) if outcome == "failed" else "")


def _printable(text: str) -> str:
    """Text from a client, made safe for the log: control characters escaped, at most MAX_LOGGED_CHARACTERS of it."""
    return text[:MAX_LOGGED_CHARACTERS].encode("unicode_escape").decode()


def outcome_of(status: int, error: str | None) -> Outcome:
    """The outcome of a request. failed: a fault of the server, including streams that fail after status 200."""
    if status == CLIENT_GONE_STATUS:
        return "cancelled"
    if status in (500, 504) or (status < 400 and error):
        return "failed"
    return "finished" if status < 400 else "refused"
