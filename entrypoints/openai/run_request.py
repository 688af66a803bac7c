"""Turns a parsed request body that names a workflow of users' classes into a RunCall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from core.errors import InvalidRequestError
from core.messages.image_processor import OutputFormat
from engine.client.run_files import RunEncoding
from engine.client.run_input import RunInput
from entrypoints.openai.body.submission import Submission
from entrypoints.openai.edit_request import own_inputs, refuse_unsupported, safety_identifier
from entrypoints.openai.fields.field import Value
from entrypoints.openai.fields.own_fields import MODEL_FIELD, OwnFields

_OPTIONS = (
    MODEL_FIELD,
    "priority",
    "timeout",
    "output_format",
    "output_compression",
    "response_format",
    "user",
    "safety_identifier",
)
"""Fields of the endpoint with an effect; the others mean something to models alone."""


@dataclass(frozen=True)
class RunCall:
    """A valid call: the engine's input, and what its answer repeats."""

    asked: RunInput
    encoding: RunEncoding
    safety_identifier: str | None
    ignored: tuple[str, ...]  # fields without effect


def build_run_call(submission: Submission, own: OwnFields, owner: str) -> RunCall:
    """The call that a request makes. own: its workflow's. owner: digest of the API key. Raises InvalidRequestError."""
    options = {name: value for name, value in submission.values.items() if name not in own.fields}
    refuse_unsupported(options)
    _refuse_stream(options, own.workflow)
    inputs = own_inputs(submission)
    asked = RunInput(
        workflow=own.workflow,
        inputs=inputs,
        input_files=submission.input_files,
        owner=owner,
        priority=cast(int, options.get("priority", 0)),
        timeout=cast(float | None, options.get("timeout")),
    )
    encoding = RunEncoding(
        output_format=cast(OutputFormat, options.get("output_format", "png")),
        compression=cast(int, options.get("output_compression", 100)),
    )
    without_effect = [name for name in options if name not in _OPTIONS]
    if encoding.output_format == "png":
        without_effect += [name for name in options if name == "output_compression"]
    return RunCall(asked, encoding, safety_identifier(options), (*without_effect, *submission.ignored))


def _refuse_stream(options: Mapping[str, Value], workflow: str) -> None:
    """Without effect it would be lost silently: clients find no events in an answer of JSON."""
    if options.get("stream"):
        message = f"Unsupported value: 'stream' does not support true with the workflow '{workflow}'."
        raise InvalidRequestError(message, param="stream", code="unsupported_value")
