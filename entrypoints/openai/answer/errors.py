"""Maps exceptions to HTTP errors: one table gives each class its status, and type and code of OpenAI's envelope."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from core.errors import (
    AbortedError,
    AdapterNotFiniteError,
    AdapterNotFoundError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidImageError,
    InvalidRequestError,
    ModelNotFoundError,
    ModelUnavailableError,
    NothingFoundError,
    OutOfMemoryError,
    OverloadedError,
    RunError,
    StencilError,
    TemplateNotFoundError,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
NO_DISK_SECONDS = 10.0  # retry-after when the disk is full; an operator has to make room
FAILURES = {
    "internal_error": "The server had an error while processing your request. Sorry about that!",
    "out_of_memory": "The server did not have enough memory for this request. Try a smaller image or fewer images.",
    "model_unavailable": "The server could not load this model's weights. Try another model, or this one again later.",
    "model_deaths": "Requests of this model have ended worker processes. Try another model, or this one again later.",
    "owner_deaths": "Your requests of this model have ended worker processes. Try another model, or again later.",
    "workflow_failed": "A class of the workflow failed at this request; the server's log says why.",
    "engine_died": "The engine that worked on this request died at every attempt. Try again later.",
}
"""Messages to clients for internal failures, by code, or by cause if a code has several. The exceptions' own messages
are only logged, since they may name files, devices and other requests."""


class RequestTooLargeError(InvalidRequestError):
    """The body, or one part of it, has more bytes than the server accepts."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="request_too_large")


class UnsupportedContentTypeError(InvalidRequestError):
    """The body has a media type that the endpoint does not accept."""

    def __init__(self, content_type: str, expected: str) -> None:
        message = f"Unsupported content type '{content_type}'. Expected {expected}."
        super().__init__(message, code="unsupported_content_type")


class BodyTimeoutError(StencilError):
    """The client stopped sending within its body, or sends too slowly."""


class NoDiskError(OverloadedError):
    """An upload cannot be written to the server's temporary folder: the disk is full or not writable."""

    def __init__(self) -> None:
        super().__init__("The server has no room on its disk for uploads at the moment.", retry_after=NO_DISK_SECONDS)


class InvalidApiKeyError(StencilError):
    """The authorization header is missing or has an unknown key."""


class ForeignOriginError(StencilError):
    """A web page of another origin sent a request that may change something."""

    def __init__(self, origin: str, host: str) -> None:
        super().__init__(
            f"A web page of {origin[:100]!r} may not send this to {host[:100]!r}. If that is the server's own page "
            "behind a proxy, have the proxy pass the Host header on; or start the server with --api-key."
        )


class HostNotAllowedError(StencilError):
    """The `Host` header names a host that the server does not serve."""

    def __init__(self, host: str, name: str | None) -> None:
        """host: the header's value. name: the host in it; None if it is malformed."""
        remedy = f" If that is its name, start it with --allowed-host {name[:100]}." if name else ""
        super().__init__(f"This server does not answer for the host {host[:100]!r}.{remedy}")


class AdapterLoadingOffError(StencilError):
    """The operator does not let callers load adapters."""

    def __init__(self) -> None:
        super().__init__(
            "This server does not load adapters on request, since that reads files of its machine. Start it with "
            "--allow-runtime-lora, or give it the adapters with --lora."
        )


class WorkflowsOffError(StencilError):
    """The operator does not let anybody register workflows."""

    def __init__(self) -> None:
        super().__init__(
            "This server registers no workflows on request, since that runs code in its workers. Start it with "
            "--allow-runtime-workflows and --admin-key-file, or give it the files with --workflow."
        )


