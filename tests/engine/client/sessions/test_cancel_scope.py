"""A block that is cancelled from outside ends alone, and nothing else is taken for that."""

from __future__ import annotations

import asyncio

import pytest

from engine.client.sessions.cancel_scope import CancelScope


async def test_a_cancelled_block_ends_and_its_task_goes_on() -> None:
    scope = CancelScope()
    asyncio.get_running_loop().call_soon(scope.cancel)
    async with asyncio.timeout(5), scope:
        await asyncio.Event().wait()
    assert scope.cancelled_caught
    await asyncio.sleep(0)  # would raise, were the task still cancelled
    scope.cancel()


async def test_before_and_after_its_block_cancelling_has_no_effect() -> None:
    scope = CancelScope()
    scope.cancel()
    async with scope:
        await asyncio.sleep(0)
    scope.cancel()
    await asyncio.sleep(0)
    assert not scope.cancelled_caught


async def test_a_block_that_is_through_before_it_is_cancelled_was_completed() -> None:
    scope = CancelScope()
    async with scope:
        scope.cancel()
        scope.cancel()
    await asyncio.sleep(0)
    assert not scope.cancelled_caught


async def test_a_timeout_of_the_block_itself_and_the_end_of_its_task_are_not_its_own() -> None:
    scope = CancelScope()
    with pytest.raises(TimeoutError):
        async with scope:
            raise TimeoutError
    assert not scope.cancelled_caught

    async def wait() -> None:
        async with CancelScope():
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
