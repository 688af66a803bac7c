"""Settings of a server, parsed once from flags and never changed. Facts learnt at start-up are in Ready messages.

All are msgspec Structs, because child processes receive them as msgpack. They are also the arguments of an ImageEngine:
a value of the wrong type, or a number out of range, raises InvalidRequestError that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from core.control_type import ControlType
from core.errors import ConfigError, InvalidRequestError
from core.graph.workflow import Workflow
from core.run_class import RunClass
from core.sampler_defaults import LEFT_OPEN, SamplerDefaults
from core.skip_level import SkipLevel
from core.step_schedule import StepScheduleName
from core.validation import check_choice, check_decimal, check_integer, check_matches, conform

DataParallelBackend = Literal["mp", "ray"]
"""What starts engines. mp: this process, on its machine. ray: a Ray cluster, on the machines that it finds room on."""

Quantization = Literal["none", "torchao-int8", "bitsandbytes-8bit", "bitsandbytes-4bit"]
"""How a transformer's weights are quantised while they are loaded: package and format."""

CudaGraphs = Literal["auto", "off"]
"""Whether steps on a GPU are captured as CUDA graphs. auto: mask-aware steps and UNet steps of one request, and exact
steps of one request for small pictures; off: none."""

Offload = Literal["none", "host"]
"""Weights that lie in host memory between uses. host: those of text encoders and VAEs; none: none."""

KernelChoice = Literal["auto", "torch", "compile"]
"""Kernels of denoisers and VAEs. auto: the fastest for the device; torch: PyTorch's operators only; compile: as auto,
with a UNet's layers compiled by `torch.compile`, which takes minutes at the first start."""

EMBEDDED_NAME = "stencil-embedded"
"""The name that the embedded model is served under, unless another one is given."""

EMBEDDED_MODEL = str(Path(__file__).resolve().parent.parent / "model_executor" / "embedded")

EMBEDDED_SEGMENTER = f"{EMBEDDED_MODEL}_segmenter"
EMBEDDED_EDGES = f"{EMBEDDED_MODEL}_edges"

NO_SEGMENTER = "none"

MAX_CACHE_BYTES = 2**46
"""Largest address space of a process."""

MAX_ENGINES = 256
"""Most engines of a server."""


class AdapterConfig(msgspec.Struct, frozen=True):
    """A LoRA adapter."""

    name: str  # by which requests choose it
    path: str  # a safetensors file, or a folder with one
    defaults: SamplerDefaults = LEFT_OPEN  # go before those of its file

    def __post_init__(self) -> None:
        conform(self)


class ControlNetConfig(msgspec.Struct, frozen=True):
    """A ControlNet of a model. Raises InvalidRequestError for a mode that is no number from 0."""

    name: str  # by which requests choose it, if it has no types
    path: str  # a directory in the diffusers layout, or a Hugging Face hub id
    # Of one for several kinds of pictures: the control type by which requests choose it for each -> its mode.
    types: dict[str, int] = {}

    def __post_init__(self) -> None:
        conform(self)
        for mode in self.types.values():
            check_integer("types", mode, 0, 1024)

    @property
    def controls(self) -> dict[str, ControlType]:
        """Control type -> what it stands for."""
        types = {name: ControlType(self.name, mode) for name, mode in self.types.items()}
        return types or {self.name: ControlType(self.name)}


class RequestDefaults(SamplerDefaults, frozen=True, kw_only=True):
    """What requests to a model leave open; None: as its checkpoint or family says."""

    refiner_start: float | None = None  # for a model with a refiner


