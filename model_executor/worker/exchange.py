"""Exchange: sends values to other ranks, and waits for theirs, while batches run (deferred inputs).

A `Delivery` is executed as soon as this rank has the value: at once, or after the batch that makes it. So a rank that
waits for it within a batch waits only for batches dispatched before its own, and never in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from core.handles import TensorKey, TensorRef
from core.ipc.peer_sockets import PeerSockets
from core.messages.worker import Batch, Delivery
from model_executor.worker.tensor_store import MissingValueError, TensorStore


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
        self._early: list[tuple[_Parcel, np.ndarray]] = []  # received for later batches

    # ------------------------------------------------------------------------------------------------ sending

    def begin_plan(self, deliveries: Iterable[Delivery], batches: Sequence[Batch]) -> None:
        """Send what this rank has already; note what these batches will make."""
        to_come = {(item.request_id, item.node) for batch in batches for item in batch.items}
        for delivery in deliveries:
            if (delivery.key.request_id, delivery.key.node) in to_come:
                self._to_send.append(delivery)
            else:
                self._send(delivery)

    def end_batch(self, batch: Batch) -> None:
        """Send what the batch has made, or that it has not."""
        made = {(item.request_id, item.node) for item in batch.items}
        mine = [each for each in self._to_send if (each.key.request_id, each.key.node) in made]
        for delivery in mine:
            self._to_send.remove(delivery)
            self._send(delivery)

    def _send(self, delivery: Delivery) -> None:
        assert self._sockets is not None, "an engine with one rank delivers nothing"
        ref, data = self._store.find(delivery.key), None
        if ref is not None:
            data = np.empty(ref.nbytes, np.uint8)
            self._store.write(delivery.key, data)
        self._sockets.post(delivery.target, msgspec.msgpack.encode(_Parcel(delivery.key, ref)), data)

    # ------------------------------------------------------------------------------------------------ receiving

    def begin_batch(self, batch: Batch) -> None:
        """Note which values other ranks send for this batch."""
        for item in batch.items:
            for ref in item.inputs:
                if ref.is_deferred:
                    self._awaited[ref.key] = self._awaited.get(ref.key, 0) + 1
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
        for key in list(self._awaited):
            while self._awaited.get(key):
                self._receive()
        self._failed.clear()

    def _receive(self) -> None:
        assert self._sockets is not None, "an engine with one rank receives nothing"
        header, data = self._sockets.receive()
        self._take(self._decoder.decode(header), data)

    def _take(self, parcel: _Parcel, data: np.ndarray) -> None:
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
