"""A launcher: a process that has imported what its children need, and forks them when asked.

Importing PyTorch and diffusers takes seconds of processor time; a fork takes milliseconds. Children have the guarantees
of spawned ones (`process.py`): each ends with the process that asked for it, by its lifeline and, if it hangs, by the
launcher, which sees the connection end; and the kernel ends it with the launcher. The launcher must stay free to fork:
what it imports may start no thread and must leave GPUs alone. (Its own lifeline's thread sleeps in a system call and
holds no lock.)
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from typing import NamedTuple, NoReturn

import setproctitle

from core.ipc.local_sockets import MESSAGE_BYTES, is_own, send
from core.ipc.logs import of_request
from core.ipc.process import EX_PARENT_GONE, die_with_parent, run_child

logger = logging.getLogger("stencil.engine")

MAX_FDS = 250
"""Most descriptors that the kernel passes with a message (SCM_MAX_FD is 253)."""

RETRY_SECONDS = 0.1
"""After an order could not be accepted."""


class Job(NamedTuple):
    """What a child is to run, and its descriptors: a memfd with header and config, the lifeline, stdout, stderr and
    those for the target."""

    name: str
    fds: list[int]


def serve(listener: socket.socket, name: str) -> NoReturn:
    """Fork a child for each job that arrives, until this process is ended. In the child: run the job and end, with what
    it raises or by `leave`. name: what `ps` shows of the launcher itself."""
    # A supervisor signals the whole process group, but the parent leads the shutdown. Children inherit this.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["SPT_NOENV"] = "1"  # setproctitle leaves alone the memory that shows the environment
    setproctitle.setproctitle(name)  # finds its memory, which it cannot any more when the environment has changed
    launcher_pid = os.getpid()
    with closing(_Launcher(listener)) as launcher:
        job = launcher.next_in_child()
    _run(job, launcher_pid)
    leave(os.EX_OK)


def leave(status: int) -> NoReturn:
    """In a child: end as the interpreter does, but leave its objects to the kernel, as multiprocessing does where it
    forks. To free them one by one would first copy the memory that holds them, which is the launcher's too: 240 MB, and
    0.4 s of processor time, for each worker that ends."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a daemon may have none
        with suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(status)


class _Launcher:
    """Forks children, reports their exits, and passes signals on to them."""

    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.PollSelector()  # has no state in the kernel that a child would share
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        self._job: Job | None = None  # set in a child only

    def next_in_child(self) -> Job:
        """Serve. Returns in each child, with its job."""
        while True:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is key:  # what came before may have closed it
                    key.data()
                if self._job is not None:
                    return self._job

    def close(self) -> None:
        """In a child: give up what the launcher has open, so that the launcher alone decides when a connection ends."""
        for key in self._selector.get_map().values():
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:  # too many descriptors are open: some are closed when a child ends
            logger.error("cannot accept an order for a child: %s", error, extra=of_request(""))
            time.sleep(RETRY_SECONDS)
            return
        if is_own(connection):
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._fork(connection))
        else:
            connection.close()

    def _fork(self, connection: socket.socket) -> None:
        """Fork the child that a new connection asks for."""
        name, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MAX_FDS)
        self._selector.unregister(connection)
        try:
            pid = os.fork() if name else None
        except OSError as error:
            logger.error("cannot fork %s: %s", name.decode(), error, extra=of_request(""))
            pid = None
        if pid == 0:
            connection.close()
            self._job = Job(name.decode(), fds)
            return
        for fd in fds:
            os.close(fd)
        if pid is None:
            connection.close()
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            logger.error("cannot watch %s: %s", name.decode(), error, extra=of_request(""))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            connection.close()
            return
        with suppress(OSError):  # who asked is gone, which `_listen` sees
            send(connection, b"%d" % pid, [pidfd])
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._listen(connection, pid))
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._bury(connection, pid, pidfd))

    def _listen(self, connection: socket.socket, pid: int) -> None:
        """Pass a signal on. If the connection has ended, kill the child: who asked for it is gone, or has killed it."""
        try:
            message = connection.recv(MESSAGE_BYTES)
        except ConnectionError:
            message = b""
        os.kill(pid, int(message or signal.SIGKILL))  # it exists until `_bury` has waited for it
        if not message:
            self._forget(connection)

    def _bury(self, connection: socket.socket, pid: int, pidfd: int) -> None:
        """Report the exit of a child that has ended."""
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if connection.fileno() != -1:
            with suppress(OSError):  # who asked is gone
                connection.send(b"%d" % os.waitstatus_to_exitcode(status))
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


def _run(job: Job, launcher_pid: int) -> None:
    """In the child: take over the settings of the process that asked for it, and run the target."""
    die_with_parent()
    if os.getppid() != launcher_pid:
        os._exit(EX_PARENT_GONE)  # the launcher ended before the kernel was asked
    memfd, lifeline, stdout, stderr, *fds = job.fds
    with open(memfd, "rb") as file:
        header = json.loads(file.readline())
        config = file.read()
    for fd, number in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, number)
        os.close(fd)
    sys.path[:] = header["path"]
    os.environ.clear()
    os.environ.update(header["environment"])
    os.chdir(header["folder"])
    setproctitle.setproctitle(job.name)
    logging.getLogger().handlers.clear()  # those of the launcher log under its name; `run_child` adds others
    tempfile.tempdir = None  # the folder for temporary files is chosen by the environment that was just set
    run_child(job.name, {**header, "fds": fds, "lifeline": lifeline}, config)