REFINER_ROLES = ("refiner", "refiner_vae", "refiner_text_encoder")
"""The roles of the workflow `refined` that another model plays."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint a worker loads, and how. Set by flags. Raises ConfigError for names that are not unique."""

    # The checkpoint.
    model: str = EMBEDDED_MODEL  # a diffusers directory or a Hugging Face hub id
    served_model_name: str = ""  # model id that clients see; "" = `model`
    variant: str = ""  # of weight files, such as fp16, for parts that have it; "" = unnamed files, else the only ones
    # Computing.
    dtype: str = "auto"  # auto, float32, bfloat16 or float16
    quantization: Quantization = "none"  # of the denoiser's linear layers; products are computed in dtype
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    kernels: KernelChoice = "auto"
    cuda_graphs: CudaGraphs = "auto"
    offload: Offload = "none"
    # On a GPU, a picture's bits depend neither on what shares its steps nor on the number of ranks that compute them.
    batch_invariant: bool = False
    threads: int = 0  # CPU threads per worker, 0..1024; 0 = its share of all cores but one
    # Mask-aware execution.
    mask_aware: bool = True  # whether edits may skip untouched tokens
    cache_keyframes: str = "auto"  # auto (the calibration's, else 5), per-step, or 2..64 evenly over noise levels 0..1
    cache_dtype: str = "auto"  # of pages: auto (the calibration's, else int8), int8, bfloat16 or float32
    priming_prompt: str = ""  # prompt with which templates are primed
    # Adapters.
    adapters: tuple[AdapterConfig, ...] = ()  # served beside the model itself
    # Masks without drawing: directories or hub ids of the checkpoints that find them; one that reads points and boxes
    # beside one that finds boxes for words; ("none",): none. (): the embedded one, for the embedded model.
    segmenter: tuple[str, ...] = ()
    controlnets: tuple[ControlNetConfig, ...] = ()  # (): its own one, for the embedded model
    # Its requests.
    workflow: str = ""  # that serves them all; "": the first of `core.graph.catalog` that takes what a request gives
    refiner: str = ""  # name of another model, which makes their last steps: it plays the REFINER_ROLES
    roles: dict[str, str] = {}  # further role of a workflow -> name of another model that plays it
    defaults: RequestDefaults = RequestDefaults()

    def __post_init__(self) -> None:
        conform(self)
        if self.refiner and (twice := next((role for role in REFINER_ROLES if role in self.roles), None)):
            raise InvalidRequestError(f"Invalid 'roles': {twice} is the refiner's, which is given too.", param="roles")
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice("cache_dtype", self.cache_dtype, ("auto", "int8", "bfloat16", "float32"))
        check_matches("device", self.device, r"auto|cpu|cuda(:[0-9]+)?", "auto, cpu, cuda or cuda:N")
        keyframes = "auto, per-step or a number from 2 to 64"
        check_matches("cache_keyframes", self.cache_keyframes, r"auto|per-step|0?[2-9]|[1-5][0-9]|6[0-4]", keyframes)
        check_integer("threads", self.threads, 0, 1024)
        if self.batch_invariant and self.kernels != "auto":
            raise ConfigError(
                f"--batch-invariant cannot hold with --kernels {self.kernels}, whose products sum in another order for "
                "other numbers of rows; give --kernels auto, or leave --batch-invariant out"
            )
        if self.batch_invariant and self.quantization != "none" and self.device != "cpu":
            raise ConfigError(
                f"--batch-invariant cannot hold with --quantization {self.quantization}, whose products sum in another "
                "order for other numbers of rows; give --quantization none, or leave --batch-invariant out"
            )
        if NO_SEGMENTER in self.segmenter and len(self.segmenter) > 1:
            raise InvalidRequestError(f"Invalid 'segmenter': {NO_SEGMENTER} is given beside others.", param="segmenter")
        names = [self.name, *(adapter.name for adapter in self.adapters)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"--lora {twice}: adapters need names of their own, other than the model's")
        types = [name for each in self.steering for name in each.controls]
        if twice := next((name for name in types if types.count(name) > 1), None):
            raise InvalidRequestError(f"Invalid 'controlnets': two have a control type {twice}.", param="controlnets")

    @property
    def segmenter_checkpoints(self) -> tuple[str, ...]:
        """The checkpoints of its segmenter; (): it has none."""
        if self.segmenter:
            return () if self.segmenter == (NO_SEGMENTER,) else self.segmenter
        return (EMBEDDED_SEGMENTER,) if self.model == EMBEDDED_MODEL else ()

    @property
    def steering(self) -> tuple[ControlNetConfig, ...]:
        """Its ControlNets."""
        own = (ControlNetConfig("edges", EMBEDDED_EDGES),) if self.model == EMBEDDED_MODEL else ()
        return self.controlnets or own

    @property
    def controls(self) -> dict[str, ControlType]:
        """Control type -> what it stands for, of all its ControlNets."""
        return {name: control for each in self.steering for name, control in each.controls.items()}

    @property
    def players(self) -> dict[str, str]:
        """Role of a workflow -> name of the model that plays it instead of this one."""
        return self.roles | (dict.fromkeys(REFINER_ROLES, self.refiner) if self.refiner else {})

    def key_of(self, role: str) -> str:
        """The setting that says who plays a role, for an error's text."""
        return "refiner" if self.refiner and role in REFINER_ROLES else f"roles.{role}"

    @property
    def name(self) -> str:
        """The model id that clients see."""
        if self.served_model_name:
            return self.served_model_name
        return EMBEDDED_NAME if self.model == EMBEDDED_MODEL else self.model


