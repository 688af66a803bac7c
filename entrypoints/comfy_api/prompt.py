"""Prompt: the body of POST /prompt."""

from __future__ import annotations

import uuid
from typing import Any, TypeVar

import msgspec

from core.errors import InvalidRequestError
from core.validation import shorten

T = TypeVar("T")

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Clients send the graph twice: as it is executed, and as their pages show it."""

MAX_ID = 64
"""Most characters of a prompt's id, and of a client's."""

PREVIEW_METHODS = ("auto", "latent2rgb", "taesd")
"""Values of `preview_method` in `extra_data` that ask for previews."""


class _Extra(msgspec.Struct, omit_defaults=True):
    """The members of `extra_data` that are kept. Among others are secrets, which ComfyUI does not show, either."""

    extra_pnginfo: msgspec.Raw = msgspec.Raw(b"")
    preview_method: msgspec.Raw = msgspec.Raw(b"")


class Prompt(msgspec.Struct, frozen=True):
    """What a client asks for. Further members are ignored, as ComfyUI does."""

    prompt: msgspec.Raw = msgspec.Raw(b"")  # the graph; empty: there is none
    client_id: str | None = None  # the one that it listens with on /ws
    prompt_id: str = ""  # "": it gets one
    number: float | None = None  # its place in ComfyUI's queue
    front: bool = False
    extra_data: msgspec.Raw = msgspec.Raw(b"{}")

    @classmethod
    def of(cls, body: str) -> Prompt:
        """Raises InvalidRequestError for what is no prompt."""
        read = decode(body, cls, "a prompt is an object of JSON with a graph as 'prompt'")
        if not read.prompt or read.prompt == b"null":
            raise InvalidRequestError("No prompt provided.", param="prompt", code="no_prompt")
        for name, value in (("prompt_id", read.prompt_id), ("client_id", read.client_id or "")):
            if len(value) > MAX_ID or not value.isprintable():
                message = f"Invalid '{name}': {shorten(value)!r}: an id has at most {MAX_ID} printable characters."
                raise InvalidRequestError(message, param=name)
        return msgspec.structs.replace(
            read,
            prompt=read.prompt.copy(),  # else the whole body would be kept
            extra_data=_kept(read.extra_data),
            prompt_id=read.prompt_id or str(uuid.uuid4()),
        )

    @property
    def nbytes(self) -> int:
        """Of what is kept of the body."""
        return len(self.prompt) + len(self.extra_data)

    @property
    def graph(self) -> str:
        """The JSON text of its graph."""
        return bytes(self.prompt).decode()

    @property
    def extra(self) -> dict[str, Any]:
        """The members of `extra_data` that are kept, with the client's id, as ComfyUI shows it."""
        extra: dict[str, Any] = msgspec.json.decode(self.extra_data, type=dict[str, msgspec.Raw])
        return extra if self.client_id is None else {**extra, "client_id": self.client_id}

    @property
    def shows_previews(self) -> bool:
        """Whether it asks for previews."""
        method = bytes(self.extra.get("preview_method", b"")).strip(b'"').decode()
        return method in PREVIEW_METHODS

    def class_type(self, node: str) -> str:
        """What its graph says of which class a node is; "": nothing, or it is none of its nodes."""
        if not node:
            return ""
        try:
            return msgspec.json.decode(self.prompt, type=dict[str, _Node])[node].class_type
        except (msgspec.MsgspecError, RecursionError, KeyError):
            return ""


def _kept(extra_data: msgspec.Raw) -> msgspec.Raw:
    """What is kept of `extra_data`; what is no object is left out."""
    try:
        return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(extra_data, type=_Extra)))
    except (msgspec.MsgspecError, RecursionError):
        return msgspec.Raw(b"{}")


class _Node(msgspec.Struct):
    class_type: str = ""


class Deletion(msgspec.Struct, frozen=True):
    """The body of POST /queue and POST /history."""

    clear: bool = False
    delete: tuple[str, ...] = ()


class Interruption(msgspec.Struct, frozen=True):
    """The body of POST /interrupt."""

    prompt_id: str | None = None  # None: all that run


def decode(body: str, kind: type[T], expected: str) -> T:
    """A body of JSON. Raises InvalidRequestError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        message = f"Invalid body: {expected}: {shorten(str(error))}."
        raise InvalidRequestError(message, code="invalid_json") from error
