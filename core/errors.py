"""The exception tree of Stencil, independent of HTTP, processes and torch.

    StencilError
    |-- ConfigError            a flag, model directory or environment that cannot work; reported once at start-up
    |   `-- WorkflowError      a workflow that cannot run; the node and its input are named
    |-- InvalidRequestError    the request is wrong; the field and the remedy are named
    |   |-- InvalidImageError  an uploaded picture cannot be used
    |   |-- ModelNotFoundError no such model is served
    |   |-- AdapterNotFoundError no such adapter is served
    |   |-- AdapterNotFiniteError no picture can be made with the adapters
    |   |-- NothingFoundError     no pixel of the picture is what the mask is asked for
    |   `-- TemplateNotFoundError no such template is kept for this owner
    |-- OverloadedError        refused by admission control, try again after `retry_after` seconds
    |-- DeadlineExceededError  the request's own timeout passed
    |-- AbortedError           the client or the operator cancelled the request
    `-- EngineError            the server's fault
        |-- RunError           a user's class failed, or made something else than was declared
        |-- NonFiniteError     a picture's numbers are infinite or none
        |-- OutOfMemoryError   the device or an arena had no room
        |-- ModelUnavailableError  the request's model cannot be loaded, or has ended workers
        |-- PagesLostError     cached activations on their way to a step did not arrive
        |-- GroupBrokenError   a batch of several ranks failed on one of them
        |-- MessageError       a message between processes cannot be encoded or decoded
        `-- EngineDeadError    a process that held the request died

Between processes an error travels as `core.failure.Failure`; the waiting caller gets it back as one of these.
"""

from __future__ import annotations

from collections.abc import Sequence


class StencilError(Exception):
    """Root of the tree: every exception that Stencil raises deliberately."""


class ConfigError(StencilError):
    """A start-up setting that cannot work; the message is one line that names the remedy."""


class WorkflowError(ConfigError):
    """A workflow that cannot run. node, input: where the error is; input is "" if no single one is at fault."""

    def __init__(self, message: str, *, node: str, input: str = "") -> None:
        super().__init__(message)
        self.node = node
        self.input = input


class InvalidRequestError(StencilError):
    """A request field is missing, malformed or out of range.

    `param` is the field's name on the wire (None when no single field is at fault); `code` is the machine-readable
    reason, one of the codes of the OpenAI images API such as ``invalid_value``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidImageError(InvalidRequestError):
    """An uploaded image or mask is not decodable, has the wrong size, or lacks what its field requires."""


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that this server does not serve."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model '{model}' does not exist.", param="model", code="model_not_found")


class AdapterNotFoundError(InvalidRequestError):
    """The request unloads an adapter that is not served."""

    def __init__(self, name: str) -> None:
        message = f"No adapter is called '{name}'; GET /v1/models lists those that are loaded."
        super().__init__(message, param="lora_name", code="adapter_not_found")


class AdapterNotFiniteError(InvalidRequestError):
    """The picture's numbers are infinite or none with the adapters of the request."""

    def __init__(self, names: Sequence[str]) -> None:
        which = f"the adapter '{names[0]}'" if len(names) == 1 else f"the adapters {', '.join(map(repr, names))}"
        message = f"Invalid 'lora': with {which} the model computes no finite numbers. Try a smaller scale, or without."
        super().__init__(message, param="lora", code="adapter_not_finite")


class NothingFoundError(InvalidRequestError):
    """No pixel of the picture is what the mask is asked for. An edit of nothing, or of everything, is never meant."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="nothing_found")


class TemplateNotFoundError(InvalidRequestError):
    """No template has this id, or it is another owner's; the error does not reveal which."""

    def __init__(self, template_id: str, *, param: str | None = None) -> None:
        message = f"The template '{template_id}' does not exist; it may have made room for others. Register it again."
        super().__init__(message, param=param, code="template_not_found")


class OverloadedError(StencilError):
    """The server refuses work that it could only queue; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class DeadlineExceededError(StencilError):
    """The request's `timeout` passed before it finished."""


class AbortedError(StencilError):
    """The request was cancelled by its client or by the operator."""


class EngineError(StencilError):
    """The engine failed; the request itself was fine."""


class OutOfMemoryError(EngineError):
    """A device, a shared arena or the host had no room for this request."""


class RunError(EngineError):
    """A node that runs a user's class has failed: the class raised an error, took too long, or made what its node does
    not declare.
    """

    @classmethod
    def at(cls, node: str, cause: str) -> RunError:
        """The error of a node, by name."""
        return cls(f"node {node}: {cause}")


class NonFiniteError(EngineError):
    """The numbers of a picture are infinite or none. Adapters can cause that, so their names go with it."""


class GroupBrokenError(EngineError):
    """A batch that several ranks compute together failed on one of them, so it failed on all. It is tried again on one
    rank.
    """


class ModelUnavailableError(EngineError):
    """The request's model is refused for a while: it cannot be loaded, its batches have ended workers, or no engine
    that serves it is left. Others are served. cause: a `core.costs.load_report.QuarantineCause`. retry_after: seconds.
    """

    def __init__(self, message: str, *, cause: str = "load", retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.cause = cause
        self.retry_after = retry_after


class PagesLostError(EngineError):
    """Cached activations that a step waited for did not arrive: their file was damaged, or the device had no room. The
    step has changed nothing, and they can be computed again.
    """


class MessageError(EngineError):
    """A message between two processes cannot be encoded or decoded, see `core.messages.codec`."""


class EngineDeadError(EngineError):
    """The process that held the request is gone."""


def first_error(error: BaseException) -> BaseException:
    """The first plain exception in a group of groups, for a one-line message; one that is no group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
