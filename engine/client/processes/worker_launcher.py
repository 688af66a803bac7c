"""The launcher process of this process: it forks workers for every engine that is started from here.

A worker that is forked has nothing to import, which takes a spawned one seconds of processor time: an engine replaces a
dead worker sooner, and starts several in little more time than one. If the launcher dies, its workers die with it;
engines then spawn workers as they would without one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.config import EngineConfig
from core.ipc.local_sockets import address_of, listen
from core.ipc.logs import of_request
from core.ipc.process import SpawnedProcess, spawn

logger = logging.getLogger("stencil.engine")

MAIN = "model_executor.worker.launcher:main"
"""What the process runs."""

GPU_DRIVERS = [Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg")]
"""One of these files is there on a machine with a GPU that PyTorch may use: of NVIDIA, AMD, or under Windows."""


class WorkerLauncher:
    """A launcher that runs as long as somebody uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # offline engines run in threads
        self._num_users = 0
        self._process: SpawnedProcess | None = None
        self._address = ""

    @contextmanager
    def used(self) -> Iterator[str]:
        """Its address, for `core.ipc.launched_process.launch`; starts it if it does not run. It ends after the last
        user. "": it could not be started."""
        lock = self._lock
        with lock:
            self._num_users += 1
            if self._process is None or self._process.returncode is not None:
                self._start()
            address = "" if self._process is None else self._address
        try:
            yield address
        finally:
            if lock is self._lock:  # not in a forked copy of this process
                with lock:
                    self._num_users -= 1
                    if not self._num_users:
                        self._end()

    def _start(self) -> None:
        """Spawn the process. Without it engines serve, too: what keeps it from starting is logged."""
        self._process = None
        try:
            with listen() as listener:
                self._address = address_of(listener)
                self._process = spawn(MAIN, b"", [listener.fileno()], "stencil-launcher")
                listener.detach()  # `spawn` has closed it
        except OSError as error:
            logger.warning("no launcher of workers can be started: %s", error, extra=of_request(""))

    def _end(self) -> None:
        """Kill it, and block until the kernel has ended it: milliseconds."""
        if self._process is not None:
            self._process.kill()
            self._process.reap()
        self._process = None

    def forget(self) -> None:
        """In a forked copy of this process: the launcher and its users are the original's."""
        self._lock = threading.Lock()
        self._num_users = 0
        self._process = None


worker_launcher = WorkerLauncher()
"""The one of this process."""

os.register_at_fork(after_in_child=worker_launcher.forget)


def needs_launcher(config: EngineConfig) -> bool:
    """Whether an engine's workers are forked: if they compute on CPUs. A process that has touched a GPU cannot be
    forked, and libraries may touch one when they are imported. Workers that compile layers import for themselves, too:
    the launcher leaves out the compiler."""
    if any(model.kernels == "compile" for model in config.models):
        return False
    devices = {model.device for model in config.models}
    return devices == {"cpu"} or (devices <= {"cpu", "auto"} and not has_gpu_driver())


def has_gpu_driver() -> bool:
    """Whether this machine may have a GPU that PyTorch computes on. To ask PyTorch would take its import."""
    return any(map(Path.exists, GPU_DRIVERS))
