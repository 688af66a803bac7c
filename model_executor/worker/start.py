"""Starts a worker: loads its models, runs every op once, measures, and reports ready.

Importing this module imports PyTorch, which reads its settings once: `worker.py` makes them before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from core.cache_folder import page_folder, user_cache_folder
from core.config import CacheConfig
from core.ipc.limits import memory_limit
from core.ipc.peer_sockets import PeerSockets
from core.ipc.shared_array import Arena
from core.memory_budget import CPU_REMEDIES, REMEDIES, Room, bytes_to_come, check_fits
from core.messages.worker import WorkerConfig, WorkerReady
from model_executor.checkpoint.libraries import quiet_libraries
from model_executor.page_cache.page_files import PageFiles
from model_executor.page_cache.page_store import PageStore
from model_executor.parallel.groups import Groups
from model_executor.weights.taking import TakenWeights
from model_executor.worker.engine_link import EngineLink
from model_executor.worker.loading.adapter_loader import AdapterLoader, adapter_bytes
from model_executor.worker.loading.class_loader import ClassLoader
from model_executor.worker.loading.component_loader import ComponentLoader
from model_executor.worker.loading.loader_thread import LoaderThread
from model_executor.worker.loading.resident import ResidentModels, set_threads
from model_executor.worker.loading.weights_room import WeightsRoom
from model_executor.worker.loading.workflow_loader import WorkflowLoader
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.orders import Orders
from model_executor.worker.probes.cost_probe import known_or_probed
from model_executor.worker.probes.memory_probe import Gauge, device_page_bytes, gauge_of, room_for
from model_executor.worker.probes.offload_price import log_offload_price
from model_executor.worker.runner import Runner
from model_executor.worker.stores.exchange import Exchange
from model_executor.worker.stores.tensor_store import TensorStore
from model_executor.worker.stores.time_limits import TimeLimits
from model_executor.worker.stores.user_classes import UserClasses
from model_executor.worker.worker import Worker


def start(
    settings: WorkerConfig, link: EngineLink, arenas: Sequence[Arena], sockets: PeerSockets | None, num_threads: int
) -> Worker:
    """A worker that has reported ready. arenas: of pictures, pages and values. sockets: None in an engine of one rank.
    Raises StencilError for a model that cannot be served.
    """
    arena, page_arena, value_arena = arenas
    set_threads(num_threads)
    quiet_libraries()
    classes = UserClasses(settings.classes, {each.name: each.class_names for each in settings.workflows})
    models = _opened(settings)
    limits = TimeLimits(settings.rank, link.report)
    class_loader = ClassLoader(classes, models.device, limits)
    gauge = gauge_of(models.device)
    in_turns = settings.scheduler.model_bytes > 0
    host = Room.of_offloaded(memory_limit(), settings.num_workers)
    room = WeightsRoom(models, _room(gauge, settings.cache), host, is_shared_in_turns=in_turns)
    room.check_models()
    thread = LoaderThread(models.device)
    taken = TakenWeights(settings.keeper) if settings.keeper else None
    loader = ComponentLoader(settings.rank, models, room, link.report, thread, taken, class_loader)
    ready = _loaded(settings, models, loader, gauge)
    store = TensorStore(settings.rank, models.device, value_arena)
    pages = PageStore(
        models.device,
        page_arena,
        _page_files(settings.cache),
        link.report,
        settings.rank,
        has_device_tier=ready.device_page_bytes > 0,
    )
    orders = Orders(link)
    exchange = Exchange(store, sockets, orders.newly_come)
    groups = None if sockets is None else Groups(settings.rank, settings.group_seconds, models.device)
    adapters = AdapterLoader(settings.rank, models, link.report, thread, adapter_bytes(settings.num_workers))
    waiting, finders = adapters.wait, models.segmenters.finders
    used = models.families, store, arena, pages, models.prompts_of, exchange, waiting, finders, classes, limits
    context = WorkerContext(*used, models.controlnets.nets)
    runner = Runner(settings.rank, context, groups)
    link.send(msgspec.structs.replace(ready, port=groups.port if groups else 0))
    workflows = WorkflowLoader(settings.rank, classes, class_loader, link.report, thread)
    return Worker(settings.rank, link, orders, loader, context, runner, adapters, workflows)


def _opened(settings: WorkerConfig) -> ResidentModels:
    """The models, without their weights. Raises ConfigError for one whose weights exceed --model-bytes."""
    models = ResidentModels.open(
        settings.models,
        has_device_tier=settings.cache.device_bytes != 0,
        device_index=settings.device_index,
        num_workers=settings.num_workers,
        model_bytes=settings.scheduler.model_bytes,
        workflows=settings.workflows,
    )
    keys = {name: models.needs(name) for name in models.keys}
    check_fits(keys, models.sizes, settings.scheduler.model_bytes)
    return models


def _room(gauge: Gauge | None, cache: CacheConfig) -> Room:
    """What weights may take of the device; of a CPU, which has no gauge, all its memory."""
    return Room.of_host(memory_limit()) if gauge is None else Room.of_device(gauge.total, cache.gpu_memory_utilization)


def _loaded(
    settings: WorkerConfig, models: ResidentModels, loader: ComponentLoader, gauge: Gauge | None
) -> WorkerReady:
    """Load what is served from the start, and measure how much memory that leaves and what batches cost."""
    with room_for("the model", CPU_REMEDIES if models.device.type == "cpu" else REMEDIES):
        loader.load_first()
        models.warm_up()
    models.log_dtypes()
    log_offload_price(models.loaded_families)
    ready = models.ready(settings.rank)
    page_bytes = device_page_bytes(
        gauge,
        models.loaded_families,
        ready.models,
        settings.cache,
        settings.scheduler,
        bytes_to_come(ready.sizes, ready.components, settings.scheduler.model_bytes, models.in_turn),
        models.controlnets.nets,
    )
    samples = ready.samples
    if settings.measures_costs:
        configs = {model.name: model for model in settings.models}
        samples = known_or_probed(models.loaded_families, ready.models, user_cache_folder(os.environ), configs)
    return msgspec.structs.replace(ready, device_page_bytes=page_bytes, samples=samples)


def _page_files(cache: CacheConfig) -> PageFiles | None:
    """The disk tier, None if it is off."""
    if cache.disk_bytes <= 0:
        return None
    return PageFiles(page_folder(cache.directory, os.environ), cache.disk_bytes)
