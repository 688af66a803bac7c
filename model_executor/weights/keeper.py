"""The keeper of weights: loads components, and keeps them in shared memory while workers use them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import selectors
import socket
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from core.errors import ConfigError, MessageError
from core.failure import Failure
from core.handles import ModelKey
from core.ipc.local_sockets import MESSAGE_BYTES, is_own, send
from core.ipc.logs import of_request
from core.messages.codec import MessageDecoder, encode
from core.messages.weights import DropWeights, FromKeeper, TakeWeights, ToKeeper, WeightsFailed, WeightsTaken
from model_executor.checkpoint.loader import CONTROLNET_PART, ONE_PART, ModelCheckpoint
from model_executor.models.controlnet.registry import pack_controlnet
from model_executor.models.registry import make_family
from model_executor.weights.image import Image, write_image

logger = logging.getLogger("stencil.weights")


RETRY_SECONDS = 0.1
"""After a worker could not be let in."""

LINGER_SECONDS = 60.0
"""How long components outlive the death of their last user, whose process is restarted and takes them again."""


@dataclass(slots=True)
class _Kept:
    """A component in shared memory."""

    fd: int
    image: Image
    users: set[socket.socket] = field(default_factory=set)
    until: float | None = None  # without users: when it is freed


class Keeper:
    """Serves workers one after the other. A component is freed when its last user drops it, or LINGER_SECONDS after
    that one is gone."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._kept: dict[ModelKey, _Kept] = {}
        self._decoder: MessageDecoder[ToKeeper] = MessageDecoder(ToKeeper)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            for key, _ in self._selector.select(self._next_end()):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._serve(key.fileobj)
            self._free_left()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # too many descriptors are open: some are closed when a worker ends
            logger.error("cannot let a worker in: %s", error, extra=of_request(""))
            time.sleep(RETRY_SECONDS)
            return
        if is_own(connection):
            self._selector.register(connection, selectors.EVENT_READ)
        else:
            connection.close()

    def _serve(self, user: socket.socket) -> None:
        with contextlib.suppress(OSError):
            payload = user.recv(MESSAGE_BYTES)  # the kernel drops descriptors that come with it
            if payload:
                self._answer(user, payload)
                return
        self._forget(user)

    def _answer(self, user: socket.socket, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
        except MessageError as error:
            send(user, encode(WeightsFailed(Failure.of(error))))
            return
        match message:
            case TakeWeights():
                answer, fd = self._take(user, message)
                send(user, encode(answer), () if fd is None else (fd,))
            case DropWeights():
                self._drop(user, message.key)

    def _take(self, user: socket.socket, wanted: TakeWeights) -> tuple[FromKeeper, int | None]:
        """(answer, descriptor that goes with it)."""
        kept = self._kept.get(wanted.key)
        if kept is None:
            try:
                kept = self._kept[wanted.key] = _Kept(*write_image(_load(wanted)))
            except ConfigError as error:
                return WeightsFailed(Failure.of(error)), None
            except Exception as error:  # whatever a library raises fails this component alone
                logger.error("%s: %s\n%s", wanted.part, error, traceback.format_exc(), extra=of_request(""))
                return WeightsFailed(Failure.of(error)), None
            finally:
                gc.collect()  # denoisers refer to themselves, and hold what was packed
        kept.users.add(user)
        kept.until = None
        return WeightsTaken(kept.image.start, kept.image.nbytes), kept.fd

    def _drop(self, user: socket.socket, key: ModelKey) -> None:
        kept = self._kept.get(key)
        if kept is None:
            return
        kept.users.discard(user)
        if not kept.users:
            os.close(self._kept.pop(key).fd)

    def _forget(self, user: socket.socket) -> None:
        """Forget a worker that is gone."""
        self._selector.unregister(user)
        user.close()
        for kept in self._kept.values():
            if user in kept.users:
                kept.users.remove(user)
                kept.until = None if kept.users else time.monotonic() + LINGER_SECONDS

    def _next_end(self) -> float | None:
        """Seconds until the next component is freed, None if no such time is known."""
        ends = [kept.until for kept in self._kept.values() if kept.until is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _free_left(self) -> None:
        """Free components whose last user did not return."""
        now = time.monotonic()
        for key in [key for key, kept in self._kept.items() if kept.until is not None and kept.until <= now]:
            os.close(self._kept.pop(key).fd)


def _load(wanted: TakeWeights) -> nn.Module:
    """The module of a component, packed for the sender. Raises ConfigError, and out-of-memory errors."""
    checkpoint = ModelCheckpoint.open(wanted.model)
    module: nn.Module = checkpoint.load(wanted.part)
    if wanted.cpu_threads and wanted.part != ONE_PART:  # which is used as it is
        with _threads(wanted.cpu_threads):  # what is packed stays in the module
            if wanted.part == CONTROLNET_PART:
                pack_controlnet(checkpoint, module)
            else:
                make_family(checkpoint).prepare(wanted.part, module)
    return module


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(1)
