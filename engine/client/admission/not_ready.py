"""The refusal of requests that come while nothing is served: models load, no engine is up, or the server shuts down."""

from __future__ import annotations

from core.errors import OverloadedError

LOADING_RETRY_SECONDS, CLOSING_RETRY_SECONDS = 2.0, 1.0
"""retry-after of these refusals. Behind a load balancer, a server that shuts down is replaced at once."""


def not_ready(*, is_closing: bool) -> OverloadedError:
    """The error to raise. is_closing: the server shuts down."""
    if is_closing:
        return OverloadedError("The server is shutting down.", retry_after=CLOSING_RETRY_SECONDS)
    message = "The server is not ready: the model is loading, or its engine is being restarted."
    return OverloadedError(message, retry_after=LOADING_RETRY_SECONDS)
