"""Runs the real server in a process that is forked, and has imported what the server and its workers import.

Importing takes most of a server's start, seconds of processor time. A *warm* process imports once for all servers of
the tests: the launcher of workers that the tests share (`core/ipc/launcher.py`) forks it, and it is a launcher itself,
whose children are servers. From `python -m entrypoints.serve` a forked one differs in this: it has its launcher from
the beginning, forked as well, and its engines, image processors and keeper of weights are that launcher's children,
with PyTorch in memory that they share.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import io
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from forked_processes import fork_child

from benchmarks.load.server import ROOT, STENCIL, STOP_SECONDS, Server, free_port
from core.ipc import launcher
from core.ipc.launched_process import LaunchedProcess, launch
from core.ipc.local_sockets import address_of, listen
from core.ipc.process import header_of, lifeline, run_child
from engine.client.processes import keeper_process
from engine.client.processes.worker_launcher import MAIN, worker_launcher
from engine.images import image_pool
from engine.router import local_backend

SERVER = "entrypoints.serve"
ITS_CHILDREN = ("engine.engine_core.engine_process", "engine.images.image_processor")
WARM = "warm-server"
POLL_SECONDS = 0.005


class WarmProcess:
    """Forks servers, and engines and image processors of the tests' own process, until its launcher ends. address: as
    of any launcher."""

    def __init__(self, launcher_address: str) -> None:
        """launcher_address: of a launcher that has imported what workers need."""
        with listen() as listener:
            self.address = address_of(listener)
            self._process = launch(launcher_address, "forked_server:warm_up", b"", [listener.fileno()], WARM)
            listener.detach()  # `launch` has closed it

    def fork(self, flags: Sequence[str], environment: dict[str, str], folder: Path, log: Path) -> ForkedServer:
        """A server with these flags and this environment, in a working directory; its stderr is appended to `log`."""
        reader, writer = os.pipe()
        with open(writer, "wb", closefd=True) as stdout, log.open("ab") as stderr:
            config = json.dumps({"flags": flags, "environment": environment, "folder": str(folder)}).encode()
            fds = [stdout.fileno(), stderr.fileno()]
            return ForkedServer(launch(self.address, "forked_server:serve", config, fds, SERVER), open(reader))

    def close(self) -> None:
        """End it, and wait until it has ended."""
        self._process.kill()
        asyncio.run(self._process.wait())


@cache
def warm_process() -> WarmProcess:
    """The one of these tests, forked by the launcher that they share (`conftest.py`)."""
    with worker_launcher.used() as address:
        return WarmProcess(address)


def end_warm_process() -> None:
    """End it, if it was needed."""
    if warm_process.cache_info().currsize:
        warm_process().close()
        warm_process.cache_clear()


class ForkedServer:
    """What tests use of `subprocess.Popen[str]`."""

    def __init__(self, process: LaunchedProcess, stdout: io.TextIOWrapper) -> None:
        self._process, self.stdout = process, stdout
        while not process.pid and self.poll() is None:
            time.sleep(POLL_SECONDS)
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(SERVER, timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def start_server(
    flags: Sequence[str] = (), module: str = STENCIL, *, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """As `benchmarks.load.server.start_server`, for tests of what a benchmark does with a server. Its log is lost."""
    assert module == STENCIL == SERVER
    port, started = free_port(), time.monotonic()
    told = ("--port", str(port), "--log-level", "warning", *flags)
    process = warm_process().fork(told, {**os.environ, **(environment or {})}, ROOT, Path(os.devnull))
    with process.stdout:
        try:
            yield Server(process, "127.0.0.1", port, started)  # type: ignore[arg-type]
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


# -------------------------------------------------------------------------------------------- in the forked processes


def warm_up(_config: bytes, fds: list[int]) -> None:
    """The warm process."""
    for module in (SERVER, *ITS_CHILDREN):
        importlib.import_module(module)
    gc.freeze()  # so that collections of children do not write to memory that they share
    launcher.serve(socket.socket(fileno=fds[0]), WARM)


def serve(config: bytes, fds: list[int]) -> None:
    """The server."""
    for number, fd in enumerate(fds, start=1):
        os.dup2(fd, number)
        os.close(fd)
    told: dict[str, Any] = json.loads(config)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    have_own_launcher()
    _run_server(told["flags"])


def have_own_launcher() -> None:
    """Fork a launcher of workers for this process. It forks engines, image processors and the keeper, too."""
    with listen() as listener:
        address = address_of(listener)
        own = _fork_launcher(listener)
    worker_launcher._address, worker_launcher._process = address, own  # type: ignore[assignment]
    keeper_process.spawn = partial(launch, address)  # type: ignore[assignment]
    local_backend.spawn = image_pool.spawn = partial(fork_child, address)  # type: ignore[assignment]


def _fork_launcher(listener: socket.socket) -> _Child:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with lifeline() as (theirs, ours):
        pid = os.fork()
        if pid:
            return _Child(pid, ours)
        os.close(ours)
        fds = [listener.detach()]
        header = {**header_of(MAIN), "fds": fds, "lifeline": os.dup(theirs), "remove": []}
        run_child("stencil-launcher", header, b"")
        raise AssertionError("a launcher runs until it is killed")


class _Child:
    """What `WorkerLauncher` uses of a `SpawnedProcess`."""

    def __init__(self, pid: int, lifeline: int) -> None:
        self.pid, self.returncode, self._lifeline = pid, None, lifeline

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        os.waitpid(self.pid, 0)


def _run_server(flags: Sequence[str]) -> None:
    logging.getLogger().handlers.clear()  # the server configures its own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    gc.enable()
    sys.argv = [SERVER, *flags]
    with suppress(KeyError):
        del sys.modules[SERVER]  # it runs as the main module
    try:
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        if not isinstance(left.code, int):
            raise
        launcher.leave(left.code)
