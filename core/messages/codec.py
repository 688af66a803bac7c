"""Encodes messages as bytes and decodes them. Failures raise MessageError with the reason.

Only what a client's request can have caused is answered as a failure of that request, see `read_member`. A plan or a
result that cannot be read shows a bug: the receiver ends its sender, or itself, which is restarted.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from core.errors import MessageError, StencilError
from core.failure import Failure
from core.graph.op import OPS, OpWork
from core.messages.message import Message

T = TypeVar("T")

_ENCODE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError)  # UnicodeEncodeError is a ValueError
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, StencilError)


def _decode_member(kind: type, members: Any) -> Any:
    """msgspec's hook for types that it does not know: the messages of ops."""
    if kind is not OpWork:
        raise NotImplementedError(f"{kind.__name__} is not a type that messages carry")
    return OPS.decode(members)


def encode(message: Message) -> bytes:
    """A message as bytes. Raises MessageError if a value in it cannot be encoded."""
    try:
        return msgspec.msgpack.encode(message)
    except _ENCODE_ERRORS as error:
        raise MessageError(f"a {type(message).__name__} cannot be encoded: {error}") from error


class MessageDecoder(Generic[T]):
    """Decodes messages of one union, such as `core.messages.engine.ToEngine`."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union, dec_hook=_decode_member)

    def decode(self, payload: bytes | memoryview) -> T:
        """The message. Raises MessageError; its cause is a StencilError if a value is out of its field's range."""
        try:
            return self._decoder.decode(payload)
        except _DECODE_ERRORS as error:
            raise MessageError(f"a message cannot be decoded: {error}") from error


def read_member(payload: bytes | memoryview, name: str, kind: type[T]) -> T | None:
    """One member of a message that cannot be decoded as a whole; None if this cannot be read either."""
    try:
        members = msgspec.msgpack.decode(payload, type=dict[str, msgspec.Raw])
        return msgspec.msgpack.decode(members[name], type=kind)
    except (*_DECODE_ERRORS, KeyError):
        return None


def failure_of(error: MessageError) -> Failure:
    """The failure of the request in a message that cannot be decoded. If a value was out of its field's range, the
    failure says which.
    """
    cause = error.__cause__
    return Failure.of(cause if isinstance(cause, StencilError) else error)
