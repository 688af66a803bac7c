"""Who leaves a full queue: sessions in a registry, as a newcomer finds them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from fakes import MODEL

from core.model_choice import ModelChoice
from engine.client.sessions.running_sessions import LOOK_SECONDS, RunningSessions
from engine.client.sessions.session import Session


class Edit(Session):
    """One that has its places until its caller leaves."""

    has_begun = False
    is_read = False

    def __init__(self, owner: str, num_images: int, priority: int = 0) -> None:
        super().__init__(ModelChoice(MODEL), owner, num_images, priority)

    @property
    def can_be_displaced(self) -> bool:
        return not self.has_begun and not self.displaced_for

    @property
    def waits_for_caller(self) -> bool:
        return self.is_read

    def give_up(self) -> None:
        self.done.set()

    async def close(self) -> None:
        await self.done.wait()


@pytest.fixture
async def sessions() -> AsyncIterator[RunningSessions]:
    async with asyncio.TaskGroup() as tasks:
        registry = RunningSessions()
        registry.start(tasks)
        yield registry
    assert registry.num_admitted == 0


@contextmanager
def queued(sessions: RunningSessions, *edits: Edit) -> Iterator[None]:
    """edits: in order of arrival."""
    with ExitStack() as stack:
        for arrival, edit in enumerate(edits):
            edit.arrival = float(arrival)
            stack.enter_context(sessions.track(edit))
        yield


def displaced(*edits: Edit) -> list[str | None]:
    return [edit.displaced_for for edit in edits]


async def test_a_key_that_holds_most_makes_room_for_one_that_holds_fewer(sessions: RunningSessions) -> None:
    heavy, other = [Edit("heavy", 1) for _ in range(4)], Edit("other", 2)
    heavy[3].has_begun = True
    with queued(sessions, *heavy, other):
        assert sessions.make_room(Edit("light", 1), 1)
        assert displaced(*heavy, other) == [None, None, "owner", None, None]
        assert sessions.num_admitted == 5
        assert sessions.make_room(Edit("light", 1), 1)
        assert displaced(*heavy, other) == [None, "owner", "owner", None, None]


async def test_what_has_left_the_queue_counts_for_its_key_no_more(sessions: RunningSessions) -> None:
    heavy = [Edit("heavy", 1) for _ in range(4)]
    light = [Edit("light", 1) for _ in range(2)]
    with queued(sessions, *heavy):
        for edit in light:
            assert sessions.make_room(edit, 1)
        with queued(sessions, *light):
            assert sessions.num_admitted == 4
            assert not sessions.make_room(Edit("light", 1), 1), "both hold as many"
            assert not sessions.make_room(Edit("heavy", 1), 1)


async def test_one_key_alone_makes_room_for_its_higher_classes_only(sessions: RunningSessions) -> None:
    edits = [Edit("", 1), Edit("", 2, priority=1), Edit("", 1, priority=1)]
    with queued(sessions, *edits):
        assert not sessions.make_room(Edit("", 1, priority=1), 1)
        assert not sessions.make_room(Edit("", 4, priority=0), 4)
        assert displaced(*edits) == [None, None, None]
        assert sessions.make_room(Edit("", 1), 1)
        assert displaced(*edits) == [None, None, "class"]


async def test_a_shutdown_waits_for_computing_and_for_no_reader(sessions: RunningSessions) -> None:
    edits = [Edit("", 1), Edit("", 1)]
    edits[0].is_read = True
    with queued(sessions, *edits):
        draining = asyncio.create_task(sessions.drain(60.0))
        await asyncio.sleep(3 * LOOK_SECONDS)
        assert not draining.done(), "one is computed"
        edits[1].is_read = True
        await asyncio.wait_for(draining, 10.0)
        assert sessions.num_admitted == 2
