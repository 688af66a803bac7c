"""Exchange: sends values to other ranks, and waits for theirs, while batches run (deferred inputs).

A `Delivery` is executed as soon as this rank has the value: at once, or after the batch that makes it. So a rank that
waits for it within a batch waits only for batches dispatched before its own, and never in a circle.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from core.handles import TensorKey, TensorRef
from core.ipc.peer_sockets import PeerSockets
from core.messages.worker import Batch, Delivery
from model_executor.worker.tensor_store import MissingValueError, TensorStore

Run = tuple[str, str, int]
"""Request id, node, version of what it makes: one run of a node."""


class _Parcel(msgspec.Struct, frozen=True, omit_defaults=True):
    """Header of a message between ranks."""

    key: TensorKey
    ref: TensorRef | None = None  # describes the data; None: the value was not made


class Exchange:
    """One worker's end. sockets: None in an engine with one rank, which has nothing to exchange."""

    def __init__(self, store: TensorStore, sockets: PeerSockets | None = None) -> None:
        self._store = store
        self._sockets = sockets
        self._to_send: list[Delivery] = []  # of values that batches of the plan in execution make
        self._decoder = msgspec.msgpack.Decoder(_Parcel)
        self._awaited: dict[TensorKey, int] = {}  # by the batch that runs -> messages still to come
        self._failed: set[TensorKey] = set()  # of these, values that were not made
        self._early: list[tuple[_Parcel, npt.NDArray[Any]]] = []  # received for later batches
        self._waited = 0.0  # seconds

    def free(self, keys: Collection[TensorKey]) -> None:
        """Drop what has come for batches that will not run. keys: as for `TensorStore.free`. Whatever is sent for a
        request is sent before the engine frees it.
        """
        if self._sockets is None or not keys:
            return
        self._receive_all()
        gone, ended = set(keys), {key.request_id for key in keys if not key.node and not key.name}
        self._early = [each for each in self._early if each[0].key not in gone and each[0].key.request_id not in ended]

    def close(self) -> None:
        """Close the sockets."""
        if self._sockets is not None:
            self._sockets.close()

    # ------------------------------------------------------------------------------------------------ sending

    def begin_plan(self, deliveries: Iterable[Delivery], batches: Sequence[Batch]) -> None:
        """Send what this rank has already; note what these batches will make."""
        to_come = {run for batch in batches for run in _runs(batch)}
        for delivery in deliveries:
            if _run_of(delivery) in to_come:
                self._to_send.append(delivery)
            else:
                self._send(delivery)

    def end_batch(self, batch: Batch) -> None:
        """Send what the batch has made, or that it has not."""
        made = set(_runs(batch)) if self._to_send else set()
        mine = [delivery for delivery in self._to_send if _run_of(delivery) in made]
        for delivery in mine:
            self._to_send.remove(delivery)
            self._send(delivery)

    def _send(self, delivery: Delivery) -> None:
        assert self._sockets is not None, "an engine with one rank delivers nothing"
        ref, data = self._store.find(delivery.key), None
        if ref is not None:
            data = np.empty(ref.nbytes, np.uint8)
            self._store.write(delivery.key, data)
        header = msgspec.msgpack.encode(_Parcel(delivery.key, ref))
        while not self._sockets.post(delivery.target, header, data):
            self._receive_all()  # the other rank may be waiting for room here, too
            self._sockets.wait_for_room(delivery.target)

    # ------------------------------------------------------------------------------------------------ receiving

    def begin_batch(self, batch: Batch) -> None:
        """Note which values other ranks send for this batch."""
        for item in batch.items:
            for ref in item.inputs:
                if ref.is_deferred and ref.rank != self._store.rank:
                    self._awaited[ref.key] = self._awaited.get(ref.key, 0) + 1
        if self._awaited:
            early, self._early = self._early, []
            for parcel, data in early:
                self._take(parcel, data)

    def wait(self, key: TensorKey) -> None:
        """Wait until a deferred value of the batch that runs is in the tensor store. Raises MissingValueError if it was
        not made.
        """
        while self._awaited.get(key):
            self._receive()
        if key in self._failed:
            raise MissingValueError(f"{key.node}.{key.name} of {key.request_id} was not made")

    def finish_batch(self) -> None:
        """Receive what the batch did not wait for, so that nothing arrives after it has ended."""
        while self._awaited:
            self._receive()
        self._failed.clear()

    def take_waited(self) -> float:
        """Seconds spent waiting since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _receive(self) -> None:
        assert self._sockets is not None, "an engine with one rank receives nothing"
        started = time.monotonic()
        header, data = self._sockets.receive()
        self._waited += time.monotonic() - started
        self._take(self._decoder.decode(header), data)

    def _receive_all(self) -> None:
        """Receive what has come, without waiting."""
        assert self._sockets is not None
        while self._sockets.has_message():
            header, data = self._sockets.receive()
            self._take(self._decoder.decode(header), data)

    def _take(self, parcel: _Parcel, data: npt.NDArray[Any]) -> None:
        left = self._awaited.get(parcel.key)
        if left is None:
            self._early.append((parcel, data))
            return
        if left == 1:
            del self._awaited[parcel.key]
        else:
            self._awaited[parcel.key] = left - 1
        if parcel.ref is None:
            self._failed.add(parcel.key)
        else:
            self._store.put_bytes(parcel.ref, data)


def _runs(batch: Batch) -> list[Run]:
    return [(item.request_id, item.node, item.version) for item in batch.items]


def _run_of(delivery: Delivery) -> Run:
    return delivery.key.request_id, delivery.key.node, delivery.key.version
