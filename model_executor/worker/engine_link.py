"""EngineLink: a worker's channel to its engine, shared by its threads."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from core.errors import MessageError
from core.ipc.logs import of_request
from core.ipc.ring import Channel, PeerClosedError
from core.messages.codec import encode
from core.messages.salvage import sendable_result
from core.messages.worker import AdapterLoaded, BatchResult, FromWorker, ModelFailed, ModelLoaded, PageCopied

logger = logging.getLogger("stencil.worker")


class EngineLink:
    """A lock keeps the threads' messages apart."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    def send(self, message: FromWorker) -> None:
        """Send a message. A result that cannot be encoded fails its own request. Raises PeerClosedError when the engine
        is gone."""
        try:
            payload = encode(message)
        except MessageError as error:
            logger.error("%s", error, extra=of_request(""))
            if not isinstance(message, BatchResult):
                raise
            payload = encode(sendable_result(message))
        with self._sending:
            self._channel.send(payload)

    def report(self, message: PageCopied | ModelLoaded | ModelFailed | AdapterLoaded) -> None:
        """`send` for other threads, which leave it to the main thread to notice that the engine is gone."""
        with suppress(PeerClosedError):
            self.send(message)

    def recv(self) -> bytes:
        """The engine's next message. Main thread only. Raises PeerClosedError when the engine is gone."""
        return self._channel.recv()
