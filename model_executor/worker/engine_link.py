"""EngineLink: a worker's channel to its engine, shared by its threads."""

from __future__ import annotations

import threading
from contextlib import suppress

from core.ipc.ring import Channel, PeerClosedError
from core.messages.codec import encode
from core.messages.worker import AdditionDone, FromWorker, ModelFailed, ModelLoaded, PageCopied, WorkerFailed


class EngineLink:
    """A lock keeps the threads' messages apart."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    def send(self, message: FromWorker) -> None:
        """Send a message. Raises PeerClosedError when the engine is gone."""
        payload = encode(message)
        with self._sending:
            self._channel.send(payload)

    def report(self, message: PageCopied | ModelLoaded | ModelFailed | AdditionDone | WorkerFailed) -> None:
        """`send` for other threads, which leave it to the main thread to notice that the engine is gone."""
        with suppress(PeerClosedError):
            self.send(message)

    def recv(self) -> bytes:
        """The engine's next message. Main thread only. Raises PeerClosedError when the engine is gone."""
        return self._channel.recv()

    def take(self) -> bytes | None:
        """The engine's next message, if it has come. Main thread only."""
        return self._channel.take()
