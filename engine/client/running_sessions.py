"""RunningSessions: the sessions (edits and templates) that are not cleaned up yet, and their places in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from core.errors import StencilError
from engine.client.session import Session


class RunningSessions:
    """One per AsyncEngine. A session's memory is freed by a background task, after its caller has left."""

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
        """Register a session. When its caller leaves the context, its work is aborted, and its memory freed as soon as
        no process can touch it any more.
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
        """tasks: the task group for background work."""
        self._tasks = tasks

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task of the engine; dropped once the engine has ended, as its arena is closed then."""
        assert self._tasks is not None, "the engine was not started"
        try:
            self._tasks.create_task(work)
        except RuntimeError:
            work.close()

    async def drain(self, seconds: float) -> None:
        """Accept no more sessions, give up idle work, and wait at most `seconds` for the others."""
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
        """Images that have a place in the queue: from admission until they are displaced or their memory is freed."""
        return sum(session.num_images for session in self._sessions if not session.is_displaced)

    @property
    def num_in_preparation(self) -> int:
        """Images of sessions that have not been submitted to an engine."""
        return sum(session.num_images for session in self._sessions if not session.is_submitted)

    def num_displaceable(self, priority: int) -> int:
        """Images in the queue that a request of this class could displace."""
        return sum(session.num_images for session in self._lower_than(priority))

    def make_room(self, num_images: int, priority: int) -> bool:
        """Displace waiting edits of lower classes, the lowest and latest first, until `num_images` places are free. If
        there are too few of them, displaces none and returns False.
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
