"""RunningSessions: every session that has begun and is not cleaned up yet, and the queue places that they take."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from core.errors import StencilError
from engine.client.session import Session


class RunningSessions:
    """A registry. A session's memory is freed in the background, after its caller has left."""

    def __init__(self) -> None:
        self.is_closing = False  # no new sessions; set by `drain`
        self._sessions: set[Session] = set()
        self._tasks: asyncio.TaskGroup | None = None  # of the engine's actor, while it runs
        self._idle = asyncio.Event()
        self._idle.set()

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions))

    @contextmanager
    def track(self, session: Session) -> Iterator[None]:
        """Count a session among those that run. When its caller leaves, what still runs of it is ended, and its memory
        freed as soon as nothing can touch it any more.
        """
        self._sessions.add(session)
        self._idle.clear()
        try:
            yield
        except StencilError:
            session.has_failed = True
            raise
        finally:
            session.give_up()
            self.run_in_background(self._clean_up(session))

    async def _clean_up(self, session: Session) -> None:
        try:
            await session.close()
        finally:
            self._sessions.remove(session)
            if not self._sessions:
                self._idle.set()

    # ---------------------------------------------------------------------------------- background work

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """tasks: where background work runs from now on."""
        self._tasks = tasks

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """A task of the engine's own; dropped once the engine has ended, and the arena with it."""
        assert self._tasks is not None, "the engine was not started"
        try:
            self._tasks.create_task(work)
        except RuntimeError:
            work.close()

    async def drain(self, seconds: float) -> None:
        """Accept no more sessions, end idle work, and wait at most `seconds` for the results of the others."""
        self.is_closing = True
        for session in self:
            if session.is_idle_work:
                session.give_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for session in self:
                    await session.done.wait()

    async def wait_idle(self, seconds: float) -> None:
        """Wait until every session is cleaned up, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    # ---------------------------------------------------------------------------------- places in the queue

    @property
    def num_admitted(self) -> int:
        """Images that take a place in the queue: from admission until their caller has left and their memory is
        free.
        """
        return sum(session.num_images for session in self._sessions if not session.is_displaced)

    @property
    def num_in_preparation(self) -> int:
        """Images of sessions of which no engine has anything yet."""
        return sum(session.num_images for session in self._sessions if not session.is_submitted)

    def num_displaceable(self, priority: int) -> int:
        """Images in the queue that would make room for a request of this class."""
        return sum(session.num_images for session in self._lower_than(priority))

    def make_room(self, num_images: int, priority: int) -> bool:
        """Have waiting edits of lower classes leave the queue, the lowest and latest first; none, if that is not
        enough.
        """
        leaving, num_places = [], 0
        for session in sorted(self._lower_than(priority), key=lambda session: (-session.priority, -session.arrival)):
            if num_places < num_images:
                leaving.append(session)
                num_places += session.num_images
        if num_places < num_images:
            return False
        for session in leaving:
            session.displace()
        return True

    def _lower_than(self, priority: int) -> Iterator[Session]:
        return (session for session in self._sessions if session.priority > priority and session.can_be_displaced)
