"""RunningSessions: every session that has begun and is not cleaned up yet, and the queue places that they take."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from core.errors import StencilError
from core.routing.queue_places import Newcomer, displaced_by
from engine.client.session import Session
from engine.client.upload_place import UploadPlace


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
        return sum(session.num_images for session in self._admitted)

    @property
    def num_in_preparation(self) -> int:
        """Images of sessions of which no engine has anything yet."""
        return sum(session.num_images for session in self._sessions if not session.is_submitted)

    def make_room(self, session: Session, num_missing: int) -> bool:
        """Have waiting edits leave the queue to a new session, as core's rule chooses them; none, if too few may."""
        newcomer = Newcomer(session.owner, session.num_images, session.priority)
        leaving = displaced_by(newcomer, self._admitted, num_missing)
        for other in leaving or ():
            other.displace("class" if other.owner == session.owner else "owner")
        return leaving is not None

    def uploads_leaving_for(
        self, newcomer: Newcomer, num_missing: int, uploads: Collection[UploadPlace]
    ) -> list[UploadPlace] | None:
        """Which of the bodies being read have to be given up, so that one more may be; None where none may be. No
        session leaves before the whole body is there.
        """
        holders: list[Session | UploadPlace] = [*self._admitted, *uploads]
        leaving = displaced_by(newcomer, holders, num_missing)
        return None if leaving is None else [holder for holder in leaving if isinstance(holder, UploadPlace)]

    @property
    def _admitted(self) -> list[Session]:
        return [session for session in self._sessions if not session.displaced_for]
