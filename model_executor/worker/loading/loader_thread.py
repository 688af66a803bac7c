"""LoaderThread: changes what a worker has loaded, components and adapters, in one order, while the worker computes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import torch

from core.ipc.logs import of_request

logger = logging.getLogger("stencil.worker")

Job = Callable[[], None]
"""Reports its own failures."""


class LoaderThread:
    """Its thread begins with the first job: most workers never have one."""

    def __init__(self, device: torch.device) -> None:
        """device: the worker's."""
        self._device = device
        self._jobs: queue.SimpleQueue[tuple[Job, threading.Event]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> Callable[..., bool]:
        """Do a job after those before it; returns `Event.wait`, which waits until it is done. Main thread only."""
        if self._thread is None:  # a daemon: the process ends while a load is under way
            self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
            self._thread.start()
        is_done = threading.Event()
        self._jobs.put((job, is_done))
        return is_done.wait

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # per thread; what names no device runs there
        while True:
            job, is_done = self._jobs.get()
            try:
                job()
            except BaseException:  # panics of Rust are no Exceptions: later jobs are not to wait for ever
                logger.exception("a change to the loaded models failed", extra=of_request(""))
            is_done.set()
