"""Messages over a connection that loses some: each arrives once, in order."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import MessageError
from engine.cluster.link import Header, Link

EPOCH = 2**63 + 5


class Wire:
    """Both directions of a connection. `lose` drops all that is under way, as a break does."""

    def __init__(self) -> None:
        self.queues: tuple[deque[list[bytes]], deque[list[bytes]]] = (deque(), deque())
        self.ends = tuple(Link(EPOCH, self._into(queue)) for queue in self.queues)
        self.delivered: tuple[list[bytes], list[bytes]] = ([], [])

    @staticmethod
    def _into(queue: deque[list[bytes]]):  # type: ignore[no-untyped-def]
        return lambda frames: queue.append([bytes(frame) for frame in frames])

    def lose(self) -> None:
        for queue in self.queues:
            queue.clear()

    def deliver(self, sender: int, number: int = 1000) -> None:
        """Let up to so many messages of one end arrive."""
        queue, receiver = self.queues[sender], 1 - sender
        for _ in range(min(number, len(queue))):
            content = self.ends[receiver].receive(queue.popleft())
            if content is not None:
                self.delivered[receiver].append(b"".join(content))

    def settle(self, rounds: int) -> None:
        for _ in range(rounds):
            for end in self.ends:
                end.beat()
            while any(self.queues):
                self.deliver(0)
                self.deliver(1)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 1)),
        st.tuples(st.just("deliver"), st.integers(0, 1)),
        st.tuples(st.just("beat"), st.integers(0, 1)),
        st.tuples(st.just("answer"), st.integers(0, 1)),
        st.tuples(st.just("lose"), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_all_arrives_once_and_in_order_whatever_is_lost(actions: list[tuple[str, int]]) -> None:
    wire, sent = Wire(), ([], [])  # type: ignore[var-annotated]
    for action, end in actions:
        match action:
            case "send":
                sent[end].append(b"%d" % len(sent[end]))
                wire.ends[end].send(b"%d" % (len(sent[end]) - 1))
            case "deliver":
                wire.deliver(end, 2)
            case "beat":
                wire.ends[end].beat()
            case "answer":
                wire.ends[end].answer()
            case "lose":
                wire.lose()
    wire.settle(3)
    assert wire.delivered == (sent[1], sent[0])
    assert [end.unanswered_bytes for end in wire.ends] == [0, 0]


def test_a_repetition_is_asked_for_once() -> None:
    wire = Wire()
    for number in range(5):
        wire.ends[0].send(b"%d" % number)
        if number == 0:
            wire.lose()
    wire.deliver(0)
    assert len(wire.queues[1]) == 1
    assert wire.delivered[1] == []
    wire.deliver(1)
    wire.deliver(0)
    assert wire.delivered[1] == [b"0", b"1", b"2", b"3", b"4"]


def test_who_asks_again_and_again_gets_it_once_a_beat() -> None:
    """A request of 20 bytes has megabytes sent."""
    wire = Wire()
    wire.ends[0].send(b"once")
    wire.lose()
    ask = msgspec.msgpack.encode(Header(EPOCH, "repeat", 0, 0))
    for _ in range(3):
        for _ in range(10):
            assert wire.ends[0].receive([ask]) is None
        assert sum(frames[-1] == b"once" for frames in wire.queues[0]) == 1
        wire.lose()
        wire.ends[0].beat()
    wire.ends[0].receive([ask])
    assert sum(frames[-1] == b"once" for frames in wire.queues[0]) == 1


def test_what_came_already_does_nothing() -> None:
    wire = Wire()
    wire.ends[0].send(b"once")
    captured = list(wire.queues[0])
    wire.deliver(0)
    for message in captured * 2:
        assert wire.ends[1].receive(message) is None
    assert wire.delivered[1] == [b"once"]


def test_another_epoch_is_not_heard() -> None:
    wire, former = Wire(), []  # type: ignore[var-annotated]
    Link(7, former.append).send(b"late")
    assert wire.ends[1].receive(former[0]) is None
    assert not wire.queues[1]


@pytest.mark.parametrize("frames", [[], [b""], [b"\xff\xff"], [b"\x94\x01\xa3who\x01\x01"]])
def test_what_no_link_has_sent_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(MessageError):
        Wire().ends[0].receive(frames)
