"""AdapterLoader: reads adapters' files in the loader's thread, while the worker computes, and puts them in use."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

import torch

from core.config import AdapterConfig
from core.errors import ConfigError, InvalidRequestError
from core.failure import Failure
from core.ipc.limits import memory_limit
from core.ipc.logs import of_request
from core.messages.worker import AdapterLoaded, DropAdapter, LoadAdapter
from model_executor.worker.loading.loader_thread import LoaderThread
from model_executor.worker.loading.resident import ResidentModels

logger = logging.getLogger("stencil.worker")


class AdapterLoader:
    """The order of loads and drops is kept. `report` is called in the thread, with the answer to each load."""

    def __init__(
        self,
        rank: int,
        models: ResidentModels,
        report: Callable[[AdapterLoaded], None],
        thread: LoaderThread,
        max_bytes: int,
    ) -> None:
        """max_bytes: that the tensors of all adapters may take which are loaded here, as float32."""
        self._rank, self._models, self._report, self._thread = rank, models, report, thread
        self._max_bytes = max_bytes
        self._nbytes: dict[tuple[str, str], int] = {}  # (model, patch) -> of its tensors; used in the thread alone
        self._wait_for_last: Callable[[], object] = lambda: None

    def load(self, message: LoadAdapter) -> None:
        """Begin to load an adapter. Main thread only, as the others."""
        self._wait_for_last = self._thread.put(lambda: self._report(self._answer(message)))

    def drop(self, message: DropAdapter) -> None:
        """Drop an adapter that no request uses any more, once the loads before it are over."""
        self._wait_for_last = self._thread.put(lambda: self._drop(message))

    def wait(self) -> None:
        """Wait until all of these that have begun are over: an engine that starts again is sent requests at once."""
        self._wait_for_last()

    @torch.inference_mode()  # as in the main thread
    def _answer(self, message: LoadAdapter) -> AdapterLoaded:
        try:
            config = AdapterConfig(message.name, message.path)
            left = self._max_bytes - sum(self._nbytes.values())
            known = {patch: size for (model, patch), size in self._nbytes.items() if model == message.model}
            adapter = self._models.add_adapter(message.model, config, message.patch, left, known)
            self._nbytes[message.model, adapter.patch] = adapter.nbytes
        except BaseException as error:  # whatever it is, a bad file fails its own request
            logger.warning("adapter %s was not loaded: %s", message.name, error, extra=of_request(""))
            return AdapterLoaded(self._rank, message.request_id, failure=_failure(error))
        return AdapterLoaded(self._rank, message.request_id, adapter.patch, defaults=adapter.defaults)

    def _drop(self, message: DropAdapter) -> None:
        self._nbytes.pop((message.model, message.patch), None)
        self._models.drop_adapter(message.model, message.patch)


def _failure(error: BaseException) -> Failure:
    if isinstance(error, ConfigError):  # about the file: the client named it
        return Failure.of(InvalidRequestError(f"Invalid 'lora_path': {error}.", param="lora_path"))
    return Failure.of(error, traceback.format_exc())


def adapter_bytes(num_workers: int) -> int:
    """What the adapters of a worker, loaded at run time, may take: a quarter of the machine's memory for all workers.
    Until a part that runs in half precision has its copy, a file's tensors take twice that."""
    return memory_limit() // 4 // num_workers
