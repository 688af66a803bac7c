"""Encodes messages as bytes and decodes them. Failures raise MessageError with the reason."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from core.errors import MessageError, StencilError
from core.graph.op import OPS, OpWork
from core.messages.message import Message

T = TypeVar("T")

ENCODE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError)  # UnicodeEncodeError is a ValueError
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, StencilError)


def decode_member(kind: type, members: Any) -> Any:
    """msgspec's hook for types that it does not know: the messages of ops."""
    if kind is not OpWork:
        raise NotImplementedError(f"{kind.__name__} is not a type that messages carry")
    return OPS.decode(members)


def encode(message: Message) -> bytes:
    """A message as bytes. Raises MessageError if a value in it cannot be encoded."""
    try:
        return msgspec.msgpack.encode(message)
    except ENCODE_ERRORS as error:
        raise MessageError(f"a {type(message).__name__} cannot be encoded: {error}") from error


class MessageDecoder(Generic[T]):
    """Decodes messages of one union, such as `core.messages.engine.ToEngine`."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union, dec_hook=decode_member)

    def decode(self, payload: bytes) -> T:
        """The message. Raises MessageError; its cause is a StencilError if a value is out of its field's range."""
        try:
            return self._decoder.decode(payload)
        except DECODE_ERRORS as error:
            raise MessageError(f"a message cannot be decoded: {error}") from error
