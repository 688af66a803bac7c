"""Sockets: the clients that listen on /ws, and what is sent to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

MAX_SOCKETS = 1024
MAX_SOCKETS_OF_OWNER = 128

MAX_WAITING_BYTES = 64 * 2**20
"""Of messages that wait for a client; one that reads more slowly is given up."""

MAX_WAITING_IN_ALL = 256 * 2**20
"""Bytes of messages that wait for clients. Beyond, the client with most is given up, of the owner with most."""

MAX_PREVIEW_BYTES = 8 * 2**20
"""Of waiting messages from which on a client is sent no previews."""


class Socket:
    """One client that listens. nbytes: of what it has not been sent yet; a character of text counts as one."""

    def __init__(self, count: Callable[[int], None]) -> None:
        """count: is told by how much `nbytes` grows, or shrinks; may end this or other sockets."""
        self.nbytes = 0
        self.given_up = asyncio.Event()
        self._count_too = count
        self._waiting: asyncio.Queue[str | bytes | None] = asyncio.Queue()  # None: it ends here
        self._sending = 0  # bytes of the message that is being sent

    def put(self, message: str | bytes) -> None:
        """Send a message as soon as those before it are sent."""
        if self.given_up.is_set():
            return
        self._waiting.put_nowait(message)
        self._count(len(message))
        if self.nbytes > MAX_WAITING_BYTES:
            self.end()

    def end(self) -> None:
        """Send nothing more: close the connection."""
        if self.given_up.is_set():
            return
        self.given_up.set()
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)
        self._sending = 0
        self._count(-self.nbytes)

    async def next(self) -> str | bytes | None:
        """The former message has been sent: wait for the next one. None: the connection closes."""
        self._count(-self._sending)
        self._sending = 0
        message = await self._waiting.get()
        self._sending = len(message or "")
        return message

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._count_too(nbytes)


class Sockets:
    """Of all owners, by the id that each client gives itself."""

    def __init__(self) -> None:
        self._sockets: dict[tuple[str, str], Socket] = {}  # (owner, client's id) -> its latest connection
        self._nbytes = 0  # that wait for all of them

    def has_room(self, owner: str, client_id: str) -> bool:
        """Whether an owner may open another one, or one that replaces its client's former one."""
        if (owner, client_id) in self._sockets:
            return True
        mine = sum(other == owner for other, _ in self._sockets)
        return len(self._sockets) < MAX_SOCKETS and mine < MAX_SOCKETS_OF_OWNER

    @contextmanager
    def open(self, owner: str, client_id: str) -> Iterator[Socket]:
        """Listen under a client's id, in place of an earlier connection with it."""
        key, socket = (owner, client_id), Socket(self._count)
        if (former := self._sockets.pop(key, None)) is not None:
            former.end()
        self._sockets[key] = socket
        try:
            yield socket
        finally:
            socket.end()
            if self._sockets.get(key) is socket:
                del self._sockets[key]

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        while self._nbytes > MAX_WAITING_IN_ALL:
            of_owner: Counter[str] = Counter()
            for (owner, _), socket in self._sockets.items():
                of_owner[owner] += socket.nbytes
            greediest = max(of_owner, key=of_owner.__getitem__)
            own = [socket for (owner, _), socket in self._sockets.items() if owner == greediest]
            max(own, key=lambda socket: socket.nbytes).end()

    def listens(self, owner: str, client_id: str | None) -> bool:
        """Whether a client is sent messages."""
        socket = None if client_id is None else self._sockets.get((owner, client_id))
        return socket is not None and not socket.given_up.is_set()

    def send(self, owner: str, client_id: str | None, event: str, data: Mapping[str, Any]) -> None:
        """Send a message to one client, if it listens."""
        if client_id is not None and (socket := self._sockets.get((owner, client_id))) is not None:
            socket.put(message_of(event, data))

    def send_picture(self, owner: str, client_id: str | None, content: bytes, *, is_preview: bool) -> None:
        """Send a binary message to one client, if it listens, a preview only if it keeps up."""
        socket = None if client_id is None else self._sockets.get((owner, client_id))
        if socket is not None and not (is_preview and socket.nbytes > MAX_PREVIEW_BYTES):
            socket.put(content)

    def send_all(self, owner: str, event: str, data: Mapping[str, Any]) -> None:
        """Send a message to all clients of an owner."""
        text = message_of(event, data)
        for (other, _), socket in self._sockets.items():
            if other == owner:
                socket.put(text)


def message_of(event: str, data: Mapping[str, Any]) -> str:
    """A message in ComfyUI's form."""
    return msgspec.json.encode({"type": event, "data": data}).decode()
