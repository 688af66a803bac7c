"""RunningSessions: the sessions (edits and templates) that are not cleaned up yet, and their places in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from core.errors import OverloadedError, StencilError
from core.routing.queue_places import Newcomer, displaced_by
from engine.client.admission.not_ready import CLOSING_RETRY_SECONDS
from engine.client.sessions.cancel_scope import CancelScope
from engine.client.sessions.session import Session
from engine.client.sessions.upload_place import UploadPlace

LOOK_SECONDS = 0.02
"""How often a shutdown looks whether sessions wait only for their callers. At other times nobody asks."""


class RunningSessions:
    """One per AsyncEngine. A session's memory is freed by a background task, after its caller has left."""

    def __init__(self) -> None:
        self.is_closing = False  # no new sessions; set by `drain`
        self._sessions: set[Session] = set()
        self.is_over = False  # the time that `drain` gives to sessions has passed
        self._until_shutdown: set[CancelScope] = set()  # blocks that run
        self._tasks: asyncio.TaskGroup | None = None  # of the engine's actor, while it runs
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = asyncio.Event()  # set whenever one is cleaned up

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
            self._ended.set()
            if not self._sessions:
                self._idle.set()

    @asynccontextmanager
    async def until_shutdown(self) -> AsyncIterator[None]:
        """Run a block that awaits what the shutdown will end. Once the time to drain has passed, it is cancelled and
        raises OverloadedError; one that would begin then does so at once.
        """
        scope = CancelScope()
        async with scope:
            if self.is_over:
                raise shut_down()
            self._until_shutdown.add(scope)
            try:
                yield
            finally:
                self._until_shutdown.discard(scope)
        if scope.cancelled_caught:
            raise shut_down()

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
        """Accept no more sessions, give up idle work, and wait at most `seconds` until the others wait only for their
        callers, which may take as long as they like to read. Then end what is left, whatever it waits for: an image
        processor, an engine, the rest of an upload. Outputs that engines have made may still be delivered.
        """
        self.is_closing = True
        for session in self:
            if session.is_idle_work:
                session.give_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not all(session.waits_for_caller for session in self._sessions):
                    await asyncio.sleep(LOOK_SECONDS)
        self.is_over = True
        for scope in self._until_shutdown:
            scope.cancel()

    async def wait_idle(self, seconds: float) -> None:
        """Wait until every session is cleaned up, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    async def wait_while_any(self, is_meant: Callable[[Session], bool]) -> None:
        """Wait until all sessions that are meant are cleaned up. Raises OverloadedError once the time that a shutdown
        gives to sessions has passed: their callers may read for as long as they like.
        """
        async with self.until_shutdown():
            while any(map(is_meant, self._sessions)):
                self._ended.clear()
                await self._ended.wait()

    # ---------------------------------------------------------------------------------- places in the queue

    @property
    def num_admitted(self) -> int:
        """Images that have a place in the queue: from admission until they are displaced or their memory is freed."""
        return sum(session.num_images for session in self._admitted)

    @property
    def num_in_preparation(self) -> int:
        """Images of sessions that have not been submitted to an engine."""
        return sum(session.num_images for session in self._sessions if not session.is_submitted)

    def make_room(self, session: Session, num_missing: int) -> bool:
        """Displace waiting edits until `num_missing` places are free for a new session, as `displaced_by` chooses them.
        If too few may be displaced, displaces none and returns False.
        """
        newcomer = Newcomer(session.owner, session.num_images, session.priority)
        leaving = displaced_by(newcomer, self._admitted, num_missing)
        for other in leaving or ():
            other.displace("class" if other.owner == session.owner else "owner")
        return leaving is not None

    def uploads_leaving_for(
        self, newcomer: Newcomer, num_missing: int, uploads: Collection[UploadPlace]
    ) -> list[UploadPlace] | None:
        """The bodies being read that must be refused so that one more may be read; None if too few may be. No session
        is displaced before the whole body has arrived.
        """
        holders: list[Session | UploadPlace] = [*self._admitted, *uploads]
        leaving = displaced_by(newcomer, holders, num_missing)
        return None if leaving is None else [holder for holder in leaving if isinstance(holder, UploadPlace)]

    @property
    def _admitted(self) -> list[Session]:
        return [session for session in self._sessions if not session.displaced_for]


def shut_down() -> OverloadedError:
    """The error of requests that a shutdown ends."""
    return OverloadedError("The server shut down before the request finished.", retry_after=CLOSING_RETRY_SECONDS)
