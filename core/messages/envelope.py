"""Envelopes: what stands before every message between a router and an engine, so that each one acts exactly once.

An engine that is started again is another *incarnation*. Each has an *epoch*, a random number that its messages and
those to it name. What a dead incarnation has sent, or one that was only presumed dead, therefore does nothing.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from core.errors import MessageError
from core.messages.codec import encode
from core.messages.message import Message

_HEADER = struct.Struct("<QQd")  # epoch, number, age


class Opened(NamedTuple):
    """A message that was taken out of its envelope, not decoded yet."""

    age: float  # of the engine when it was sent
    body: memoryview


class Envelopes:
    """One end of a connection. Its messages are numbered from 1 on, and the other end takes each number once: a message
    that comes again does nothing, and one that is lost is noticed at the next one.
    """

    def __init__(self, epoch: int) -> None:
        """epoch: below 2**64."""
        self._epoch = epoch
        self._num_sent = self._num_received = 0

    def seal(self, message: Message, age: float = 0.0) -> bytes:
        """A message as bytes, with its envelope. age: of the engine now, in seconds; only a router needs to know it.
        Raises MessageError if a value in it cannot be encoded; then nothing is to be sent.
        """
        body = encode(message)
        self._num_sent += 1
        return _HEADER.pack(self._epoch, self._num_sent, age) + body

    def open(self, payload: bytes) -> Opened | None:
        """The other end's next message; None if this one has come before or is another incarnation's. Raises
        MessageError if messages before it are missing, or if it has no envelope.
        """
        if len(payload) < _HEADER.size:
            raise MessageError("a message cannot be decoded: it has no envelope")
        epoch, number, age = _HEADER.unpack_from(payload)
        if epoch != self._epoch or number <= self._num_received:
            return None
        if number > self._num_received + 1:
            raise MessageError(f"message {self._num_received + 1} is missing, {number} has come")
        self._num_received = number
        return Opened(age, memoryview(payload)[_HEADER.size :])


def body_of(payload: bytes) -> memoryview:
    """The message in an envelope, for who passes it on."""
    return memoryview(payload)[_HEADER.size :]


def with_body(payload: bytes, body: bytes) -> bytes:
    """The same envelope with another body."""
    return payload[: _HEADER.size] + body
