"""Failure: the form in which an error travels between processes, and its conversion from and to exceptions."""

from __future__ import annotations

from typing import Literal

import msgspec

from core import errors

FailureKind = Literal[
    "invalid_request",
    "invalid_image",
    "nothing_found",
    "out_of_memory",
    "not_finite",
    "run_failed",
    "pages_lost",
    "group_broken",
    "overloaded",
    "deadline_exceeded",
    "aborted",
    "engine",
    "engine_dead",
    "rank_dead",
    "model_unavailable",
    "config",
]

NEVER_BEGUN = "never_begun"
"""Code of an engine's death for a request that no worker had begun."""


LEAST_RETRY_SECONDS = 1.0
"""Default retry-after when no prediction is available."""


class Failure(msgspec.Struct, frozen=True):
    """An error that travels between processes."""

    kind: FailureKind
    message: str
    param: str | None = None  # see InvalidRequestError
    code: str | None = None  # see InvalidRequestError
    detail: str = ""  # a traceback, for logs and never for clients
    retry_after: float = LEAST_RETRY_SECONDS  # of "model_unavailable": seconds; its code is the cause

    @classmethod
    def of(cls, error: BaseException, detail: str = "") -> Failure:
        """`error` as a Failure; an exception outside the tree of `core.errors` becomes kind "engine"."""
        match error:
            case errors.InvalidImageError():
                return cls("invalid_image", error.message, error.param, error.code, detail)
            case errors.NothingFoundError():
                return cls("nothing_found", error.message, error.param, error.code, detail)
            case errors.InvalidRequestError():
                return cls("invalid_request", error.message, error.param, error.code, detail)
            case errors.OutOfMemoryError() | MemoryError():
                return cls("out_of_memory", str(error) or "out of memory", detail=detail)
            case errors.NonFiniteError():
                return cls("not_finite", str(error), detail=detail)
            case errors.RunError():
                return cls("run_failed", str(error), detail=detail)
            case errors.PagesLostError():
                return cls("pages_lost", str(error), detail=detail)
            case errors.GroupBrokenError():
                return cls("group_broken", str(error), detail=detail)
            case errors.OverloadedError():
                return cls("overloaded", error.message, detail=detail)
            case errors.DeadlineExceededError():
                return cls("deadline_exceeded", str(error), detail=detail)
            case errors.AbortedError():
                return cls("aborted", str(error), detail=detail)
            case errors.EngineDeadError():
                return cls("engine_dead", str(error), detail=detail)
            case errors.ModelUnavailableError():
                return cls("model_unavailable", str(error), None, error.cause, detail, error.retry_after)
            case errors.ConfigError():
                return cls("config", str(error), detail=detail)
            case _:
                return cls("engine", f"{type(error).__name__}: {error}", detail=detail)

    def to_error(self) -> errors.StencilError:
        """The exception to raise in the waiting caller."""
        match self.kind:
            case "invalid_image":
                return errors.InvalidImageError(self.message, param=self.param, code=self.code or "invalid_image_file")
            case "invalid_request":
                return errors.InvalidRequestError(self.message, param=self.param, code=self.code or "invalid_value")
            case "nothing_found":
                return errors.NothingFoundError(self.message, param=self.param)
            case "out_of_memory":
                return errors.OutOfMemoryError(self.message)
            case "not_finite":
                return errors.NonFiniteError(self.message)
            case "run_failed":
                return errors.RunError(self.message)
            case "pages_lost":
                return errors.PagesLostError(self.message)
            case "group_broken":
                return errors.GroupBrokenError(self.message)
            case "overloaded":
                return errors.OverloadedError(self.message, retry_after=LEAST_RETRY_SECONDS)
            case "deadline_exceeded":
                return errors.DeadlineExceededError(self.message)
            case "aborted":
                return errors.AbortedError(self.message)
            case "engine_dead" | "rank_dead":
                return errors.EngineDeadError(self.message)
            case "model_unavailable":
                cause = self.code or "load"
                return errors.ModelUnavailableError(self.message, cause=cause, retry_after=self.retry_after)
            case "config":
                return errors.ConfigError(self.message)
            case "engine":
                return errors.EngineError(self.message)
