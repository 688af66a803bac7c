"""AdapterLoader: reads adapters' files in a thread of its own, while the worker computes, and puts them in use."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable

import torch

from core.config import AdapterConfig
from core.errors import ConfigError, InvalidRequestError
from core.failure import Failure
from core.ipc.logs import of_request
from core.messages.worker import AdapterLoaded, DropAdapter, LoadAdapter
from model_executor.worker.resident import ResidentModels

logger = logging.getLogger("stencil.worker")


class AdapterLoader:
    """The order of loads and drops is kept. `report` is called in the thread, with the answer to each load."""

    def __init__(self, rank: int, models: ResidentModels, report: Callable[[AdapterLoaded], None]) -> None:
        self._rank, self._models, self._report = rank, models, report
        self._jobs: queue.SimpleQueue[LoadAdapter | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._num_pending = 0
        self._is_started = False

    def load(self, message: LoadAdapter) -> None:
        """Begin to load an adapter. Main thread only, as the others."""
        if not self._is_started:  # most workers never need the thread
            threading.Thread(target=self._run, name="adapters", daemon=True).start()
            self._is_started = True
        with self._idle:
            self._num_pending += 1
        self._jobs.put(message)

    def drop(self, message: DropAdapter) -> None:
        """Drop an adapter that no request uses any more."""
        self.wait()
        self._models.drop_adapter(message.model, message.patch)

    def wait(self) -> None:
        """Wait until all loads begun are over: an engine that starts again is sent requests at once."""
        with self._idle:
            self._idle.wait_for(lambda: not self._num_pending)

    @torch.inference_mode()  # as in the main thread
    def _run(self) -> None:
        while (message := self._jobs.get()) is not None:
            answer = self._answer(message)
            with self._idle:
                self._num_pending -= 1
                self._idle.notify_all()
            self._report(answer)

    def _answer(self, message: LoadAdapter) -> AdapterLoaded:
        try:
            config = AdapterConfig(message.name, message.path)
            patch = self._models.add_adapter(message.model, config, message.patch)
        except Exception as error:  # the thread's outermost handler: a bad file fails its own request
            logger.warning("adapter %s was not loaded: %s", message.name, error, extra=of_request(""))
            return AdapterLoaded(self._rank, message.request_id, failure=_failure(error))
        return AdapterLoaded(self._rank, message.request_id, patch)


def _failure(error: Exception) -> Failure:
    if isinstance(error, ConfigError):  # about the file: the client named it
        return Failure.of(InvalidRequestError(f"Invalid 'lora_path': {error}.", param="lora_path"))
    return Failure.of(error, traceback.format_exc())
