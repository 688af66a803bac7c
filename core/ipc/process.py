"""Child processes that never outlive their parent.

Every child has the read end of a pipe, its *lifeline*; only the parent has the write end. When the parent ends, even by
`kill -9`, the kernel closes the write end; a thread in the child, blocked in `read` until then, ends the child at once,
and in the same way its children end. (PR_SET_PDEATHSIG is not used: it fires when the *thread* that forked ends, leaves
no time for clean-up, and misses a parent that dies before the call. But it also ends a child with threads that cannot
run: stopped, or with the interpreter's lock held by hanging native code. Children that may hang in this way request it
in addition, see `die_with_parent`.)
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import importlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from core.errors import EngineError
from core.ipc import logs

EX_PARENT_GONE = 69
"""Exit code of a child that exits because its parent is gone (EX_UNAVAILABLE in sysexits.h)."""

_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
_TERM_SECONDS = 3.0  # from SIGTERM to SIGKILL
_NO_DESCRIPTOR_SECONDS = 0.1  # until a child is looked at again where no descriptor was left to watch it by
_KILL_SECONDS = 5.0  # how long the kernel may take to end a killed process that frees much memory
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15

_NAMES = {int(each): f" ({each.name})" for each in signal.Signals}
"""Signals of which `describe_exit` says the name; most real-time ones have none."""

_when_parent_gone = contextlib.ExitStack()


class ChildProcess(ABC):
    """A running or finished child, seen from the process that asked for it. Made by `spawn`, or by `launch` of
    `launched_process.py`."""

    def __init__(self, name: str, pid: int) -> None:
        """pid: 0 = not known yet."""
        self.name = name
        self.pid = pid

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """Exit code; minus the signal's number if a signal ended it; None while it runs."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait until the child has ended; its `returncode`. Any number of tasks may wait."""

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""

    async def stop(self, grace: float) -> int:
        """End the child and return its `returncode`. grace: seconds in which it may exit by itself.

        Takes at most grace + 8 s. Raises EngineError if the child survives SIGKILL (stuck in the kernel).
        """
        with contextlib.suppress(TimeoutError):  # 1. it has got a message to exit: let it finish
            return await asyncio.wait_for(self.wait(), grace)
        self.terminate()
        with contextlib.suppress(TimeoutError):  # 2. it may still clean up
            return await asyncio.wait_for(self.wait(), _TERM_SECONDS)
        self.kill()
        try:  # 3. it cannot react any more
            return await asyncio.wait_for(self.wait(), _KILL_SECONDS)
        except TimeoutError:
            raise EngineError(f"{self.name} (pid {self.pid}) does not end, not even killed") from None

    def describe_exit(self) -> str:
        """Human-readable: "running", "exit code 3" or "killed by signal 9 (SIGKILL)"."""
        code = self.returncode
        if code is None:
            return "running"
        if code < 0:
            return f"killed by signal {-code}{_NAMES.get(-code, '')}"
        return f"exit code {code}" + (" (its parent is gone)" if code == EX_PARENT_GONE else "")


class SpawnedProcess(ChildProcess):
    """A child that is an interpreter of its own, started by this process."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], lifeline: int) -> None:
        """lifeline: the write end of the child's lifeline; owned by this object until the child has ended."""
        super().__init__(name, popen.pid)
        self._popen = popen
        self._open_fds = [lifeline, os.pidfd_open(popen.pid)]

    @property
    def returncode(self) -> int | None:
        """Exit code; minus the signal's number if a signal ended it; None while it runs."""
        code = self._popen.poll()
        if code is not None:
            self._close_fds()
        return code

    async def wait(self) -> int:
        """Wait until the child has ended; its `returncode`. Any number of tasks may wait."""
        while self.returncode is None:
            await readable(self._open_fds[1])
        self.reap()  # does not block: it has ended
        return self._popen.returncode

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self._popen.terminate()

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._popen.kill()

    def reap(self) -> None:
        """Wait for its end, and block until then."""
        self._popen.wait()
        self._close_fds()

    def _close_fds(self) -> None:
        while self._open_fds:
            os.close(self._open_fds.pop())


