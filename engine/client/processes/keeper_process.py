"""KeeperProcess: the process that loads weights and keeps them in shared memory for all workers of a server.

It is restarted whenever it dies, under the same address; workers keep what they have mapped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from core.config import EMBEDDED_SEGMENTER, EngineConfig
from core.ipc.local_sockets import address_of, listen
from core.ipc.logs import of_request
from core.ipc.process import ChildProcess, spawn
from core.restarts import wait_before

logger = logging.getLogger("stencil.engine")

MAIN = "model_executor.weights.process:main"
"""What the process runs."""

PROVEN_SECONDS = 60.0
"""A keeper that has lived for this long is restarted at once."""

WORTH_BYTES = 1024**3
"""Least size of a checkpoint that several workers do not load each for itself: the process itself takes 0.3 GB."""


USUAL = ((), (EMBEDDED_SEGMENTER,))
"""Segmenters that no keeper is needed for: none, and one that is loaded in no time, as the embedded ControlNet is."""


class KeeperProcess:
    """Call `start`, run `run` as a task, then `close`."""

    def __init__(self) -> None:
        self._listener = listen()
        self._process: ChildProcess | None = None
        self._is_closed = asyncio.Event()

    @property
    def address(self) -> str:
        """Where workers find it."""
        return address_of(self._listener)

    def start(self) -> None:
        """Spawn the process; connections wait until it serves. Raises OSError."""
        listener = os.dup(self._listener.fileno())
        try:
            self._process = spawn(MAIN, b"", [listener], "stencil-weights")
        except OSError:
            os.close(listener)
            raise

    async def run(self) -> None:
        """Restart it whenever it dies, until it is closed."""
        num_deaths = 0
        while not self._is_closed.is_set():
            assert self._process is not None
            started = time.monotonic()
            await self._process.wait()
            if self._is_closed.is_set():
                return
            num_deaths = 1 if time.monotonic() - started > PROVEN_SECONDS else num_deaths + 1
            seconds, how = wait_before(num_deaths - 1), self._process.describe_exit()
            text = "the process that loads weights died (%s) and is restarted in %.0f s"
            logger.error(text, how, seconds, extra=of_request(""))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_closed.wait(), seconds)
                return
            try:
                self.start()
            except OSError as error:  # the process that died is waited for again, so that this counts as a death
                logger.error("the process that loads weights cannot be started: %s", error, extra=of_request(""))

    async def close(self) -> None:
        """End the process. Idempotent."""
        self._is_closed.set()
        self._listener.close()
        if self._process is not None:
            self._process.kill()  # it has nothing to finish
            await self._process.wait()


def needs_keeper(config: EngineConfig) -> bool:
    """Whether an engine's workers load weights through a keeper: to load some while they compute, or because several
    would hold large ones each."""
    if len(config.models) > 1 or any(model.segmenter_checkpoints not in USUAL for model in config.models):
        return True
    if any(model.controlnets for model in config.models):
        return True
    return config.num_workers > 1 and sum(_weight_bytes(Path(config.models[0].model))) > WORTH_BYTES


def _weight_bytes(checkpoint: Path) -> Iterator[int]:
    """Sizes of a checkpoint's weight files, if it is a directory."""
    with suppress(OSError, RuntimeError):
        yield from (file.stat().st_size for file in checkpoint.expanduser().glob("*/*.safetensors"))
