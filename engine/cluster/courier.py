"""Courier: one end of the way between an API server and an engine of another machine.

Each end stands between two sockets. Near, one that speaks as if engine and API server were on one machine: messages in
envelopes, whose arrays are in an arena of this machine. Far, the connection to the other end. Messages pass in order,
and unread but for the arrays of requests: a message is handed on once the arrays that belong to it are there.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from core.errors import MessageError
from core.ipc.shared_array import Arena
from core.messages.codec import MessageDecoder
from core.messages.engine import FromEngine, ToEngine
from engine.cluster.connection import Connection
from engine.cluster.link import Buffer, Frames

ArrayName = tuple[str, int]
"""Request, and offset in the API server's arena."""


class Delivery(msgspec.Struct, frozen=True, array_like=True):
    """What comes before a message."""

    arrays: tuple[ArrayName, ...] = ()  # that belong to it


class _Waiting(NamedTuple):
    missing: set[ArrayName]
    payload: bytes


class _Outgoing(NamedTuple):
    name: ArrayName
    array: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Ends:
    """What a courier stands between, and the arena that it fills. transmit: sends to the other end, see `Connection`.
    near: takes messages that have come from there. on_silence: called when it has been silent for `silence_seconds`.
    """

    arena: Arena
    transmit: Callable[[bytes, Frames], None]
    near: Callable[[bytes], None]
    on_silence: Callable[[], None]
    silence_seconds: float


class Courier(ABC):
    """What both ends have in common. Run `run` as a task while the sockets are open."""

    def __init__(self, epoch: int, ends: Ends) -> None:
        """epoch: of the engine, see `core.messages.envelope`."""
        self._connection = Connection(epoch, self, ends.transmit, ends.silence_seconds)
        self._arena, self._near, self._on_silence = ends.arena, ends.near, ends.on_silence
        self._to_engine: MessageDecoder[ToEngine] = MessageDecoder(ToEngine)
        self._from_engine: MessageDecoder[FromEngine] = MessageDecoder(FromEngine)
        self._outbox: asyncio.Queue[_Outgoing | Callable[[], None]] = asyncio.Queue()
        self._waiting: deque[_Waiting] = deque()  # in the order in which they came
        self._have_come: set[ArrayName] = set()  # of messages that have not
        self._decoder = msgspec.msgpack.Decoder(Delivery)

    async def run(self) -> None:
        """Send arrays, and what shows that this end lives, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._connection.run())
            while True:
                match await self._outbox.get():
                    case _Outgoing((request_id, offset), array):
                        await self._connection.send_array(request_id, offset, array)
                    case then:
                        then()

    def receive(self, link: bytes, frames: Sequence[Buffer]) -> None:
        """Take what has come from the other end. Raises MessageError for what it cannot have sent, OutOfMemoryError if
        there is no room for an array; the courier is of no more use then."""
        self._connection.receive(link, frames)

    @property
    def byte_seconds(self) -> float:
        """Seconds that a byte of an array takes to the other end, as far as is known."""
        return self._connection.byte_seconds

    @property
    def is_flushed(self) -> bool:
        """Whether the other end has all that was sent."""
        return self._outbox.empty() and not self._connection.unanswered_bytes

    def _send(
        self,
        payload: bytes,
        arrays: Iterable[tuple[ArrayName, npt.NDArray[Any]]] = (),
        then: Callable[[], None] | None = None,
    ) -> None:
        """Send a message and its arrays, which must not change until `then` is called."""
        outgoing = [_Outgoing(*each) for each in arrays]
        delivery = Delivery(tuple(each.name for each in outgoing))
        self._connection.send(msgspec.msgpack.encode(delivery), payload)
        for each in outgoing:
            self._outbox.put_nowait(each)
        if then is not None:
            self._outbox.put_nowait(then)

    def on_message(self, frames: Sequence[bytes]) -> None:
        """See Peer."""
        try:
            head, payload = frames
            delivery = self._decoder.decode(head)
        except (ValueError, msgspec.DecodeError) as error:
            raise MessageError(f"a message from another machine cannot be decoded: {error}") from error
        missing = set(delivery.arrays) - self._have_come
        self._have_come -= set(delivery.arrays)
        self._waiting.append(_Waiting(missing, payload))
        self._hand_on_all()

    def on_array(self, request_id: str, offset: int) -> None:
        """See Peer."""
        name = request_id, offset
        waiting = next((each for each in self._waiting if name in each.missing), None)
        if waiting is None:
            self._have_come.add(name)
            return
        waiting.missing.remove(name)
        self._hand_on_all()

    def _hand_on_all(self) -> None:
        while self._waiting and not self._waiting[0].missing:
            waiting = self._waiting.popleft()
            self._hand_on(waiting.payload)

    @abstractmethod
    def _hand_on(self, payload: bytes) -> None:
        """Give a message to the near socket; its arrays are in this machine's arena. Raises as `receive`."""

    @abstractmethod
    def place(self, request_id: str, offset: int, total: int) -> npt.NDArray[np.uint8]:
        """See Peer."""

    def on_silence(self) -> None:
        """See Peer."""
        self._on_silence()
