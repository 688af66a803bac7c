"""A worker's process: one device, its models, and a loop that does what plans say in the order they come.

Knows channels, loading and start-up; what a batch computes is the runner's. Everything heavy is imported inside `main`,
after the settings that PyTorch reads once at import, so that a failing import is reported like any other failed start.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
import traceback
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import msgspec

from core.cache_folder import page_folder, user_cache_folder
from core.config import CacheConfig
from core.errors import MessageError
from core.failure import Failure
from core.ipc.logs import of_request
from core.ipc.process import die_with_parent
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import Arena
from core.memory_budget import CPU_REMEDIES, REMEDIES
from core.messages.codec import MessageDecoder, encode
from core.messages.salvage import WithheldItems, readable_plan, sendable_result
from core.messages.worker import (
    BatchResult,
    FromWorker,
    PageCopied,
    Shutdown,
    StepPlan,
    ToWorker,
    TransferDone,
    WorkerConfig,
    WorkerFailed,
)

if TYPE_CHECKING:
    from model_executor.page_cache.page_files import PageFiles
    from model_executor.page_cache.page_store import PageStore
    from model_executor.worker.resident import ResidentModels
    from model_executor.worker.runner import Runner
    from model_executor.worker.tensor_store import TensorStore

logger = logging.getLogger("stencil.worker")

CACHED_OPERATORS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 256, "LRU_CACHE_CAPACITY": 32}
"""Compiled operators that oneDNN keeps, and, of each kind, PyTorch's layer over it. There is one for every shape, and
masks differ: with their default of 1024 each, a worker of the embedded model grew by 200 MB over some hundred edits,
and went on. So it grows by 120 MB within 40 varied edits, and by nothing in the next 40. With 256 of each it was 185
MB, in 0.99 of the processor time; with 128 and 64, 82 MB in 1.02; with 32 of each, 30 MB in 1.12."""


def main(config: bytes, fds: list[int]) -> None:
    """Entry point of `core.ipc.process.spawn`: `config` is a WorkerConfig, `fds` channel memory, channel socket, arena,
    page arena.

    Returns when told to shut down or when the engine is gone.
    """
    # A supervisor signals the whole group: the parent leads the shutdown, and running edits are still to be finished.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()  # a worker that hangs in a kernel must not outlive an engine that was killed
    settings = msgspec.msgpack.decode(config, type=WorkerConfig)
    link = EngineLink(Channel.attach(fds[0], fds[1]))
    with suppress(PeerClosedError):
        try:
            arenas = Arena.attach(settings.arena_id, fds[2]), Arena.attach(settings.page_arena_id, fds[3])
            with closing(_start(settings, link, *arenas)) as worker:
                worker.run()
        except PeerClosedError:
            raise  # nobody is left to tell
        except Exception as error:  # the actor's edge: the engine is told why there is no worker any more
            link.send(WorkerFailed(rank=settings.rank, failure=Failure.of(error, traceback.format_exc())))


def _start(settings: WorkerConfig, link: EngineLink, arena: Arena, page_arena: Arena) -> Worker:
    """Load everything, run every stage once, report ready."""
    num_threads = settings.models[0].threads or default_threads(settings.num_workers)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)
    for cache, capacity in CACHED_OPERATORS.items():
        os.environ.setdefault(cache, str(capacity))
    os.environ.setdefault("TRITON_CACHE_DIR", str(user_cache_folder(os.environ) / "triton"))
    if any(model.kernels == "compile" for model in settings.models):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache_folder(os.environ) / "inductor"))
    # diffusers' import makes the folder that this names, and by default one that stays behind; nothing is compiled.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    from model_executor.page_cache.page_store import PageStore
    from model_executor.worker.cost_probe import known_or_probed
    from model_executor.worker.memory_probe import device_page_bytes, gauge_of, room_for
    from model_executor.worker.resident import ResidentModels, quiet_libraries, set_threads
    from model_executor.worker.runner import Runner
    from model_executor.worker.tensor_store import TensorStore

    set_threads(num_threads)
    quiet_libraries()
    models = ResidentModels.open(
        settings.models,
        has_device_tier=settings.cache.device_bytes != 0,
        device_index=settings.device_index,
        num_workers=settings.num_workers,
    )
    gauge = gauge_of(models.device)
    with room_for("the model", CPU_REMEDIES if models.device.type == "cpu" else REMEDIES):
        models.load_all()
        models.warm_up()
    ready = models.ready(settings.rank)
    page_bytes = device_page_bytes(gauge, models.families, ready.models, settings.cache, settings.scheduler)
    ready = msgspec.structs.replace(ready, device_page_bytes=page_bytes)
    if settings.rank == 0:  # the others would only disturb its measurements
        kernels = {model.name: model.kernels for model in settings.models}
        samples = known_or_probed(models.families, ready.models, user_cache_folder(os.environ), kernels)
        ready = msgspec.structs.replace(ready, samples=samples)
    store = TensorStore(settings.rank, models.device, arena)
    files = _page_files(settings.cache)
    pages = PageStore(
        models.device, page_arena, files, link.report, settings.rank, has_device_tier=ready.device_page_bytes > 0
    )
    runner = Runner(settings.rank, models.families, store, arena, pages, models.prompts_of)
    link.send(ready)
    return Worker(settings.rank, link, models, store, pages, runner)


def _page_files(cache: CacheConfig) -> PageFiles | None:
    """The disk tier, where one was asked for."""
    from model_executor.page_cache.page_files import PageFiles

    if cache.disk_bytes <= 0:
        return None
    return PageFiles(page_folder(cache.directory, os.environ), cache.disk_bytes)


def default_threads(num_workers: int) -> int:
    """An equal share of the cores this process may use, but one: that is left to the server's other processes.

    Threads of one operator wait for each other at its end, so a core that is shared with anything busy stalls them all:
    beside another process on 2 cores, a step took 2 to 10 times as long with 2 threads as with 1.
    """
    return max(1, (len(os.sched_getaffinity(0)) - 1) // num_workers)


class EngineLink:
    """The channel to the engine, for both threads of a worker: a channel takes one sender at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    def send(self, message: FromWorker) -> None:
        """Raises PeerClosedError when the engine is gone. An item's result that cannot be encoded fails its own
        request.
        """
        try:
            payload = encode(message)
        except MessageError as error:
            logger.error("%s", error, extra=of_request(""))
            if not isinstance(message, BatchResult):
                raise
            payload = encode(sendable_result(message))
        with self._sending:
            self._channel.send(payload)

    def report(self, copied: PageCopied) -> None:
        """`send` for the I/O thread: that the engine is gone is the main thread's to notice."""
        with suppress(PeerClosedError):
            self.send(copied)

    def recv(self) -> bytes:
        """The engine's next message. Main thread only. Raises PeerClosedError when the engine is gone."""
        return self._channel.recv()