SchedulingPolicyName = Literal["default", "neustream", "ddit", "lego"]
"""Policies that decide what runs together, see core.scheduling.policies. A user's own has an import path instead."""

OnLate = Literal["drop", "last"]
"""What becomes of requests that are predicted to miss the latency objective. drop: they end with an error; last: they
are served when no other needs the rank."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one iteration of the scheduler. Set by flags."""

    policy: str = "default"  # a SchedulingPolicyName, or a class by its import path, `module:Class`
    on_late: OnLate = "drop"
    max_num_seqs: int = 8  # requests in a step: the number of slots, 1..4096
    max_num_batched_tokens: int = 65536  # active image tokens plus text tokens in a step's batch
    max_stage_ms: float = 20.0  # predicted encoding and decoding that may delay a step; a single item always may
    max_plans_in_flight: int = 2  # per worker, the running one included; above 1 hides round trips behind computing
    # Another plan is sent to a busy worker once what is left of its work is predicted to take less. New requests that
    # come in that time wait for that plan's step, too. 0: none is sent.
    max_ahead_ms: float = 10.0
    # Ranks that compute each step together, as far as so many live and its pages are in host memory. 1: the policy
    # chooses.
    degree: int = 1
    max_degree: int = 64  # most ranks that compute a step together where `degree` is 1
    model_bytes: int = 0  # weights that each worker may hold; 0: no limit
    max_retries: int = 2  # how often an image is run again after the engine or worker that ran it has died

    def __post_init__(self) -> None:
        conform(self)
        if ":" not in self.policy:
            check_choice("policy", self.policy, get_args(SchedulingPolicyName))
        check_integer("max_num_seqs", self.max_num_seqs, 1, 4096)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**31)
        check_decimal("max_stage_ms", self.max_stage_ms, 0, 60000)
        check_integer("max_plans_in_flight", self.max_plans_in_flight, 1, 64)
        check_integer("degree", self.degree, 1, 64)
        check_integer("max_degree", self.max_degree, 1, 64)
        check_integer("max_retries", self.max_retries, 0, 100)
        check_decimal("max_ahead_ms", self.max_ahead_ms, 0)
        check_integer("model_bytes", self.model_bytes, 0, MAX_CACHE_BYTES)