def spawn(target: str, config: bytes, fds: Sequence[int], name: str, *, remove: Sequence[str] = ()) -> SpawnedProcess:
    """Start a new interpreter that calls `target` ("package.module:function") with (config, list of fds).

    config is passed in a memfd, never in argv. The child has `fds` under the same numbers. **Sockets among them are
    transferred**: the parent's copies are closed, so that EOF works; memfds and pipes stay open in the caller as well.
    `name` is what `ps` and `top` show. The child logs as this process does, and ignores SIGINT and SIGHUP, and SIGTERM
    if this process does. When this process ends, the child deletes the folders `remove` and exits with EX_PARENT_GONE.
    Takes a few milliseconds and does not wait for the child to start.
    """
    with lifeline() as (theirs, ours):
        header = {**header_of(target), "fds": list(fds), "lifeline": theirs, "remove": list(remove)}
        popen = _popen(name, header, config, [*fds, theirs])
        try:
            process = SpawnedProcess(name, popen, ours)
        except OSError:  # no descriptor is left to watch it with
            popen.kill()
            popen.wait()
            raise
    close_sockets(fds)
    return process


@contextlib.contextmanager
def lifeline() -> Iterator[tuple[int, int]]:
    """A new pipe: the child's end, which this process closes afterwards, and its own, which it closes only if the child
    could not be started."""
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    try:
        yield theirs, ours
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)


def header_of(target: str) -> dict[str, Any]:
    """What a child needs to know of its parent, for `run_child`; JSON can encode it."""
    return {"path": sys.path, "target": target, "logs": msgspec.to_builtins(logs.current())}


@contextlib.contextmanager
def config_file(header: dict[str, Any], config: bytes) -> Iterator[int]:
    """A memfd for a child, closed in this process afterwards: the header as a line of JSON, and then the config."""
    with open(os.memfd_create("stencil-config", os.MFD_CLOEXEC), "wb") as file:
        file.write(json.dumps(header).encode() + b"\n" + config)
        file.seek(0)  # writes what is buffered; the offset is shared with the child
        yield file.fileno()


def close_sockets(fds: Sequence[int]) -> None:
    """Close the sockets among descriptors that a child has got."""
    for fd in set(fds):
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)


def on_parent_gone(cleanup: Callable[[], object]) -> None:
    """In a child: call `cleanup` before it exits because its parent is gone; last registered first.

    Runs in the lifeline thread, in parallel with the main thread, and must not wait for anything.
    """
    _when_parent_gone.callback(cleanup)


def die_with_parent() -> None:
    """In a child: have the kernel kill it, without clean-up, when the parent's thread that started it ends. A parent
    that has ended before this call is noticed by the lifeline.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run_child(name: str, header: dict[str, Any], config: bytes) -> None:
    """The child's side of `spawn`, called by the bootstrap."""
    fds, lifeline_fd = header["fds"], header["lifeline"]
    for folder in header["remove"]:
        on_parent_gone(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    threading.Thread(target=_leave_with_parent, args=(lifeline_fd,), name="lifeline", daemon=True).start()
    logs.configure(msgspec.convert(header["logs"], logs.LogConfig), name)
    for fd in (*fds, lifeline_fd):
        os.set_inheritable(fd, False)  # grandchildren get only the descriptors passed to them
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    module, _, function = header["target"].partition(":")
    getattr(importlib.import_module(module), function)(config, fds)


def _leave_with_parent(fd: int) -> None:
    try:
        os.read(fd, 1)  # nothing is ever written: returns at EOF
        _when_parent_gone.close()
    finally:
        os._exit(EX_PARENT_GONE)


def _popen(name: str, header: dict[str, Any], config: bytes, fds: list[int]) -> subprocess.Popen[bytes]:
    """Start the bootstrap with SIGINT and SIGHUP blocked until it can ignore them."""
    with config_file(header, config) as memfd:
        argv = [sys.executable, "-P", _BOOTSTRAP, name, str(memfd)]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[*fds, memfd])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


async def readable(*fds: int) -> None:
    """Wait until one of these is readable, or for a moment where this process may open no more descriptors: watches
    duplicates, since a loop keeps one reader per descriptor. So callers look again."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    with contextlib.ExitStack() as stack:
        for fd in fds:
            try:
                watched = os.dup(fd)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                return await asyncio.sleep(_NO_DESCRIPTOR_SECONDS)
            stack.callback(os.close, watched)
            loop.add_reader(watched, ready.set)
            stack.callback(loop.remove_reader, watched)
        await ready.wait()
