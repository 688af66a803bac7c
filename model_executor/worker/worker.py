"""The worker process: one device, its models, and a loop that executes the engine's plans in order.

This module does channels, start-up and loading; `runner.py` computes batches. Heavy imports are inside functions: they
must follow the settings that PyTorch reads once at import, and one that fails is reported like any other failed start.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import msgspec

from core.cache_folder import page_folder, user_cache_folder
from core.config import CacheConfig
from core.errors import MessageError
from core.failure import Failure
from core.ipc.logs import of_request
from core.ipc.peer_sockets import PeerSockets
from core.ipc.process import die_with_parent
from core.ipc.ring import Channel, PeerClosedError
from core.ipc.shared_array import Arena
from core.memory_budget import CPU_REMEDIES, REMEDIES, bytes_to_come, check_fits
from core.messages.codec import MessageDecoder, encode
from core.messages.salvage import WithheldItems, readable_plan, sendable_result
from core.messages.worker import (
    AdapterLoaded,
    BatchResult,
    DropAdapter,
    FromWorker,
    LoadAdapter,
    ModelFailed,
    ModelLoaded,
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
    from model_executor.worker.adapter_loader import AdapterLoader
    from model_executor.worker.component_loader import ComponentLoader
    from model_executor.worker.exchange import Exchange
    from model_executor.worker.runner import Runner
    from model_executor.worker.tensor_store import TensorStore

logger = logging.getLogger("stencil.worker")

CACHED_OPERATORS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 256, "LRU_CACHE_CAPACITY": 32}
"""Environment variable -> limit on compiled operators cached: by oneDNN, and by PyTorch, for each kind, on top of it.
There is one per shape, and masks differ: with the default of 1024 each, a worker with the embedded model grew by 200 MB
over some hundred edits and kept growing. With these limits it grows by 120 MB within 40 varied edits, and not in the
next 40. With 256 of each it was 185 MB, in 0.99 of the processor time; with 128 and 64, 82 MB in 1.02; with 32 of each,
30 MB in 1.12."""


def main(config: bytes, fds: list[int]) -> None:
    """Entry point for `core.ipc.process.spawn`. config: an encoded WorkerConfig. fds: channel memory, channel socket,
    arena, page arena, value arena; with several ranks also this rank's inbox and the sending ends of all inboxes.

    Returns after a Shutdown message, or when the engine is gone.
    """
    # A supervisor signals the whole process group, but the parent leads the shutdown: running edits must finish first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()  # also a worker that hangs in a kernel must not outlive a killed engine
    settings = msgspec.msgpack.decode(config, type=WorkerConfig)
    link = EngineLink(Channel.attach(fds[0], fds[1]))
    with suppress(PeerClosedError):
        try:
            ids = settings.arena_id, settings.page_arena_id, settings.value_arena_id
            arenas = [Arena.attach(number, fd) for number, fd in zip(ids, fds[2:5], strict=True)]
            sockets = PeerSockets(fds[5], fds[6:]) if fds[5:] else None
            with closing(_start(settings, link, arenas, sockets)) as worker:
                worker.run()
        except PeerClosedError:
            raise  # there is no engine to report to
        except Exception as error:  # the process's outermost handler: report to the engine why the worker failed
            link.send(WorkerFailed(rank=settings.rank, failure=Failure.of(error, traceback.format_exc())))


def _start(settings: WorkerConfig, link: EngineLink, arenas: Sequence[Arena], sockets: PeerSockets | None) -> Worker:
    """Load the models, run every op once, measure, and report ready. arenas: of pictures, pages and values."""
    arena, page_arena, value_arena = arenas
    num_threads = settings.models[0].threads or default_threads(settings.num_workers)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)
    for cache, capacity in CACHED_OPERATORS.items():
        os.environ.setdefault(cache, str(capacity))
    os.environ.setdefault("TRITON_CACHE_DIR", str(user_cache_folder(os.environ) / "triton"))
    if any(model.kernels == "compile" for model in settings.models):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache_folder(os.environ) / "inductor"))
    # Importing diffusers creates this folder, by default one that is left behind; nothing is compiled into it.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    gc.disable()  # otherwise a quarter of the libraries' import time goes to collections that find nothing
    from model_executor.checkpoint.libraries import quiet_libraries
    from model_executor.page_cache.page_store import PageStore
    from model_executor.parallel.groups import Groups
    from model_executor.weights.taking import TakenWeights
    from model_executor.worker.adapter_loader import AdapterLoader
    from model_executor.worker.component_loader import ComponentLoader
    from model_executor.worker.cost_probe import known_or_probed
    from model_executor.worker.exchange import Exchange
    from model_executor.worker.loader_thread import LoaderThread
    from model_executor.worker.memory_probe import device_page_bytes, gauge_of, room_for
    from model_executor.worker.ops.context import WorkerContext
    from model_executor.worker.resident import ResidentModels, set_threads
    from model_executor.worker.runner import Runner
    from model_executor.worker.tensor_store import TensorStore

    gc.freeze()  # what was imported stays; full collections of the running worker do not walk it
    gc.enable()
    set_threads(num_threads)
    quiet_libraries()
    models = ResidentModels.open(
        settings.models,
        has_device_tier=settings.cache.device_bytes != 0,
        device_index=settings.device_index,
        num_workers=settings.num_workers,
    )
    budget = settings.scheduler.model_bytes
    check_fits({name: keys.values() for name, keys in models.keys.items()}, models.sizes, budget)
    gauge, taken = gauge_of(models.device), TakenWeights(settings.keeper) if settings.keeper else None
    thread = LoaderThread()
    loader = ComponentLoader(settings.rank, models, link.report, thread, taken)
    with room_for("the model", CPU_REMEDIES if models.device.type == "cpu" else REMEDIES):
        loader.load_first()
        models.warm_up()
    ready = models.ready(settings.rank)
    page_bytes = device_page_bytes(
        gauge,
        models.loaded_families,
        ready.models,
        settings.cache,
        settings.scheduler,
        bytes_to_come(ready.sizes, ready.components, budget),
    )
    ready = msgspec.structs.replace(ready, device_page_bytes=page_bytes)
    if settings.measures_costs:
        kernels = {model.name: model.kernels for model in settings.models}
        samples = known_or_probed(models.loaded_families, ready.models, user_cache_folder(os.environ), kernels)
        ready = msgspec.structs.replace(ready, samples=samples)
    store = TensorStore(settings.rank, models.device, value_arena)
    files = _page_files(settings.cache)
    pages = PageStore(
        models.device, page_arena, files, link.report, settings.rank, has_device_tier=ready.device_page_bytes > 0
    )
    exchange = Exchange(store, sockets)
    groups = None if sockets is None else Groups(settings.rank, settings.group_seconds)
    ready = msgspec.structs.replace(ready, port=groups.port if groups else 0)
    adapters = AdapterLoader(settings.rank, models, link.report, thread)
    context = WorkerContext(models.families, store, arena, pages, models.prompts_of, exchange, adapters.wait)
    runner = Runner(settings.rank, context, groups)
    link.send(ready)
    return Worker(settings.rank, link, loader, store, pages, runner, exchange, adapters)


def _page_files(cache: CacheConfig) -> PageFiles | None:
    """The disk tier, None if it is off."""
    from model_executor.page_cache.page_files import PageFiles

    if cache.disk_bytes <= 0:
        return None
    return PageFiles(page_folder(cache.directory, os.environ), cache.disk_bytes)


def default_threads(num_workers: int) -> int:
    """An equal share of the available cores, less one, which is left to the server's other processes.

    Threads of one operator wait for each other at its end, so one core that is shared with a busy process stalls all of
    them: beside another process on 2 cores, a step took 2 to 10 times as long with 2 threads as with 1.
    """
    return max(1, (len(os.sched_getaffinity(0)) - 1) // num_workers)


class EngineLink:
    """The channel to the engine, shared by the worker's threads: a lock keeps their messages apart."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    def send(self, message: FromWorker) -> None:
        """Send a message. A result that cannot be encoded fails its own request. Raises PeerClosedError when the engine
        is gone."""
        try:
            payload = encode(message)
        except MessageError as error:
            logger.error("%s", error, extra=of_request(""))
            if not isinstance(message, BatchResult):
                raise
            payload = encode(sendable_result(message))
        with self._sending:
            self._channel.send(payload)

    def report(self, message: PageCopied | ModelLoaded | ModelFailed | AdapterLoaded) -> None:
        """`send` for other threads, which leave it to the main thread to notice that the engine is gone."""
        with suppress(PeerClosedError):
            self.send(message)

    def recv(self) -> bytes:
        """The engine's next message. Main thread only. Raises PeerClosedError when the engine is gone."""
        return self._channel.recv()