CacheScope = Literal["owner", "server"]
"""Which requests share cached results: those of the same API key, or all."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the activation cache, per engine, and what it keeps. Set by flags. Raises ConfigError for a share out of
    range.
    """

    # Sizes.
    device_bytes: int | None = None  # of each worker's device; 0: none; None: what is left of gpu_memory_utilization
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory for weights, batches and pages; above 0, at most 1
    host_bytes: int = 4 * 1024**3  # shared memory for pages
    disk_bytes: int = 0  # files in `directory`, shared by all engines that use the same folder; 0 = none
    directory: str = ""  # "" = stencil/pages in the user's cache folder
    # Policy.
    admission: Literal["always", "manual"] = "always"  # keep the pages of all edits, or of registered templates only
    block_plan: Literal["off", "auto"] = "off"  # auto: may compute leading blocks in full while pages are loaded
    scope: CacheScope = "owner"

    def __post_init__(self) -> None:
        conform(self)
        for name in ("host_bytes", "disk_bytes"):
            check_integer(name, getattr(self, name), 0, MAX_CACHE_BYTES)
        if self.device_bytes is not None:
            check_integer("device_bytes", self.device_bytes, 0, MAX_CACHE_BYTES)
        if not 0 < self.gpu_memory_utilization <= 1:
            share = f"{self.gpu_memory_utilization:g}"
            raise ConfigError(f"--gpu-memory-utilization {share} is no share: above 0, at most 1")

    def salt(self, owner: str) -> str:
        """The part of all cache keys that depends on the owner: requests with the same salt share cached results.
        owner: digest of an API key, "" if the server requires none.
        """
        return owner if self.scope == "owner" else ""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engines: their models, scheduler and workers; or one of them, see `of_engine`. Set by flags. Raises
    ConfigError for several workers with a single GPU, for models whose names are not unique, or that ask for different
    devices or threads, for `engines` that do not exist, or leave a model out, and for numbers of engines that their
    backend cannot have.
    """

    # Parts.
    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    engines: dict[int, tuple[str, ...]] = {}  # number of an engine -> names of its models; others have all
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    # Processes.
    workers_per_engine: int = 1
    data_parallel_size: int = 1  # engines; 0: as many as the cluster has room for
    data_parallel_backend: DataParallelBackend = "mp"  # what starts them: processes of this machine, or a Ray cluster
    data_parallel_size_local: int = 0  # with Ray: the first so many are processes of this machine all the same
    ray_address: str = "auto"  # of the cluster, see `ray.init`
    machine: str = ""  # id of the machine that this engine is on, given by the cluster; "": any that has room
    data_parallel_rank: int = 0  # number of this engine among them; set by the process that starts it
    # Set for engines of other machines, which see no GPUs but their own: how many engines share the machine's cores.
    # None: it is of the API server's machine.
    local_size: int | None = None
    # Of users. The classes that nodes of the op `run` compute with, and the workflows of such nodes.
    classes: tuple[RunClass, ...] = ()
    workflows: tuple[Workflow, ...] = ()
    # Time limits.
    drain_seconds: float = 60.0  # for requests to finish at shutdown
    # An engine without a sign of life for this long is killed, and a worker without an answer for this long and for 20
    # times the predicted time of its work.
    hang_seconds: float = 10.0
    start_seconds: float = 1800.0  # an engine that does not serve after this long is killed
    # Weights.
    keeper: str = ""  # address of the process that loads and keeps weights, set by the process that starts it
    launcher: str = ""  # address of the process that forks workers, set likewise; "": the engine spawns them
    # Tracing.
    otlp_traces_endpoint: str = ""  # URL that spans are sent to; "" = no tracing

    def __post_init__(self) -> None:
        conform(self)
        check_integer("workers_per_engine", self.workers_per_engine, 1, 64)
        check_integer("data_parallel_size", self.data_parallel_size, 0, MAX_ENGINES)
        check_integer("data_parallel_size_local", self.data_parallel_size_local, 0, MAX_ENGINES)
        check_matches("ray_address", self.ray_address, r"auto|[^/\s]+:[0-9]{1,5}", "auto or HOST:PORT")
        self._check_sizes()
        check_integer("data_parallel_rank", self.data_parallel_rank, 0, self.most_engines - 1)
        for name in ("drain_seconds", "hang_seconds", "start_seconds"):
            check_decimal(name, getattr(self, name), 0)
        if self.scheduler.degree > self.workers_per_engine:
            raise ConfigError(
                f"--degree {self.scheduler.degree} needs as many workers: give --workers-per-engine "
                f"{self.scheduler.degree} or more"
            )
        _check_models(self.models)
        self._check_engines()
        names = [each.name for each in self.classes]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"classes: two are called {twice}; give each a name of its own")
        numbered = next((model.device for model in self.models if ":" in model.device), None)
        if numbered and self.num_workers > 1:
            raise ConfigError(
                f"--device {numbered} is one device, and each worker takes one of its own; give --device "
                f"{numbered.partition(':')[0]}, or one engine with one worker"
            )

    def _check_sizes(self) -> None:
        """Raises ConfigError for numbers of engines that their backend cannot have."""
        local, size = self.data_parallel_size_local, self.data_parallel_size
        if self.follows_cluster and self.data_parallel_backend != "ray":
            raise ConfigError("--data-parallel-size auto follows a Ray cluster; give --data-parallel-backend ray")
        if self.follows_cluster and local:
            raise ConfigError("--data-parallel-size auto places all engines; leave --data-parallel-size-local out")
        if self.follows_cluster and self.engines:
            raise ConfigError(
                "engines: with --data-parallel-size auto all engines have all models; leave `engines` out"
            )
        if local > size:
            raise ConfigError(f"--data-parallel-size-local {local} is more than --data-parallel-size {size}")
        if self.data_parallel_backend == "mp" and local not in (0, size):
            raise ConfigError(
                f"--data-parallel-size-local {local}: without --data-parallel-backend ray all {size} engines are on "
                "this machine"
            )

    def _check_engines(self) -> None:
        """Raises ConfigError for engines and models that do not exist, and for a model that no engine has."""
        names = [model.name for model in self.models]
        for number, listed in self.engines.items():
            if not 0 <= number < self.data_parallel_size:
                raise ConfigError(
                    f"engines: {number}: there are {self.data_parallel_size} engines, numbered from 0; give "
                    f"--data-parallel-size {number + 1} or more, or another number"
                )
            if not listed:
                raise ConfigError(f"engines: {number}: it has no model; name one, or leave the engine out: it has all")
            if unknown := next((name for name in listed if name not in names), None):
                raise ConfigError(f"engines: {number}: there is no model {unknown}; there are {', '.join(names)}")
        had = {model.name for rank in range(self.most_engines) for model in self.models_of(rank)}
        if without := next((name for name in names if name not in had), None):
            raise ConfigError(f"engines: no engine has the model {without}; add it to one of them")

    def models_of(self, rank: int) -> tuple[ModelConfig, ...]:
        """The models of an engine: those that are listed for it, and those that play roles for these."""
        if rank not in self.engines:
            return self.models
        by_name, names = {model.name: model for model in self.models}, dict.fromkeys(self.engines[rank])
        waiting = list(names)
        while waiting:
            players = [name for name in by_name[waiting.pop()].players.values() if name not in names]
            names |= dict.fromkeys(players)
            waiting += players
        return tuple(model for model in self.models if model.name in names)

    def of_engine(self, rank: int) -> EngineConfig:
        """The configuration of one of the engines."""
        return msgspec.structs.replace(self, models=self.models_of(rank), engines={}, data_parallel_rank=rank)

    @property
    def follows_cluster(self) -> bool:
        """Whether there are as many engines as the cluster has room for."""
        return not self.data_parallel_size

    @property
    def most_engines(self) -> int:
        """Engines, or the most that there may be at once; they are numbered from 0."""
        return self.data_parallel_size or MAX_ENGINES

    @property
    def num_local(self) -> int:
        """Engines that are processes of the API server's machine."""
        return self.data_parallel_size if self.data_parallel_backend == "mp" else self.data_parallel_size_local

    @property
    def num_workers(self) -> int:
        """Workers of all engines on this machine."""
        return self.workers_per_engine * (self.num_local if self.local_size is None else self.local_size)

    def device_index(self, rank: int) -> int:
        """Number of a worker of this engine among all that it shares GPUs with: the GPU that it uses unless one is
        configured."""
        number = self.data_parallel_rank if self.local_size is None else 0
        return self.workers_per_engine * number + rank


