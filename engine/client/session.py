"""Session: one edit or template from its arrival until its memory is free, as `RunningSessions` sees it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Literal

DisplacedFor = Literal["class", "owner"]
"""Who has a session's places: a request of a higher class, or one of another owner that holds fewer."""


class Session(ABC):
    """What is counted, displaced, given up and closed. Subclasses say how.

    owner: see EditInput. num_images: places that it takes in the queue. priority: its class, 0 = the default, lower =
    more urgent. is_idle_work: computed when no edit wants to, and given up at shutdown. arrival: seconds of
    CLOCK_MONOTONIC.
    """

    def __init__(self, owner: str, num_images: int, priority: int = 0, *, is_idle_work: bool = False) -> None:
        self.owner = owner
        self.num_images = num_images
        self.priority = priority
        self.is_idle_work = is_idle_work
        self.arrival = time.monotonic()
        self.is_submitted = False  # engines have some of it; set by the subclass
        self.displaced_for: DisplacedFor | None = None  # its places in the queue are another's; set by `displace`
        self.has_failed = False  # an error, not the caller, ends it; set by the registry
        self.done = asyncio.Event()  # nothing of it is left to compute; set by the subclass

    @property
    def can_be_displaced(self) -> bool:
        """Whether it can leave the queue to another request."""
        return False

    def displace(self, reason: DisplacedFor) -> None:
        """Leave the queue to another request. Only where `can_be_displaced`."""
        self.displaced_for = reason

    @abstractmethod
    def give_up(self) -> None:
        """The caller has left: abort what still runs."""

    @abstractmethod
    async def close(self) -> None:
        """Wait until nothing can touch its memory any more, then free it."""
