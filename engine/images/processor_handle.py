"""ProcessorHandle: ImagePool's handle of one image processor. Sends it jobs, and kills it if it hangs."""

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
"""A processor that has a job and uses no CPU time for this long is killed as hanging. On a busy machine a working one
is not: beside ten busy processes, its niceness still gives it 1 % of a core. Checked in two halves: if this process and
its children were suspended, only the first half expires at once."""
PROGRESS_SECONDS = 0.001
"""Least CPU time per half that counts as progress."""


@dataclass(eq=False, slots=True)
class ProcessorHandle:
    """A processor and the job that it has."""

    child: ChildProcess
    channel: Channel
    job: ImageJob | None = None  # the job it works on
    stall: asyncio.TimerHandle | None = None  # timer of the next progress check
    cpu_seconds: float = 0.0  # CPU time used until the last check
    is_standing: bool = False  # no progress at the last check
    began: float = 0.0  # when it took its job, seconds of CLOCK_MONOTONIC
    is_dismissed: bool = False  # killed because its job's caller was cancelled

    def take(self, job: ImageJob) -> None:
        """Send it a job. Raises PeerClosedError if it is dead, MessageError for a job that cannot be encoded."""
        self.channel.send(encode(job.message))
        self.job = job
        self.cpu_seconds, self.is_standing = self._read_cpu_seconds(), False
        self.began = time.monotonic()
        self._look_later()

    def drop_job(self) -> ImageJob | None:
        """Take its job away, done or not; returns it."""
        job, self.job = self.job, None
        if self.stall is not None:
            self.stall.cancel()
        return job

    def dismiss(self) -> None:
        """Kill it in the middle of a job whose caller was cancelled."""
        self.is_dismissed = True
        self.child.kill()

    @property
    def log_extra(self) -> dict[str, str]:
        """`extra` of log lines: the request it works for, as tasks and timers may run in the context of another one."""
        return of_request(self.job.request_id if self.job else "")

    def _look_later(self) -> None:
        self.stall = asyncio.get_running_loop().call_later(STALL_SECONDS / 2, self._look)

    def _look(self) -> None:
        """Kill it if it makes no progress: suspended, or stuck in the kernel."""
        before, self.cpu_seconds = self.cpu_seconds, self._read_cpu_seconds()
        was_standing, self.is_standing = self.is_standing, self.cpu_seconds - before < PROGRESS_SECONDS
        if was_standing and self.is_standing:
            extra = self.log_extra
            logger.error("%s (pid %d) makes no progress and is killed", self.child.name, self.child.pid, extra=extra)
            self.child.kill()
        else:
            self._look_later()

    def _read_cpu_seconds(self) -> float:
        """CPU time that it has used; 0 if it is dead, which its channel will report."""
        clock = ~self.child.pid << 3 | 2  # clock_getcpuclockid(3), which Python has for threads only
        with contextlib.suppress(OSError):
            return time.clock_gettime(clock)
        return 0.0
