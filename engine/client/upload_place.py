"""UploadPlace: the place of one request whose body is being read."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core.errors import OverloadedError


class UploadPlace:
    """reading, refuse. A `Holder` of one place; its class is not known yet and counts as the highest, so that waiting
    edits leave before it.
    """

    num_images = 1
    priority = -math.inf
    can_be_displaced = True

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.arrival = time.monotonic()
        self.refusal: OverloadedError | None = None  # set by `refuse`
        self._limit = asyncio.timeout(None)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """The body is read inside, by the current task. Raises the refusal as soon as there is one."""
        try:
            async with self._limit:
                yield
        except TimeoutError as error:
            if self.refusal is None:
                raise
            raise self.refusal from error

    def refuse(self, error: OverloadedError) -> None:
        """Give it up, only while it is being read."""
        self.refusal = error
        self._limit.reschedule(asyncio.get_running_loop().time())
