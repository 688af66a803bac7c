"""Child processes that a launcher forks (`launcher.py`): seen from the process that asked for one."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from core.ipc.local_sockets import MESSAGE_BYTES, connect, send
from core.ipc.process import ChildProcess, close_sockets, config_file, header_of, lifeline, readable

STDOUT, STDERR = 1, 2

ANSWER_SECONDS = 1.0
"""How long a launcher may take to report a child that has ended."""


class LaunchedProcess(ChildProcess):
    """A child that a launcher forked. It ends with the process that asked for it, and with the launcher."""

    def __init__(self, name: str, connection: socket.socket, spare: socket.socket, lifeline: int) -> None:
        """connection: to the launcher, about this child alone. spare: a duplicate, in whose place the descriptor comes
        that shows the child's end: where this process has no other left, the kernel would drop it. lifeline: as of a
        `SpawnedProcess`. All are owned by this object until the child has ended."""
        super().__init__(name, pid=0)
        self._connection = connection
        self._spare = spare
        self._lifeline = lifeline
        self._pidfds: list[int] = []  # of the child, once it is forked
        self._is_launcher_gone = False
        self._code: int | None = None
        self._is_reported = True  # whether the launcher has said how it ended
        connection.setblocking(False)

    @property
    def returncode(self) -> int | None:
        """Exit code; minus the signal's number if a signal ended it; None while it runs: after the launcher's death for
        a moment, too. -SIGKILL also if the launcher did not report its end, see `describe_exit`."""
        while self._code is None:
            try:
                self._connection.recv(1, socket.MSG_PEEK)
                self._spare.close()
                message, fds, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
            except BlockingIOError:
                return None
            except ConnectionError:
                message, fds = b"", []
            self._pidfds += fds
            self._is_launcher_gone = not message
            if not message and self._pidfds and not self._has_ended():
                return None  # it may still write to what it maps
            self._take(message)
        return self._code

    async def wait(self) -> int:
        """Wait until the child has ended; its `returncode`. Any number of tasks may wait. Needs the launcher only to
        learn the exit code."""
        while (code := self.returncode) is None:
            connection = self._connection.fileno()
            # The connection of a launcher that is gone stays readable for ever.
            await readable(*self._pidfds if self._is_launcher_gone else [connection, *self._pidfds])
            if self._has_ended() and self.returncode is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(ANSWER_SECONDS):  # `wait_for` would let others close it first
                        await readable(connection)
                if self.returncode is None:
                    self._take(b"")
        return code

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended. A child that was not forked yet counts as ended: if the launcher forks it
        later, it kills it at once."""
        self._signal(signal.SIGKILL)
        if self.returncode is None and not self.pid:
            self._take(b"")

    def describe_exit(self) -> str:
        """Human-readable, as of any child; or that the launcher did not report how it ended."""
        if self.returncode is None or self._is_reported:
            return super().describe_exit()
        return "ended with its launcher" if self.pid else "was never forked by its launcher"

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(OSError):  # it has ended, or the launcher is gone, and the child with it
                if self._pidfds:  # pending when this returns, also if the launcher is busy
                    signal.pidfd_send_signal(self._pidfds[0], number)
                else:
                    self._connection.send(b"%d" % number)

    def _has_ended(self) -> bool:
        """Whether it was forked and has ended, whether or not the launcher has reported it."""
        poll = select.poll()
        for fd in self._pidfds:
            poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def _take(self, message: bytes) -> None:
        """A message of the launcher: the child's pid, and then its exit code. Empty: there will be none."""
        if message and not self.pid:
            self.pid = int(message)
            return
        self._is_reported = bool(message)
        self._code = int(message) if message else -signal.SIGKILL
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes all waiters: each watches a duplicate
        self._connection.close()
        self._spare.close()
        for fd in (self._lifeline, *self._pidfds):
            os.close(fd)


def launch(address: str, target: str, config: bytes, fds: Sequence[int], name: str) -> LaunchedProcess:
    """Have the launcher at `address` (see `local_sockets`) fork a child that calls `target` with (config, fds).

    As `process.spawn`, but the descriptors have other numbers in the child, and it ignores SIGTERM. It has the current
    environment, working directory, stdout and stderr of this process; but what a library reads when it is imported,
    and limits, CPU affinity and umask are the launcher's. Takes less than a millisecond and does not wait for the
    launcher. Raises OSError if there is none.
    """
    with connect(address) as connection, lifeline() as (theirs, ours):
        header = {**header_of(target), "remove": [], "environment": dict(os.environ), "folder": os.getcwd()}
        with config_file(header, config) as memfd, ExitStack() as made:
            # First of all, as no other step may fail once the descriptors are passed on.
            kept, spare = (made.enter_context(connection.dup()) for _ in range(2))
            send(connection, name.encode(), [memfd, theirs, STDOUT, STDERR, *fds])
            made.pop_all()
        close_sockets(fds)
        return LaunchedProcess(name, kept, spare, ours)
