"""Frames of the WebSocket protocol (RFC 6455), as a server reads and writes them. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

MAX_MESSAGE_BYTES = 64 * 1024
"""Most bytes of a message that is read."""

MAX_CONTROL_BYTES = 125
"""Most bytes of a control frame (RFC 6455, 5.5)."""

NO_CODE, NORMAL, GOING_AWAY, PROTOCOL_ERROR, NOT_UTF8, TOO_LARGE = 1005, 1000, 1001, 1002, 1007, 1009


class Opcode(IntEnum):
    """Kinds of frames."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10

    @property
    def is_control(self) -> bool:
        """Whether its frames may stand between those of a message."""
        return self >= Opcode.CLOSE


class FrameError(Exception):
    """What a client has sent breaks the protocol. code: with which the connection is closed."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole message, or a control frame."""

    opcode: Opcode
    payload: bytes

    @property
    def text(self) -> str:
        """Of a message of text. Raises FrameError."""
        try:
            return self.payload.decode()
        except UnicodeDecodeError as error:
            raise FrameError(NOT_UTF8, "a message of text is not UTF-8") from error

    @property
    def close_code(self) -> int:
        """Of a close frame. Raises FrameError."""
        if not self.payload:
            return NO_CODE
        if len(self.payload) == 1:
            raise FrameError(PROTOCOL_ERROR, "a close frame has half a code")
        (code,) = struct.unpack(">H", self.payload[:2])
        if not (1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999):
            raise FrameError(PROTOCOL_ERROR, f"{code} is no code of a close frame")
        Frame(Opcode.TEXT, self.payload[2:]).text  # noqa: B018 - the reason, which is checked only
        return int(code)


class FrameReader:
    """Puts together what a client sends, piece by piece."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._message = bytearray()  # of frames that others follow
        self._opcode: Opcode | None = None  # of the message

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The messages and control frames that are complete. Raises FrameError."""
        self._received += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        """The next message or control frame; frames of a part of a message are put aside. None: it is not complete."""
        while (head := self._head()) is not None:
            opcode, is_last, begin, length = head
            end = begin + 4 + length
            if len(self._received) < end:
                return None
            payload = _unmasked(self._received[begin + 4 : end], self._received[begin : begin + 4])
            del self._received[:end]
            if opcode.is_control:
                return Frame(opcode, payload)
            self._message += payload
            self._opcode = opcode if self._opcode is None else self._opcode
            if is_last:
                whole = Frame(self._opcode, bytes(self._message))
                self._opcode, self._message = None, bytearray()
                return whole
        return None

    def _head(self) -> tuple[Opcode, bool, int, int] | None:
        """(kind, whether it is the last one of its message, where the mask begins, bytes of the payload) of the next
        frame; None: not all of this has come. Raises FrameError.
        """
        received = self._received
        if len(received) < 2:
            return None
        first, second = received[0], received[1]
        opcode, is_last, length, begin = self._opcode_of(first), bool(first & 0x80), second & 0x7F, 2
        if not second & 0x80:
            raise FrameError(PROTOCOL_ERROR, "a client's frame is not masked")
        if opcode.is_control and (not is_last or length > MAX_CONTROL_BYTES):
            raise FrameError(PROTOCOL_ERROR, "a control frame is long, or in parts")
        if length > MAX_CONTROL_BYTES:
            size, form = (2, ">H") if length == 126 else (8, ">Q")
            begin += size
            if len(received) < begin:
                return None
            (length,) = struct.unpack(form, received[2:begin])
        if length + len(self._message) > MAX_MESSAGE_BYTES:
            raise FrameError(TOO_LARGE, f"a message has more than {MAX_MESSAGE_BYTES} bytes")
        return opcode, is_last, begin, length

    def _opcode_of(self, first: int) -> Opcode:
        """The kind of a frame, by its first byte. Raises FrameError for one that may not stand here."""
        try:
            opcode = Opcode(first & 0x0F)
        except ValueError as error:
            raise FrameError(PROTOCOL_ERROR, f"there are no frames of kind {first & 0x0F}") from error
        if first & 0x70:
            raise FrameError(PROTOCOL_ERROR, "a frame is of an extension that was not agreed on")
        if not opcode.is_control and (opcode is Opcode.CONTINUATION) != (self._opcode is not None):
            raise FrameError(PROTOCOL_ERROR, "a message begins within another one, or goes on without beginning")
        return opcode


def _unmasked(payload: bytes | bytearray, mask: bytes | bytearray) -> bytes:
    """A payload as it was before the client masked it with four bytes."""
    length = len(payload)
    repeated = (bytes(mask) * (length // 4 + 1))[:length]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(length, "big")


def frame_of(opcode: Opcode, payload: bytes) -> bytes:
    """A frame as a server sends it: whole, not masked."""
    length = len(payload)
    if length <= MAX_CONTROL_BYTES:
        head = struct.pack(">BB", 0x80 | opcode, length)
    elif length < 2**16:
        head = struct.pack(">BBH", 0x80 | opcode, 126, length)
    else:
        head = struct.pack(">BBQ", 0x80 | opcode, 127, length)
    return head + payload


def close_frame(code: int, reason: str = "") -> bytes:
    """A close frame; a long reason is cut."""
    said = reason.encode()[: MAX_CONTROL_BYTES - 2].decode(errors="ignore").encode()
    return frame_of(Opcode.CLOSE, b"" if code == NO_CODE else struct.pack(">H", code) + said)
