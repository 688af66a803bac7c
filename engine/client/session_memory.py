"""The shared memory of one session: taken piece by piece, given back at its end."""

from __future__ import annotations

import asyncio

import numpy as np

from core.errors import InvalidRequestError, OutOfMemoryError, OverloadedError
from core.handles import ArrayRef
from core.ipc.shared_array import carve
from engine.client.services import Services
from engine.client.upload import Upload


class SessionMemory:
    """Regions of the arena. The owner calls `release` once nothing can touch them any more."""

    def __init__(self, services: Services) -> None:
        self._arena = services.arena
        self._admission = services.admission
        self._max_upload_bytes = services.config.image.max_upload_bytes
        self._regions: list[ArrayRef] = []  # everything to free at the end

    def alloc(self, nbytes: int) -> ArrayRef:
        """uint8 [nbytes], content undefined. Raises OverloadedError when there is no room."""
        try:
            region = self._arena.alloc(nbytes)
        except OutOfMemoryError as error:
            retry_after = self._admission.retry_after()
            raise OverloadedError("No shared memory is left for this edit.", retry_after=retry_after) from error
        self._regions.append(region)
        return region

    def trim(self, region: ArrayRef, nbytes: int) -> None:
        """Give back all of a region but its first `nbytes`."""
        self._regions.remove(region)
        self._regions.append(self._arena.trim(region, nbytes))

    async def store(self, upload: Upload | None) -> ArrayRef | None:
        """Copy an upload into the arena, giving way to others between pieces. Raises InvalidRequestError when it is
        larger than the server accepts.
        """
        if upload is None:
            return None
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

    async def release(self) -> None:
        """Free everything."""
        while self._regions:
            await self._arena.release(self._regions.pop())
