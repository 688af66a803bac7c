"""Services: the parts of an AsyncEngine that its sessions use. Sessions get this record, never the engine itself."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import msgspec

from core.config import EngineConfig, StencilConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena
from engine.client.admission.admission_controller import AdmissionController
from engine.client.processes.keeper_process import KeeperProcess, needs_keeper
from engine.client.processes.worker_launcher import needs_launcher, worker_launcher
from engine.client.recall.kept_states import KeptStates
from engine.client.resolve.mask_ratios import MaskRatios
from engine.client.resolve.served_models import ServedModels
from engine.client.sessions.client_arena import ClientArena
from engine.client.sessions.running_sessions import RunningSessions
from engine.client.templates.template_registry import TemplateRegistry
from engine.client.templates.template_store import TemplateStore
from engine.images.image_pool import ImagePool
from engine.observability.metrics import Metrics
from engine.router.engine_backend import Cluster, EngineBackend
from engine.router.engines import Engines
from engine.router.local_backend import LocalBackend
from engine.router.router import Router


@dataclass(frozen=True, slots=True)
class Services:
    """Made by `AsyncEngine.start`, one per engine."""

    config: StencilConfig  # from the server's flags; limits that the engines measured are in `served`
    metrics: Metrics
    served: ServedModels  # the models, once the engines are ready
    sessions: RunningSessions  # all running edits and templates
    arena: ClientArena  # all shared memory of sessions
    images: ImagePool  # decodes uploads, encodes files
    engines: Engines
    router: Router  # sends requests to the engines
    templates: TemplateRegistry  # registered templates and their pages
    states: KeptStates  # of pictures, for approximate caching
    admission: AdmissionController  # admits or refuses requests
    mask_ratios: MaskRatios  # of masks that were found
    keeper: KeeperProcess | None  # loads weights for the engines' workers; None: each loads its own
    launcher: ExitStack  # closed when no engine needs the process any more that forks workers

    @classmethod
    def create(
        cls,
        config: StencilConfig,
        metrics: Metrics,
        served: ServedModels,
        sessions: RunningSessions,
        templates: TemplateStore,
    ) -> Services:
        """Make all services; starts no process but the launcher of workers, which takes longest to start. Raises
        ConfigError if there is no room for the arena."""
        arena = ClientArena(config.shared_bytes)
        states = KeptStates(config.approximate_cache_bytes, arena)
        is_needed = config.engine.num_local > 0  # other machines have their own
        keeper = KeeperProcess() if is_needed and needs_keeper(config.engine) else None
        with ExitStack() as stack:  # the launcher ends unless all are made
            address = stack.enter_context(worker_launcher.used()) if is_needed and needs_launcher(config.engine) else ""
            engine = msgspec.structs.replace(
                config.engine,
                keeper="" if keeper is None else keeper.address,
                launcher=address,
            )
            backend = _backend(engine, arena.shared)
            cluster = cast(Cluster, backend) if engine.follows_cluster else None  # RayBackend is one
            router = Router(msgspec.structs.replace(config, engine=engine), backend, metrics, cluster)
            return cls(
                config=config,
                metrics=metrics,
                served=served,
                sessions=sessions,
                arena=arena,
                images=ImagePool(config.image, arena.shared),
                engines=router.engines,
                router=router,
                templates=TemplateRegistry(templates, served, router, states),
                states=states,
                admission=AdmissionController(config, sessions, router, metrics),
                mask_ratios=MaskRatios(),
                keeper=keeper,
                launcher=stack.pop_all(),
            )


def _backend(config: EngineConfig, arena: Arena) -> EngineBackend:
    """What starts the engines. Raises ConfigError."""
    if config.data_parallel_backend == "mp":
        return LocalBackend(arena)
    try:
        from engine.cluster.ray_backend import RayBackend  # optional, and slow to import
    except ModuleNotFoundError as error:
        raise ConfigError("--data-parallel-backend ray needs Ray: pip install 'stencil-serve[ray]'") from error
    return RayBackend(config, arena)
