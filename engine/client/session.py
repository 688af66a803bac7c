"""Session: base class of EditSession and TemplateSession, one request from arrival until its memory is freed."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod


class Session(ABC):
    """The interface that `RunningSessions` uses to count, displace, give up and close requests.

    num_images: places that it takes in the queue. priority: its class, 0 = the default, lower = more urgent.
    is_idle_work: computed while there is no other work, given up at shutdown. arrival: seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, num_images: int, priority: int = 0, *, is_idle_work: bool = False) -> None:
        self.num_images = num_images
        self.priority = priority
        self.is_idle_work = is_idle_work
        self.arrival = time.monotonic()
        self.is_submitted = False  # a request of it was sent to the router; set by the subclass
        self.is_displaced = False  # it lost its queue places to a higher class; set by `displace`
        self.has_failed = False  # ended by an error, not by its caller; set by RunningSessions
        self.done = asyncio.Event()  # no engine works on it any more; set by the subclass

    @property
    def can_be_displaced(self) -> bool:
        """Whether a request of a higher class may take its queue places."""
        return False

    def displace(self) -> None:
        """Give its queue places to a request of a higher class. Only if `can_be_displaced`."""
        self.is_displaced = True

    @abstractmethod
    def give_up(self) -> None:
        """Abort what still runs, as the caller has left."""

    @abstractmethod
    async def close(self) -> None:
        """Wait until no process can touch its memory any more, then free it."""
