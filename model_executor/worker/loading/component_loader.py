"""ComponentLoader: loads and drops components of a worker's models beside its batches.

The keeper of weights reads the files and packs the weights. Here, in a thread, its memory is mapped, and layers are
made over it. A component is put in use by an assignment; no batch uses it before the engine has its ModelLoaded.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from core.errors import OutOfMemoryError, StencilError
from core.failure import Failure
from core.handles import LoadedComponent, ModelKey
from core.ipc.logs import of_request
from core.messages.worker import ModelFailed, ModelLoaded
from core.run_class import RUN_CLASS
from model_executor.device_failures import is_out_of_memory
from model_executor.weights.taking import TakenWeights
from model_executor.worker.loading.class_loader import ClassLoader
from model_executor.worker.loading.loader_thread import LoaderThread
from model_executor.worker.loading.resident import ResidentModels
from model_executor.worker.loading.weights_room import WeightsRoom

logger = logging.getLogger("stencil.worker")

NO_ROOM = "there is no room for a model's weights beside the others; serve fewer, or allow less (--model-bytes)"

Report = Callable[[ModelLoaded | ModelFailed], None]


class ComponentLoader:
    """report: called in the thread. taken: None: there is no keeper, and everything is loaded from the start.
    classes: loads those of users; None: there are none."""

    def __init__(
        self,
        rank: int,
        models: ResidentModels,
        room: WeightsRoom,
        report: Report,
        thread: LoaderThread,
        taken: TakenWeights | None = None,
        classes: ClassLoader | None = None,
    ) -> None:
        self._rank = rank
        self._models = models
        self._room = room
        self._report = report
        self._thread = thread
        self._taken = taken
        self._classes = classes

    def load_first(self) -> None:
        """Load, in the caller's thread, what is served from the start: everything, or with a keeper the first model.
        Raises ConfigError, and EngineError if the keeper dies."""
        self._models.load_all(() if self._taken is None else self._models.first, self._read)
        if self._taken is not None:
            self._taken.drop_unused()

    def load(self, key: ModelKey) -> None:
        """Load a component, unless it is loaded; the report says when it is there, or why it is not."""
        wait = self._thread.put(lambda: self._load(key))
        if not self._is_class(key) and not self._can_be_taken(key):
            wait()  # what reads the files changes settings of the whole process

    def unload(self, key: ModelKey) -> None:
        """Drop a component that no batch uses any more, once the loads before it are over."""
        self._thread.put(lambda: self._unload(key))

    def _is_class(self, key: ModelKey) -> bool:
        return key.component == RUN_CLASS

    def _can_be_taken(self, key: ModelKey) -> bool:
        """Whether the keeper can load it: not what is quantised on a GPU, layer by layer while it is loaded."""
        if self._taken is None:
            return False
        try:
            checkpoint, part = self._models.origin(key)
        except KeyError:
            return False  # which loading will report
        return checkpoint.device.type == "cpu" or not checkpoint.is_quantized(part)

    def _load(self, key: ModelKey) -> None:
        answer = self._answer(key)
        if isinstance(answer, ModelFailed):  # only now is the error gone, whose traceback referred to what was mapped
            self._forget_unused()
        self._report(answer)

    def _answer(self, key: ModelKey) -> ModelLoaded | ModelFailed:
        started = time.monotonic()
        try:
            return ModelLoaded(self._rank, self._loaded(key), time.monotonic() - started)
        except BaseException as error:  # whatever it is, it fails the requests that need this component alone
            error = OutOfMemoryError(NO_ROOM) if is_out_of_memory(error) else error
            where = "" if isinstance(error, StencilError) else f"\n{traceback.format_exc()}"
            logger.error("a model cannot be loaded: %s%s", error, where, extra=of_request(""))
            return ModelFailed(self._rank, key, Failure.of(error))

    def _loaded(self, key: ModelKey) -> LoadedComponent:
        if self._classes is not None and self._is_class(key):
            return self._classes.load(key)  # how much it takes is known only then
        if (known := self._models.find(key)) is not None:
            return known
        self._room.check_next(key)
        loaded = self._models.install(key, *self._read(key))
        if self._taken is not None:
            self._taken.drop_unused()
        return loaded

    def _unload(self, key: ModelKey) -> None:
        if self._classes is not None and self._is_class(key):
            self._classes.unload(key)
        elif self._models.find(key) is None:
            return  # its load has failed
        else:
            self._models.unload(key)
        self._forget_unused()

    def _forget_unused(self) -> None:
        """Tell the keeper of what was dropped."""
        gc.collect()  # denoisers refer to themselves, and errors may be in cycles, too
        if self._taken is not None:
            self._taken.drop_unused()

    def _read(self, key: ModelKey) -> tuple[nn.Module, int]:
        if self._taken is None or not self._can_be_taken(key):
            return self._models.read(key)
        checkpoint, part = self._models.origin(key)
        cpu_threads = torch.get_num_threads() if checkpoint.device.type == "cpu" else 0
        module, nbytes = self._taken.take(key, checkpoint.config_as_opened, part, cpu_threads)
        return _on(module, checkpoint.home_of(part)), nbytes


def _on(module: nn.Module, device: torch.device) -> nn.Module:
    """The module on its device. On a GPU it is copied beside what is computed."""
    if device.type == "cpu":
        return module
    stream = _load_stream(device)
    # The allocator gives what was loaded on a stream to that stream alone again: what is still queued must not read it.
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        module = module.to(device)
        stream.synchronize()
    return module


@cache
def _load_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all loads. With one for each load, the memory of an unloaded component would go to none of the next
    ones until the allocator has run out."""
    return torch.cuda.Stream(device)