def _check_models(models: Sequence[ModelConfig]) -> None:
    """Raises ConfigError for models that no engine can serve together."""
    if not models:
        raise ConfigError("an engine needs at least one model")
    names = [name for model in models for name in (model.name, *(adapter.name for adapter in model.adapters))]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two models or adapters are called {twice}; give each a name of its own (--model NAME=...)")
    for model in models:
        _check_players(model, models)
    for flag in ("device", "threads"):
        if len({getattr(model, flag) for model in models}) > 1:
            raise ConfigError(f"all models of an engine have the same {flag}; give it once, as --{flag}")


def _check_players(model: ModelConfig, models: Sequence[ModelConfig]) -> None:
    """Raises ConfigError for a role of this model that none of these can play."""
    others = {other.name: other for other in models if other.name != model.name}
    adapters = {adapter.name for other in models for adapter in other.adapters}
    for role, name in model.players.items():
        where = f"{model.name}: {model.key_of(role)}"
        if name == model.name:
            raise ConfigError(f"{where}: {name} is this model itself; name another one, or leave it out")
        if name in adapters:
            raise ConfigError(f"{where}: {name} is an adapter; name a model")
        if name not in others:
            raise ConfigError(f"{where}: there is no model {name}; there are {', '.join(others) or 'no others'}")
        if way := _way_back(name, model.name, others):
            raise ConfigError(f"{where}: models play roles for each other in a circle: {' -> '.join(way)}")


