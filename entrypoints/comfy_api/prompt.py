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


SECRETS = frozenset({"auth_token_comfy_org", "api_key_comfy_org"})
"""Members of `extra_data` that ComfyUI does not show, either."""


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
        return msgspec.structs.replace(read, prompt_id=read.prompt_id or str(uuid.uuid4()))

    @property
    def graph(self) -> str:
        """The JSON text of its graph."""
        return bytes(self.prompt).decode()

    @property
    def extra(self) -> dict[str, Any]:
        """`extra_data` with the client's id and without SECRETS, as ComfyUI shows it; what is no object is left out."""
        try:
            members = msgspec.json.decode(self.extra_data, type=dict[str, msgspec.Raw])
            extra: dict[str, Any] = {name: value for name, value in members.items() if name not in SECRETS}
        except (msgspec.MsgspecError, RecursionError):
            extra = {}
        return extra if self.client_id is None else {**extra, "client_id": self.client_id}

    @property
    def shows_previews(self) -> bool:
        """Whether it asks for previews."""
        method = bytes(self.extra.get("preview_method", b"")).strip(b'"').decode()
        return method in PREVIEW_METHODS

    def class_type(self, node: str) -> str:
        """What its graph says of which class a node is; "": nothing."""
        try:
            return msgspec.json.decode(self.prompt, type=dict[str, _Node])[node].class_type
        except (msgspec.MsgspecError, RecursionError, KeyError):
            return ""


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
