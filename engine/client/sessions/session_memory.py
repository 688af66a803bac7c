"""SessionMemory: the shared memory of one session, allocated piece by piece and freed at the session's end."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import InvalidRequestError, OutOfMemoryError, OverloadedError
from core.handles import ArrayRef
from core.ipc.shared_array import carve
from engine.client.services import Services
from engine.client.upload import Upload

PIECE_BYTES = 1024 * 1024
"""Bytes of an array copied per turn of the event loop: about 0.4 ms of work."""


class SessionMemory:
    """Regions of the API server's arena. The session calls `release` once no process can touch them any more."""

    def __init__(self, services: Services) -> None:
        self._arena = services.arena
        self._admission = services.admission
        self._max_upload_bytes = services.config.image.max_upload_bytes
        self._regions: list[ArrayRef] = []  # everything to free at the end

    def alloc(self, nbytes: int) -> ArrayRef:
        """Allocate a region, uint8 [nbytes], content undefined. Raises OverloadedError if there is no room."""
        try:
            region = self._arena.alloc(nbytes)
        except OutOfMemoryError as error:
            retry_after = self._admission.retry_after()
            raise OverloadedError("No shared memory is left for this edit.", retry_after=retry_after) from error
        self._regions.append(region)
        return region

    def trim(self, region: ArrayRef, nbytes: int) -> None:
        """Free all of a region but its first `nbytes`."""
        self._regions.remove(region)
        self._regions.append(self._arena.trim(region, nbytes))

    async def store(self, upload: Upload | None) -> ArrayRef | None:
        """Copy an upload, if there is one, as `store_file` does."""
        return None if upload is None else await self.store_file(upload)

    async def store_file(self, upload: Upload) -> ArrayRef:
        """Copy an upload into the arena, uint8 [bytes], yielding to the event loop between pieces. Raises
        InvalidRequestError if it is larger than the server accepts, OverloadedError if there is no room.
        """
        limit = self._max_upload_bytes
        if upload.size > limit:
            raise InvalidRequestError(
                f"The file has {upload.size} bytes; at most {limit} are accepted.", code="request_too_large"
            )
        ref = carve(self.alloc(max(1, upload.size)), 0, (upload.size,), "uint8")
        view, start = self._arena.view(ref), 0
        async for chunk in upload.chunks():
            view[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
            start += len(chunk)
            await asyncio.sleep(0)
        return ref

    async def store_array(self, array: npt.NDArray[Any]) -> ArrayRef:
        """Copy an array into the arena, yielding to the event loop between pieces: a thread would go on to write when
        its caller has left. array: contiguous. Raises OverloadedError if there is no room.
        """
        ref = carve(self.alloc(max(1, array.nbytes)), 0, array.shape, array.dtype.name)
        source, view = (each.reshape(-1).view(np.uint8) for each in (array, self._arena.view(ref)))
        for start in range(0, len(source), PIECE_BYTES):
            view[start : start + PIECE_BYTES] = source[start : start + PIECE_BYTES]
            await asyncio.sleep(0)
        return ref

    async def release(self) -> None:
        """Free all regions."""
        while self._regions:
            await self._arena.release(self._regions.pop())