class Worker:
    """The worker's loop: executes one plan after the other, and sends each batch's result as soon as it is done."""

    def __init__(
        self,
        rank: int,
        link: EngineLink,
        loader: ComponentLoader,
        store: TensorStore,
        pages: PageStore,
        runner: Runner,
        exchange: Exchange,
        adapters: AdapterLoader,
    ) -> None:
        self._rank = rank
        self._link = link
        self._loader = loader
        self._store = store
        self._pages = pages
        self._runner = runner
        self._exchange = exchange
        self._adapters = adapters
        self._decoder: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)
        self._withheld = WithheldItems()

    def run(self) -> None:
        """Do as the engine says, until a Shutdown. Raises PeerClosedError when the engine is gone, and errors that do
        not belong to one request, such as a tensor to move that is missing."""
        while not isinstance(message := self._next(), Shutdown):
            match message:
                case StepPlan():
                    self._execute(message)
                case LoadAdapter():
                    self._adapters.load(message)
                case DropAdapter():
                    self._adapters.drop(message)

    def _next(self) -> ToWorker:
        """The next message. Of a plan that cannot be decoded, the part that can be executed; if there is none, skips
        it."""
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
        """End the I/O thread; queued copies are dropped, and no load is waited for."""
        self._pages.close()
        self._exchange.close()

    def _execute(self, plan: StepPlan) -> None:
        """Execute a plan in the order that StepPlan defines."""
        for free in plan.free:
            self._store.free(free.key)
        for component in plan.unload:
            self._loader.unload(component)
        for component in plan.load:
            self._loader.load(component)
        self._pages.forget(each.key for each in plan.forget)
        self._pages.delete(plan.delete)
        for copy in plan.copies:
            self._pages.start(copy)
        self._exchange.begin_plan(plan.seq, plan.deliveries, plan.batches)
        for transfer in plan.transfers:
            self._link.send(TransferDone(rank=self._rank, ref=self._store.export(transfer.ref)))
        for batch in plan.batches:
            result = self._runner.run(batch)
            self._exchange.end_batch(batch)
            self._link.send(self._withheld.complete(result))
