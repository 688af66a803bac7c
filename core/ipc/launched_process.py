"""Child processes that a launcher forks (`launcher.py`): seen from the process that asked for one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

from core.ipc.local_sockets import MESSAGE_BYTES, connect
from core.ipc.process import ChildProcess, close_sockets, header_of, readable, sealed

STDOUT, STDERR = 1, 2


class LaunchedProcess(ChildProcess):
    """A child that a launcher forked. It ends with the process that asked for it, and with the launcher."""

    def __init__(self, name: str, connection: socket.socket, lifeline: int) -> None:
        """connection: to the launcher, which knows no other child by it. lifeline: as of a `SpawnedProcess`. Both are
        owned by this object until the child has ended."""
        super().__init__(name, pid=0)
        self._connection = connection
        self._lifeline = lifeline
        self._pidfds: list[int] = []  # of the child, once it is forked
        self._code: int | None = None
        connection.setblocking(False)

    @property
    def returncode(self) -> int | None:
        """Exit code; minus the signal's number if a signal ended it, or if the launcher is gone, with which it ends;
        None while it runs."""
        while self._code is None:
            try:
                message, fds, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
                self._pidfds += fds
            except BlockingIOError:
                return None
            except ConnectionError:
                message = b""
            self._take(message)
        return self._code

    async def wait(self) -> int:
        """Wait until the child has ended; its `returncode`. Any number of tasks may wait."""
        while (code := self.returncode) is None:
            await readable(self._connection.fileno())
        return code

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended. One that has not started never will."""
        self._signal(signal.SIGKILL)
        if self.returncode is None and not self.pid:
            self._take(b"")  # the launcher may be busy for long; it kills whom nobody waits for

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(OSError):  # it has ended, or the launcher is gone, and the child with it
                if self._pidfds:  # pending when this returns, also if the launcher is busy
                    signal.pidfd_send_signal(self._pidfds[0], number)
                else:
                    self._connection.send(b"%d" % number)

    def _take(self, message: bytes) -> None:
        """A message of the launcher: the child's pid, and then its exit code; empty: the launcher is gone."""
        if message and not self.pid:
            self.pid = int(message)
            return
        self._code = int(message or -signal.SIGKILL)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes all waiters: each watches a duplicate
        self._connection.close()
        for fd in (self._lifeline, *self._pidfds):
            os.close(fd)


def launch(address: str, target: str, config: bytes, fds: Sequence[int], name: str) -> LaunchedProcess:
    """Have the launcher at `address` (see `local_sockets`) fork a child that calls `target` with (config, fds).

    As `process.spawn`, but the descriptors have other numbers in the child, and it ignores SIGTERM. It has the current
    environment, working directory, stdout and stderr of this process. Takes less than a millisecond and does not wait
    for the launcher. Raises OSError if there is none.
    """
    connection = connect(address)
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    try:
        header = {**header_of(target), "remove": [], "environment": dict(os.environ), "folder": os.getcwd()}
        memfd = sealed(header, config)
        try:
            passed = [memfd, theirs, STDOUT, STDERR, *fds]
            socket.send_fds(connection, [name.encode()], passed, socket.MSG_NOSIGNAL)
        finally:
            os.close(memfd)
    except BaseException:
        connection.close()
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    close_sockets(fds)
    return LaunchedProcess(name, connection, ours)
