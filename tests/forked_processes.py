"""Processes that the launcher of all tests forks, where the product spawns them: importing PyTorch and diffusers takes
seconds of processor time. `launcher` is its address in all of these (`conftest.py`).
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from core.ipc.launched_process import LaunchedProcess, launch

POLL_SECONDS = 0.005


def fork(launcher: str, target: str, config: bytes, fds: Sequence[int], name: str) -> LaunchedProcess:
    """As `core.ipc.process.spawn`, with the differences that `launch` tells. Its pid is known."""
    process = launch(launcher, target, config, fds, name)
    while not process.pid and process.returncode is None:
        time.sleep(POLL_SECONDS)
    return process


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
