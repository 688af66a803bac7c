"""SilenceWatch reports a silent process once, and not if this process itself was stopped; Watchdog one that hangs."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine.engine_core.watchdog import SilenceWatch, Watchdog

SECONDS = 0.1


@pytest.fixture
def silences() -> list[float]:
    return []


@pytest.fixture
def watch(silences: list[float]) -> SilenceWatch:
    return SilenceWatch(SECONDS, lambda: silences.append(time.monotonic()))


async def until_silent(silences: list[float]) -> None:
    async with asyncio.timeout(30):
        while not silences:
            await asyncio.sleep(0.01)


async def test_silence_is_reported_once_and_not_too_early(watch: SilenceWatch, silences: list[float]) -> None:
    watch.note_message()
    started = time.monotonic()
    await until_silent(silences)
    assert silences[0] - started >= SECONDS
    await asyncio.sleep(2 * SECONDS)
    assert len(silences) == 1


async def test_a_worker_may_take_as_long_as_its_work_is_allowed() -> None:
    hangs: list[tuple[int, float]] = []
    dog = Watchdog(SECONDS, lambda rank, seconds: hangs.append((rank, seconds)))
    dog.expect(0, 0.0, allowed_seconds=3 * SECONDS)
    dog.expect(1, 0.0)
    async with asyncio.timeout(30):
        while len(hangs) < 2:
            await asyncio.sleep(0.01)
    assert hangs == [(1, SECONDS), (0, 4 * SECONDS)]


async def test_nothing_is_expected_before_the_first_message_and_after_the_end(
    watch: SilenceWatch, silences: list[float]
) -> None:
    await asyncio.sleep(2 * SECONDS)
    watch.note_message()
    watch.close()
    watch.note_message()
    await asyncio.sleep(2 * SECONDS)
    assert not silences


async def test_time_during_which_this_process_was_stopped_does_not_count(
    watch: SilenceWatch, silences: list[float]
) -> None:
    """Messages that arrived meanwhile are read only after expired timers have been called."""
    watch.note_message()
    for _ in range(3):
        time.sleep(4 * SECONDS)  # noqa: ASYNC251
        await asyncio.sleep(0)  # the look that fell due
        watch.note_message()
    assert not silences
    await until_silent(silences)
