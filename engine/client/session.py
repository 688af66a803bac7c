"""Session: one edit or template from its arrival until its memory is free, as `RunningSessions` sees it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod


class Session(ABC):
    """What is counted, displaced, given up and closed. Subclasses say how.

    num_images: places that it takes in the queue. priority: its class, 0 = the default, lower = more urgent.
    is_idle_work: computed when no edit wants to, and given up at shutdown. arrival: seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, num_images: int, priority: int = 0, *, is_idle_work: bool = False) -> None:
        self.num_images = num_images
        self.priority = priority
        self.is_idle_work = is_idle_work
        self.arrival = time.monotonic()
        self.is_submitted = False  # engines have some of it; set by the subclass
        self.is_displaced = False  # its places in the queue are another's; set by `displace`
        self.has_failed = False  # an error, not the caller, ends it; set by the registry
        self.done = asyncio.Event()  # nothing of it is left to compute; set by the subclass

    @property
    def can_be_displaced(self) -> bool:
        """Whether it can leave the queue to a request of a higher class."""
        return False

    def displace(self) -> None:
        """Leave the queue to a request of a higher class. Only where `can_be_displaced`."""
        self.is_displaced = True

    @abstractmethod
    def give_up(self) -> None:
        """The caller has left: abort what still runs."""

    @abstractmethod
    async def close(self) -> None:
        """Wait until nothing can touch its memory any more, then free it."""