def _way_back(name: str, to: str, models: Mapping[str, ModelConfig]) -> list[str]:
    """Names of models from one to another, each of which plays a role for the one before; [] if there is no way."""
    ways, seen = [[to, name]], {name}
    while ways:
        way = ways.pop()
        for player in dict.fromkeys(models[way[-1]].players.values()):
            if player == to:
                return [*way, to]
            if player in models and player not in seen:
                seen.add(player)
                ways.append([*way, player])
    return []


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The image processors and their limits. Set by flags."""

    image_workers: int = 2  # processes
    max_upload_bytes: int = 50 * 1024 * 1024  # per file
    max_pixels: int = 64 * 1024 * 1024  # per file

    def __post_init__(self) -> None:
        conform(self)
        check_integer("image_workers", self.image_workers, 1, 256)
        check_integer("max_upload_bytes", self.max_upload_bytes, 1, 2**32)
        check_integer("max_pixels", self.max_pixels, 1, 2**31)


RouterPolicy = Literal["round-robin", "least-requests", "least-tokens", "batch-cost", "mask-aware"]
"""How the router chooses an engine, see core/routing/policies.py."""


class StencilConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an AsyncEngine. Set by flags."""

    engine: EngineConfig = EngineConfig()
    router_policy: RouterPolicy = "mask-aware"  # how edits are spread over engines
    image: ImageConfig = ImageConfig()
    max_queue: int = 256  # images waiting or running, beyond which new ones are refused
    slo_seconds: float = 0.0  # latency objective of edits; 0 = none
    step_schedule: StepScheduleName = "full"  # of requests that name none and do not ask to be exact
    arena_bytes: int = 8 * 1024**3  # address space of the shared arena; memory is taken only while in use
    template_bytes: int = 256 * 1024**2  # encoded uploads kept for registered templates
    approximate_cache_bytes: int = 0  # states kept for approximate caching, beside the shared arena's; 0: none
    skip_levels: tuple[SkipLevel, ...] | None = None  # of approximate caching, for all models; None: as calibrated

    def __post_init__(self) -> None:
        conform(self)
        check_integer("approximate_cache_bytes", self.approximate_cache_bytes, 0, MAX_CACHE_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Address space of the arena of the API server."""
        return self.arena_bytes + self.approximate_cache_bytes


PATIENCE_SECONDS = 60.0
"""A request with a near due time overtakes only requests that arrived at most this long before it."""

CLASS_SECONDS = 2 * PATIENCE_SECONDS
"""Seconds of waiting, and of work, that a priority class is worth: see `core.scheduling.requests.fair_queue`."""

PRIME_SHARE = 0.2
"""Tokens primed beside a step, as a share of the step's own: the bound on the delay of running requests."""
