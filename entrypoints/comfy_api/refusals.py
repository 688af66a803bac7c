"""Refusals in ComfyUI's form: `error`, and `node_errors` by the id of the node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from core.errors import WorkflowError
from entrypoints.comfy_api.files import FileName
from entrypoints.openai.answer.errors import describe, log_internal
from entrypoints.openai.guards.middleware import RECORD

INVALID_PROMPT = "invalid_prompt"
FAILED_VALIDATION = "prompt_outputs_failed_validation"
WRONG_INPUT = "custom_validation_failed"
NO_FILE = "file_not_found"


def refusal(request: Request, error: BaseException, class_of: Callable[[str], str] = lambda _: "") -> Response:
    """The answer to a request that an error ends, noted in the request's record. class_of: of a node, by its id."""
    record = request.scope[RECORD]
    if isinstance(error, WorkflowError):
        record.note_error(INVALID_PROMPT)
        return _json(400, _of_graph(error, class_of(error.node)), {})
    log_internal(error)
    reply = describe(error)
    record.note_error(reply.code)
    return _json(reply.status, _body(reply.code or reply.type, reply.message), reply.headers)


def no_file(request: Request, name: FileName) -> Response:
    """The answer to a request for a file that is not there, or not any more."""
    request.scope[RECORD].note_error(NO_FILE)
    return _json(404, _body(NO_FILE, f"There is no file {name.name!r} in {name.folder}, or not any more."), {})


def _of_graph(error: WorkflowError, class_type: str) -> dict[str, Any]:
    """A graph's error; where it is of a node, ComfyUI's clients look for it there."""
    if not error.node:
        return _body(INVALID_PROMPT, str(error))
    name = _text(error.input)
    extra = {"input_name": name} if name else {}
    reason = {"type": WRONG_INPUT, "message": str(error), "details": name, "extra_info": extra}
    faults = {"errors": [reason], "dependent_outputs": [], "class_type": _text(class_type)}
    said = _body(FAILED_VALIDATION, "Prompt outputs failed validation", str(error))
    return said | {"node_errors": {_text(error.node): faults}}


def _text(words: str) -> str:
    """What can be encoded: JSON may have half a surrogate pair."""
    return words.encode(errors="replace").decode()


def _body(kind: str, message: str, details: str = "") -> dict[str, Any]:
    error = {"type": kind, "message": message, "details": details or message, "extra_info": {}}
    return {"error": error, "node_errors": {}}


def _json(status: int, content: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    return Response(msgspec.json.encode(content), status, dict(headers), media_type="application/json")
