"""ProcessorHandle: one image processor as its pool sees it. It sends jobs and watches that the process moves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from core.ipc.logs import of_request
from core.ipc.process import ChildProcess
from core.ipc.ring import Channel
from core.messages.codec import encode
from engine.images.image_jobs import ImageJob

logger = logging.getLogger("stencil.images")

STALL_SECONDS = 5.0
"""A processor with a job that uses no processor time for so long hangs, and is killed. A working one that gets little
of a full machine is not: at its niceness it still gets 1 % of a core beside ten busy processes. It is counted
in two halves: where this process was itself stopped, with all its children, the first one is over at once."""
PROGRESS_SECONDS = 0.001
"""Processor time that counts as some."""


@dataclass(eq=False, slots=True)
class ProcessorHandle:
    """A processor and the job it has."""

    child: ChildProcess
    channel: Channel
    job: ImageJob | None = None  # what it works on now
    stall: asyncio.TimerHandle | None = None  # the next look at whether it moves
    cpu_seconds: float = 0.0  # used at the last look
    is_standing: bool = False  # it had used none since the look before
    began: float = 0.0  # when it took its job
    is_dismissed: bool = False  # killed because nobody wants its job's result any more

    def take(self, job: ImageJob) -> None:
        """Send it a job. Raises PeerClosedError when it is gone, and MessageError for a job that cannot be encoded."""
        self.channel.send(encode(job.message))
        self.job = job
        self.cpu_seconds, self.is_standing = self._read_cpu_seconds(), False
        self.began = time.monotonic()
        self._look_later()

    def drop_job(self) -> ImageJob | None:
        """It is done with its job, one way or another."""
        job, self.job = self.job, None
        if self.stall is not None:
            self.stall.cancel()
        return job

    def dismiss(self) -> None:
        """Kill it in the middle of a job that nobody wants any more."""
        self.is_dismissed = True
        self.child.kill()

    @property
    def log_extra(self) -> dict[str, str]:
        """A line about it is one about the request that it works for; tasks and timers run in anybody's context."""
        return of_request(self.job.request_id if self.job else "")

    def _look_later(self) -> None:
        self.stall = asyncio.get_running_loop().call_later(STALL_SECONDS / 2, self._look)

    def _look(self) -> None:
        """Kill it if it stands still: stopped, or stuck in the kernel."""
        before, self.cpu_seconds = self.cpu_seconds, self._read_cpu_seconds()
        was_standing, self.is_standing = self.is_standing, self.cpu_seconds - before < PROGRESS_SECONDS
        if was_standing and self.is_standing:
            extra = self.log_extra
            logger.error("%s (pid %d) stands still and is killed", self.child.name, self.child.pid, extra=extra)
            self.child.kill()
        else:
            self._look_later()

    def _read_cpu_seconds(self) -> float:
        """Processor time it has used so far; 0 when it is gone, as its channel is about to say."""
        clock = ~self.child.pid << 3 | 2  # clock_getcpuclockid(3), which Python has for threads only
        with contextlib.suppress(OSError):
            return time.clock_gettime(clock)
        return 0.0
