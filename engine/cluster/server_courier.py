"""ServerCourier: the API server's end of the way to an engine of another machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from core.handles import ArrayRef
from core.ipc.shared_array import Arena, array_bytes
from core.messages.codec import MessageDecoder
from core.messages.engine import EngineRequest, PrimeTemplate, ToEngine
from core.messages.envelope import body_of
from engine.cluster.courier import Courier
from engine.cluster.link import Frames
from engine.cluster.request_arrays import arrays_read, arrays_written


class ServerCourier(Courier):
    """Sends what requests read, and writes what engines have made to where the request wants it, whose memory is its
    session's until the terminal message.
    """

    def __init__(
        self,
        epoch: int,
        arena: Arena,
        transmit: Callable[[bytes, Frames], None],
        near: Callable[[bytes], None],
        on_silence: Callable[[], None],
        silence_seconds: float,
    ) -> None:
        """near: takes the engine's messages. on_silence: called when the host has been silent for that long."""
        super().__init__(epoch, transmit, silence_seconds)
        self._arena = arena
        self._near = near
        self._on_silence = on_silence
        self._written: dict[str, dict[int, ArrayRef]] = {}  # request -> what its engine makes, by offset
        self._messages: MessageDecoder[ToEngine] = MessageDecoder(ToEngine)

    def send(self, payload: bytes) -> None:
        """Send a message to the engine."""
        message = self._messages.decode(body_of(payload))
        if not isinstance(message, EngineRequest | PrimeTemplate):
            return self._send(payload)
        request_id = message.request_id
        self._written[request_id] = {ref.offset: ref for ref in arrays_written(message)}
        self._send(payload, [((request_id, ref.offset), self._arena.view(ref)) for ref in arrays_read(message)])

    def _hand_on(self, payload: bytes, ended: Sequence[str]) -> None:
        for request_id in ended:
            self._written.pop(request_id, None)
        self._near(payload)

    def place(self, request_id: str, offset: int, total: int) -> npt.NDArray[np.uint8] | None:
        """See Peer."""
        ref = self._written.get(request_id, {}).get(offset)
        if ref is None or array_bytes(ref) != total:
            return None
        return self._arena.view(ref).reshape(-1).view(np.uint8)

    def on_silence(self) -> None:
        """See Peer."""
        self._on_silence()
