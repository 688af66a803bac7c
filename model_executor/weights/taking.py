"""TakenWeights: a worker's connection to the keeper of weights."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from core.config import ModelConfig
from core.errors import EngineError
from core.handles import ModelKey
from core.ipc.local_sockets import connect, receive, send
from core.messages.codec import MessageDecoder, encode
from core.messages.weights import DropWeights, FromKeeper, TakeWeights, WeightsFailed
from model_executor.weights.image import Image, read_image

PATIENCE_SECONDS = 1800.0
"""How long the keeper may take for a component, as a server for its start."""


class TakenWeights:
    """Used by one thread. A keeper that died is connected to again: it is restarted under the same address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: socket.socket | None = None
        self._decoder: MessageDecoder[FromKeeper] = MessageDecoder(FromKeeper)
        # Of what this worker has taken and not dropped: its memory, None when that is not mapped any more.
        self._mappings: dict[ModelKey, Callable[[], Any]] = {}

    def take(self, key: ModelKey, model: ModelConfig, part: str, cpu_threads: int = 0) -> tuple[nn.Module, int]:
        """(a component over memory that all its users share, its bytes); waits until it is loaded. model, part,
        cpu_threads: as in TakeWeights. Raises ConfigError for weights that cannot be loaded, EngineError if the keeper
        dies twice or hangs, or no descriptor is left for them."""
        payload = encode(TakeWeights(key, model, part, cpu_threads))
        try:
            answer, fd = self._ask_again(payload)
        except OSError as error:
            self.close()
            how = "does not answer" if isinstance(error, TimeoutError) else "has died"
            raise EngineError(f"the process that loads weights {how} ({error})") from error
        message = self._decoder.decode(answer)
        if isinstance(message, WeightsFailed):
            raise message.failure.to_error()
        self._mappings.setdefault(key, lambda: None)  # the keeper counts it as taken, even if it cannot be read
        if fd is None:  # the kernel has dropped it
            raise EngineError("this process may open no more files (ulimit -n), and so cannot map the weights")
        try:
            module, memory = read_image(fd, Image(message.start, message.nbytes))
        finally:
            os.close(fd)
        self._mappings[key] = weakref.ref(memory)
        return module, message.start

    def drop_unused(self) -> None:
        """Tell the keeper of components whose memory this worker maps no more: it has dropped them, or keeps them in
        another form."""
        for key in [key for key, mapping in self._mappings.items() if mapping() is None]:
            del self._mappings[key]
            if self._connection is not None:
                with contextlib.suppress(OSError):  # it is gone, and with it what it kept
                    send(self._connection, encode(DropWeights(key)))

    def close(self) -> None:
        """End the connection; the keeper then counts nothing as used by this worker."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._mappings.clear()

    def _ask_again(self, payload: bytes) -> tuple[bytes, int | None]:
        """The answer, at the second attempt if the keeper dies in the first."""
        try:
            return self._ask(payload)
        except ConnectionError:
            self.close()
            return self._ask(payload)

    def _ask(self, payload: bytes) -> tuple[bytes, int | None]:
        if self._connection is None:
            self._connection = connect(self._address)
            self._connection.settimeout(PATIENCE_SECONDS)
        send(self._connection, payload)
        answer, fd = receive(self._connection)
        if not answer:
            raise ConnectionResetError("it closed the connection")
        return answer, fd
