"""ServerCourier: the API server's end of the way to an engine of another machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from core.errors import MessageError
from core.handles import ArrayRef
from core.ipc.shared_array import array_bytes
from core.messages.codec import read_member
from core.messages.engine import (
    AdaptersUsed,
    EngineFailed,
    EngineOutputs,
    EngineRequest,
    PartialImage,
    PrimeTemplate,
)
from core.messages.envelope import body_of
from core.messages.request_arrays import arrays_read, arrays_written
from core.messages.worker import LoadAdapter, LoadWorkflow
from engine.cluster.courier import Courier, Ends


class ServerCourier(Courier):
    """Sends what requests read, and writes what engines have made to where the request wants it, whose memory is its
    session's until the terminal message. What has ended is told by the engine's messages, not by their courier: another
    machine, whatever it sends, writes nowhere else, and ends requests only that it has.
    """

    def __init__(self, epoch: int, ends: Ends) -> None:
        """As of every Courier."""
        super().__init__(epoch, ends)
        self._written: dict[str, dict[int, ArrayRef]] = {}  # request that runs -> what its engine makes, by offset

    def send(self, payload: bytes) -> None:
        """Send a message to the engine. One that cannot be decoded is the engine's to refuse."""
        body = body_of(payload)
        try:
            message = self._to_engine.decode(body)
        except MessageError:
            self._written[read_member(body, "request_id", str) or ""] = {}
            return self._send(payload)
        match message:
            case EngineRequest(request_id=request_id) | PrimeTemplate(request_id=request_id):
                self._written[request_id] = {ref.offset: ref for ref in arrays_written(message)}
                read = [((request_id, ref.offset), self._arena.view(ref)) for ref in arrays_read(message)]
                return self._send(payload, read)
            case LoadAdapter(request_id=request_id) | LoadWorkflow(request_id=request_id):
                self._written[request_id] = {}
        self._send(payload)

    def _hand_on(self, payload: bytes) -> None:
        message = self._from_engine.decode(body_of(payload))
        if isinstance(message, EngineOutputs | EngineFailed):
            for output in message.outputs:
                if output.request_id not in self._written:
                    raise MessageError(f"an output of {output.request_id!r}, which does not run there")
                if not isinstance(output, PartialImage | AdaptersUsed):
                    del self._written[output.request_id]
        if isinstance(message, EngineFailed):  # all others have ended, too
            self._written.clear()
        self._near(payload)

    def place(self, request_id: str, offset: int, total: int) -> npt.NDArray[np.uint8]:
        """See Peer."""
        ref = self._written.get(request_id, {}).get(offset)
        if ref is None or array_bytes(ref) != total:
            raise MessageError(f"an array of {total} bytes at {offset}, which {request_id!r} does not ask for")
        return self._arena.view(ref).reshape(-1).view(np.uint8)
