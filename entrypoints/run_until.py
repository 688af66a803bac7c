"""Runs a coroutine until it ends or until a condition, such as a disconnected client, stops it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_until(stop: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` until it or `stop` ends, cancel the other one and wait for its cleanup.

    Returns True if `work` finished, False if it was stopped; raises what `work` raises.
    """
    task, stopper = asyncio.create_task(work), asyncio.create_task(stop)
    try:
        await asyncio.wait({task, stopper}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopper.cancel()
        task.cancel()
        await asyncio.wait({task, stopper})
    if task.cancelled():
        return False
    task.result()
    return True