class Worker:
    """The loop: one plan after the other, one result per batch as soon as it is done."""

    def __init__(
        self,
        rank: int,
        link: EngineLink,
        models: ResidentModels,
        store: TensorStore,
        pages: PageStore,
        runner: Runner,
    ) -> None:
        self._rank = rank
        self._link = link
        self._models = models
        self._store = store
        self._pages = pages
        self._runner = runner
        self._decoder: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)
        self._withheld = WithheldItems()

    def run(self) -> None:
        """Until Shutdown. Raises PeerClosedError when the engine is gone, and whatever a plan cannot do that is not
        one request's: a component that does not load, a tensor to move that is not here."""
        while isinstance(plan := self._next(), StepPlan):
            self._execute(plan)
        assert isinstance(plan, Shutdown)

    def _next(self) -> ToWorker:
        """The next message that says anything; what can be done of a plan that cannot be decoded."""
        while True:
            payload = self._link.recv()
            try:
                return self._decoder.decode(payload)
            except MessageError as error:
                logger.error("%s", error, extra=of_request(""))
                saved = readable_plan(payload, self._rank, time.monotonic(), error)
            if saved is not None:
                self._withheld.update(saved.withheld)
                for answer in saved.answers:
                    self._link.send(answer)
                return saved.plan

    def close(self) -> None:
        """End the I/O thread; copies that wait are dropped."""
        self._pages.close()

    def _execute(self, plan: StepPlan) -> None:
        """The order that StepPlan promises."""
        for component in plan.load:
            self._models.load(component)
        self._pages.forget(plan.forget)
        self._pages.delete(plan.delete)
        for copy in plan.copies:
            self._pages.start(copy)
        for batch in plan.batches:
            self._link.send(self._withheld.complete(self._runner.run(batch)))
        for transfer in plan.transfers:
            self._link.send(TransferDone(rank=self._rank, ref=self._store.export(transfer.ref)))
        for key in plan.free:
            self._store.free(key)
        for component in plan.unload:
            self._models.unload(component)
