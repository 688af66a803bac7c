"""Link: ordered messages between two processes whose connection may break and come back, each delivered once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
import zmq

from core.errors import MessageError

Buffer = bytes | memoryview
"""What has come."""

Frame = Buffer | zmq.Frame
"""What is sent. A zmq.Frame is sent without a copy, however often."""

Frames = Sequence[Frame]
Transmit = Callable[[list[Frame]], None]
"""Sends the frames of a message, or loses them; must not block or raise. What is sent between two losses arrives in
order."""


Kind = Literal["content", "answer", "beat", "repeat"]
"""content: a message. The others have none. answer: tells what was received. beat: the same, and what was sent, at
regular intervals. repeat: the same, and asks for all after `received`."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of all that a link transmits."""

    epoch: int  # of both ends: others are of a former engine
    kind: Kind
    number: int  # of this message, from 1; of one without content, of the last message before
    received: int  # number of the last message that the sender has received


_DECODER = msgspec.msgpack.Decoder(Header)


class _Sent(NamedTuple):
    number: int
    frames: list[Frame]
    size: int  # bytes


class Link:
    """One end. Messages are kept until the other end has said that it has them, and sent again when it misses some,
    which it sees by their numbers; the regular `beat` shows what was lost last.
    """

    def __init__(self, epoch: int, transmit: Transmit) -> None:
        """epoch: of this connection and no other one."""
        self._epoch = epoch
        self._transmit = transmit
        self._unanswered: deque[_Sent] = deque()
        self._last_sent = 0
        self._received = 0
        self._asked_at = -1  # what was received when a repetition was asked for; -1: nothing is awaited
        # What the other end had when messages were repeated, unless this end has beaten since: who asks for the same
        # again and again gets it once a beat.
        self._repeated_after = -1
        self.unanswered_bytes = 0
        """Of messages that the other end is not known to have."""

    def send(self, *frames: Frame) -> None:
        """Send a message. Frames must not change until the other end has them."""
        self._last_sent += 1
        sent = _Sent(self._last_sent, list(frames), sum(map(len, frames)))
        self._unanswered.append(sent)
        self.unanswered_bytes += sent.size
        self._transmit_message(sent)

    def beat(self) -> None:
        """Tell the other end what was sent and received. To be called regularly."""
        self._repeated_after = -1
        self._tell("beat")

    def answer(self) -> None:
        """Tell the other end what was received, so that it need not wait for the next beat to send more."""
        self._tell("answer")

    def receive(self, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """Take what has come; the content of a message that is new and next, None if there is none. Raises
        MessageError for what no link has sent.
        """
        if not frames:
            raise MessageError("an empty message came from another machine")
        try:
            header = _DECODER.decode(frames[0])
        except msgspec.DecodeError as error:
            raise MessageError(f"a message from another machine cannot be decoded: {error}") from error
        if header.epoch != self._epoch:
            return None
        self._note_answer(header.received)
        match header.kind:
            case "content" if header.number == self._received + 1:
                self._received, self._asked_at = header.number, -1
                return frames[1:]
            case "content" | "beat" if header.number > self._received:
                self._ask_for_missing(header)
            case "repeat" if header.received != self._repeated_after:
                self._repeated_after = header.received
                for sent in self._unanswered:
                    self._transmit_message(sent)
        return None

    def _ask_for_missing(self, header: Header) -> None:
        """Have messages repeated that came out of order or not at all. Once, unless the next beat shows that the
        repetition is lost, too."""
        if self._asked_at != self._received:
            self._asked_at = self._received
            self._tell("repeat")
        elif header.kind == "beat":
            self._asked_at = -1

    def _note_answer(self, received: int) -> None:
        while self._unanswered and self._unanswered[0].number <= received:
            self.unanswered_bytes -= self._unanswered.popleft().size

    def _tell(self, kind: Kind) -> None:
        self._transmit([msgspec.msgpack.encode(Header(self._epoch, kind, self._last_sent, self._received))])

    def _transmit_message(self, sent: _Sent) -> None:
        header = Header(self._epoch, "content", sent.number, self._received)
        self._transmit([msgspec.msgpack.encode(header), *sent.frames])
