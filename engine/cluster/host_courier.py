"""HostCourier: the engine's end of the way from an API server on another machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from core.errors import MessageError
from core.handles import ArrayRef
from core.ipc.shared_array import ArenaAllocator, array_bytes
from core.messages.codec import encode
from core.messages.engine import (
    AdaptersUsed,
    EngineFailed,
    EngineOutputs,
    EngineRequest,
    Finished,
    Output,
    PartialImage,
    PrimeTemplate,
)
from core.messages.envelope import body_of, with_body
from core.messages.request_arrays import arrays_written, moved
from engine.cluster.courier import ArrayName, Courier, Ends


@dataclass(slots=True)
class _Held:
    """A request's memory. Keys are offsets in the API server's arena."""

    refs: dict[int, ArrayRef] = field(default_factory=dict)  # uint8 [bytes], as allocated
    previews: tuple[int, ...] = ()
    results: tuple[int, ...] = ()  # the other arrays that the engine makes


class HostCourier(Courier):
    """Keeps what requests read in an arena of this machine, which the engine maps, and sends back what it has made."""

    def __init__(self, epoch: int, machine: str, ends: Ends) -> None:
        """machine: its address, for errors."""
        super().__init__(epoch, ends)
        self._machine = machine
        self._allocator = ArenaAllocator(ends.arena)
        self._held: dict[str, _Held] = {}  # by request

    def send(self, payload: bytes) -> None:
        """Send a message of the engine to the API server."""
        message = self._from_engine.decode(body_of(payload))
        if not isinstance(message, EngineOutputs | EngineFailed):
            return self._send(payload)
        if isinstance(message, EngineFailed):
            payload = with_body(payload, encode(self._named(message)))
        arrays = [array for output in message.outputs for array in self._made(output)]
        ended = [each.request_id for each in message.outputs if not isinstance(each, PartialImage | AdaptersUsed)]
        # At once: a request that the engine has failed may come again before its memory is freed.
        gone = [self._held.pop(request_id) for request_id in ended if request_id in self._held]
        self._send(payload, arrays, lambda: self._free(gone))

    def _named(self, message: EngineFailed) -> EngineFailed:
        """The same with this machine named: what is missing may be there on other ones."""
        failure = message.failure
        named = msgspec.structs.replace(failure, message=f"{self._machine}: {failure.message}")
        return msgspec.structs.replace(message, failure=named)

    def _made(self, output: Output) -> Iterator[tuple[ArrayName, npt.NDArray[Any]]]:
        """The arrays that an output tells of."""
        held = self._held.get(output.request_id)
        match output:
            case _ if held is None:
                return
            case PartialImage():
                offsets = held.previews[output.index : output.index + 1]
            case Finished():
                offsets = held.results
            case _:
                return
        for offset in offsets:
            yield (output.request_id, offset), self._arena.view(held.refs[offset])

    def _free(self, gone: Sequence[_Held]) -> None:
        for held in gone:
            for ref in held.refs.values():
                self._allocator.free(ref)

    def _hand_on(self, payload: bytes) -> None:
        try:
            message = self._to_engine.decode(body_of(payload))
        except MessageError:
            return self._near(payload)  # the engine refuses it
        if isinstance(message, EngineRequest | PrimeTemplate):
            payload = with_body(payload, encode(self._settled(message)))
        self._near(payload)

    def _settled(self, message: EngineRequest | PrimeTemplate) -> EngineRequest | PrimeTemplate:
        """A request, whose arrays have come, with all of them in this machine's arena."""
        held = self._held.setdefault(message.request_id, _Held())
        written = arrays_written(message)
        for ref in written:
            held.refs[ref.offset] = self._allocator.alloc(array_bytes(ref))
        if isinstance(message, EngineRequest):
            held.previews = tuple(each.array.offset for each in message.spec.previews)
        held.results = tuple(ref.offset for ref in written if ref.offset not in held.previews)
        places = {offset: ref.offset for offset, ref in held.refs.items()}
        return moved(message, places)

    def place(self, request_id: str, offset: int, total: int) -> npt.NDArray[np.uint8]:
        """See Peer."""
        if total <= 0:
            raise MessageError(f"an array of {total} bytes at {offset}, which {request_id!r} cannot have")
        refs = self._held.setdefault(request_id, _Held()).refs
        if offset not in refs:
            refs[offset] = self._allocator.alloc(total)
        return self._arena.view(refs[offset])
