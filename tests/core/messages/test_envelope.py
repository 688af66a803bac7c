"""Each message between a router and an engine is taken once, in order, and only from the incarnation that is meant."""

from __future__ import annotations

import pytest

from core.errors import MessageError
from core.messages.codec import MessageDecoder
from core.messages.engine import Abort, EngineAlive, ToEngine
from core.messages.envelope import Envelopes

DECODER = MessageDecoder[ToEngine](ToEngine)


def sealed(ends: Envelopes, number: int) -> bytes:
    return ends.seal(Abort((f"{number}",)), age=float(number))


def test_a_message_is_taken_once() -> None:
    theirs, ours = Envelopes(2**64 - 1), Envelopes(2**64 - 1)
    payloads = [sealed(theirs, number) for number in range(3)]
    opened = [ours.open(each) for each in (payloads[0], payloads[0], *payloads[1:], *payloads)]
    taken = [(each.age, DECODER.decode(each.body)) for each in opened if each is not None]
    assert taken == [(float(number), Abort((f"{number}",))) for number in range(3)]


def test_a_message_of_another_incarnation_does_nothing() -> None:
    before, now, ours = Envelopes(1), Envelopes(2), Envelopes(2)
    assert ours.open(sealed(before, 0)) is None
    assert ours.open(sealed(now, 0)) is not None
    assert ours.open(sealed(before, 1)) is None, "although its number is the next one"


def test_messages_that_are_lost_are_noticed() -> None:
    theirs, ours = Envelopes(1), Envelopes(1)
    sealed(theirs, 0)
    with pytest.raises(MessageError, match="message 1 is missing, 2 has come"):
        ours.open(sealed(theirs, 1))


def test_a_message_that_cannot_be_encoded_is_not_missed() -> None:
    theirs, ours = Envelopes(1), Envelopes(1)
    with pytest.raises(MessageError):
        theirs.seal(Abort((object(),)))  # type: ignore[arg-type]
    assert ours.open(theirs.seal(EngineAlive())) is not None


@pytest.mark.parametrize("payload", [b"", b"nonsense"])
def test_bytes_without_an_envelope_are_no_message(payload: bytes) -> None:
    with pytest.raises(MessageError, match="no envelope"):
        Envelopes(1).open(payload)
