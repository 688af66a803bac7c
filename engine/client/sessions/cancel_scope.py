"""CancelScope: a block that can be cancelled from outside without the task that runs it."""

from __future__ import annotations

import asyncio
from types import TracebackType


class CancelScope:
    """``async with scope`` around the block, once; `cancel` from elsewhere on the same event loop. As in trio and
    anyio, the task goes on after a block that was cancelled.

    cancelled_caught: whether that happened, and the block has not been completed.
    """

    def __init__(self) -> None:
        self.cancelled_caught = False
        self._timeout = asyncio.timeout(None)
        self._is_open = False

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._is_open = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._is_open = False
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:  # instead of the CancelledError that `cancel` brought
            self.cancelled_caught = True
        return self.cancelled_caught

    def cancel(self) -> None:
        """Cancel the block if it runs; no effect before it, after it, or a second time."""
        if self._is_open:
            self._is_open = False
            self._timeout.reschedule(asyncio.get_running_loop().time())
