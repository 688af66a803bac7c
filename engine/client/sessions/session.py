"""Session: base class of EditSession and TemplateSession, one request from arrival until its memory is freed."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Literal

from core.model_choice import ModelChoice

DisplacedFor = Literal["class", "owner"]
"""Who has a session's places: a request of a higher class, or one of another owner that holds fewer."""


class Session(ABC):
    """The interface that `RunningSessions` uses to count, displace, give up and close requests.

    model, patches: that it uses, "" if users' classes compute it; an adapter's name is none of a model. workflow: that
    it runs and that engines may be told to forget, as they call it; "" if there is none. owner: see EditInput.
    num_images: places that it takes in the queue. priority: its class, 0 = the default, lower = more urgent.
    is_idle_work: computed while there is no other work, given up at shutdown. arrival: seconds of CLOCK_MONOTONIC.
    """

    def __init__(
        self, choice: ModelChoice | None, owner: str, num_images: int, priority: int = 0, *, is_idle_work: bool = False
    ) -> None:
        self.model = "" if choice is None else choice.model.name
        self.patches = () if choice is None else choice.patches
        self.workflow = "" if choice is None else choice.model.workflow  # set by the subclass where that is no model's
        self.owner = owner
        self.num_images = num_images
        self.priority = priority
        self.is_idle_work = is_idle_work
        self.arrival = time.monotonic()
        self.is_submitted = False  # a request of it was sent to the router; set by the subclass
        self.displaced_for: DisplacedFor | None = None  # why it lost its queue places; set by `displace`
        self.has_failed = False  # ended by an error, not by its caller; set by RunningSessions
        self.done = asyncio.Event()  # no engine works on it any more; set by the subclass

    @property
    def waits_for_caller(self) -> bool:
        """Whether all that it waits for is its caller, to read what is finished or to leave."""
        return False

    @property
    def can_be_displaced(self) -> bool:
        """Whether another request may take its queue places."""
        return False

    def displace(self, reason: DisplacedFor) -> None:
        """Give its queue places to another request. Only if `can_be_displaced`."""
        self.displaced_for = reason

    @abstractmethod
    def give_up(self) -> None:
        """Abort what still runs, as the caller has left."""

    @abstractmethod
    async def close(self) -> None:
        """Wait until no process can touch its memory any more, then free it."""
