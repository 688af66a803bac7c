"""Processes that the launcher of all tests forks, where the product spawns them: importing PyTorch and diffusers takes
seconds of processor time. `launcher` is its address in all of these (`conftest.py`).
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from core.ipc import launcher as launchers
from core.ipc.launched_process import LaunchedProcess, launch
from core.ipc.local_sockets import address_of, listen
from core.ipc.process import on_parent_gone, spawn

POLL_SECONDS = 0.005


def fork(launcher: str, target: str, config: bytes, fds: Sequence[int], name: str) -> LaunchedProcess:
    """As `core.ipc.process.spawn`, with the differences that `launch` tells. Its pid is known."""
    process = launch(launcher, target, config, fds, name)
    while not process.pid and process.returncode is None:
        time.sleep(POLL_SECONDS)
    return process


def fork_child(
    launcher: str, target: str, config: bytes, fds: Sequence[int], name: str, *, remove: Sequence[str] = ()
) -> LaunchedProcess:
    """As `fork`, for an engine or an image processor, which have no launcher in the product: it collects garbage and
    heeds SIGTERM, as a spawned one does. remove: see `core.ipc.process.spawn`; not if a signal ends it."""
    return fork(launcher, f"{__name__}:run_child", pickle.dumps((target, config, list(remove))), fds, name)


def run_child(config: bytes, fds: list[int]) -> None:
    """In the forked process."""
    target, own, remove = pickle.loads(config)
    for folder in remove:
        on_parent_gone(partial(shutil.rmtree, folder, ignore_errors=True))
    gc.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(own, fds)


@contextmanager
def light_launcher(module: str) -> Iterator[str]:
    """The address of a new launcher that has imported this module, and not PyTorch. It ends with the context."""
    with listen() as listener:
        address = address_of(listener)
        process = spawn(f"{__name__}:serve_light", module.encode(), [listener.fileno()], "light-launcher")
        listener.detach()  # `spawn` has closed it
    try:
        yield address
    finally:
        process.kill()
        process.reap()


def serve_light(config: bytes, fds: list[int]) -> None:
    """The light launcher."""
    gc.disable()
    importlib.import_module(config.decode())
    gc.freeze()
    launchers.serve(socket.socket(fileno=fds[0]), "light-launcher")


class ForkedLauncher:
    """A launcher of workers of its own. What `WorkerLauncher` uses of a `SpawnedProcess`."""

    def __init__(self, launcher: str, target: str, config: bytes, fds: Sequence[int], name: str) -> None:
        self._process = fork(launcher, target, config, fds, name)
        self.pid, self.kill = self._process.pid, self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def reap(self) -> None:
        while self.returncode is None:
            time.sleep(POLL_SECONDS)


class ForkedContext:
    """What is used of `multiprocessing.get_context("spawn")`."""

    Pipe = staticmethod(Pipe)

    def __init__(self, launcher: str) -> None:
        self._launcher = launcher

    def Process(self, target: Callable[..., object], args: Sequence[Any], daemon: bool) -> _ContextProcess:
        assert daemon, "it ends with this process"
        return _ContextProcess(self._launcher, target, args)


class _ContextProcess:
    """What is used of `multiprocessing.Process`. What it gets is pickled as there."""

    def __init__(self, launcher: str, target: Callable[..., object], args: Sequence[Any]) -> None:
        self._launcher, self._target, self._args = launcher, target, args

    def start(self) -> None:
        pipes = [os.dup(each.fileno()) for each in self._args if isinstance(each, Connection)]
        others = [None if isinstance(each, Connection) else each for each in self._args]
        self._process = fork(self._launcher, f"{__name__}:call", pickle.dumps((self._target, others)), pipes, "forked")

    def join(self) -> None:
        while self._process.returncode is None:
            time.sleep(POLL_SECONDS)


def result_of(launcher: str, function: Callable[..., Any], *args: Any) -> Any:
    """As of a process pool that spawns one process."""
    ours, theirs = Pipe(duplex=False)
    process = ForkedContext(launcher).Process(send_result, (theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    with ours:
        result = ours.recv()
    process.join()
    return result


def send_result(connection: Connection, function: Callable[..., object], args: Sequence[Any]) -> None:
    """In the forked process."""
    connection.send(function(*args))


def call(config: bytes, fds: list[int]) -> None:
    """In the forked process."""
    target, args = pickle.loads(config)
    pipes = iter(fds)
    target(*(Connection(next(pipes)) if each is None else each for each in args))