class RateLimitError(StencilError):
    """The caller exceeded its rate limit; its next request is accepted in `retry_after` seconds."""

    def __init__(self, limit: int, retry_after: float) -> None:
        message = f"Rate limit reached: {limit} requests per minute. Please try again in {math.ceil(retry_after)}s."
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class ErrorReply:
    """An error as it is sent to the client."""

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def envelope(self) -> dict[str, Any]:
        """The value of `error` in OpenAI's envelope."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def response(self) -> Response:
        """The whole HTTP answer."""
        body = msgspec.json.encode({"error": self.envelope})
        return Response(body, self.status, self.headers, media_type="application/json")


# Exception -> status, type, code. The first row whose class matches wins; None: derived from the exception.
_TABLE: tuple[tuple[type[BaseException], int, str | None, str | None], ...] = (
    (InvalidApiKeyError, 401, INVALID_REQUEST, "invalid_api_key"),
    (ForeignOriginError, 403, INVALID_REQUEST, "foreign_origin"),
    (HostNotAllowedError, 403, INVALID_REQUEST, "host_not_allowed"),
    (AdapterLoadingOffError, 403, INVALID_REQUEST, "adapter_loading_off"),
    (WorkflowsOffError, 403, INVALID_REQUEST, "runtime_workflows_off"),
    (RateLimitError, 429, "requests", "rate_limit_exceeded"),
    (RequestTooLargeError, 413, INVALID_REQUEST, None),
    (UnsupportedContentTypeError, 415, INVALID_REQUEST, None),
    (ModelNotFoundError, 404, INVALID_REQUEST, None),
    (AdapterNotFoundError, 404, INVALID_REQUEST, None),
    (TemplateNotFoundError, 404, INVALID_REQUEST, None),
    (AdapterNotFiniteError, 422, INVALID_REQUEST, None),
    (NothingFoundError, 422, INVALID_REQUEST, None),
    (InvalidImageError, 400, None, None),
    (InvalidRequestError, 400, INVALID_REQUEST, None),
    (BodyTimeoutError, 408, INVALID_REQUEST, "request_timeout"),
    (OverloadedError, 503, "service_unavailable_error", "server_is_overloaded"),
    (DeadlineExceededError, 504, SERVER_ERROR, "deadline_exceeded"),
    (AbortedError, 499, INVALID_REQUEST, "request_cancelled"),
    (OutOfMemoryError, 500, SERVER_ERROR, "out_of_memory"),
    (RunError, 422, INVALID_REQUEST, "workflow_failed"),
    (ModelUnavailableError, 503, SERVER_ERROR, "model_unavailable"),
    (EngineDeadError, 500, SERVER_ERROR, "engine_died"),
    (Exception, 500, SERVER_ERROR, "internal_error"),
)

_log = logging.getLogger("stencil.api")
_USER_IMAGE_CODES = ("invalid_image_file", "invalid_mask_image_format")
_HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed"}


def describe(error: BaseException) -> ErrorReply:
    """The HTTP error for `error`; internal failures get a message from FAILURES."""
    _, status, kind, code = next(row for row in _TABLE if isinstance(error, row[0]))
    return ErrorReply(
        status=status,
        type=kind or _image_error_type(error),
        code=code or getattr(error, "code", None),
        message=FAILURES.get(_failure_of(error, code), str(error)),
        param=getattr(error, "param", None),
        headers=_headers(error),
    )


def log_internal(error: BaseException) -> None:
    """Log `error` with its traceback if it is answered with 500, as the client only gets a general message."""
    if describe(error).status == 500 or isinstance(error, RunError):
        _log.error("failed: %s", error, exc_info=error)


def describe_http(error: HTTPException, method: str, path: str) -> ErrorReply:
    """The HTTP error for a request that FastAPI's router refuses: an unknown path or a wrong method."""
    messages = {404: f"Unknown request URL: {method} {path}.", 405: f"Method {method} is not allowed for {path}."}
    return ErrorReply(
        status=error.status_code,
        type=INVALID_REQUEST,
        code=_HTTP_CODES.get(error.status_code),
        message=messages.get(error.status_code, str(error.detail)),
        headers=dict(error.headers or {}),
    )


def _image_error_type(error: BaseException) -> str:
    is_users = isinstance(error, InvalidImageError) and error.code in _USER_IMAGE_CODES
    return "image_generation_user_error" if is_users else INVALID_REQUEST


def _failure_of(error: BaseException, code: str | None) -> str:
    """The key of FAILURES."""
    if isinstance(error, ModelUnavailableError):
        return {"deaths": "model_deaths", "owner_deaths": "owner_deaths"}.get(error.cause, "model_unavailable")
    return code or ""


def _headers(error: BaseException) -> dict[str, str]:
    match error:
        case OverloadedError() | RateLimitError() | ModelUnavailableError():
            # OpenAI's client libraries ignore 0, and ignore values above 120 s.
            return {"retry-after": str(min(120, max(1, math.ceil(error.retry_after))))}
        case DeadlineExceededError():
            return {"x-should-retry": "false"}
        case BodyTimeoutError():
            return {"connection": "close"}
        case InvalidApiKeyError():
            return {"www-authenticate": "Bearer"}
        case _:
            return {}
