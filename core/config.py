"""Settings, parsed once and never changed. What is learnt at start-up travels in Ready messages instead.

All are msgspec Structs, since child processes get theirs as msgpack. They are also the arguments of an ImageEngine: a
value of the wrong type, or a number out of range, raises InvalidRequestError that names the field.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from core.errors import ConfigError
from core.validation import check_choice, check_decimal, check_integer, check_matches, conform

Quantization = Literal["none", "torchao-int8", "bitsandbytes-8bit", "bitsandbytes-4bit"]
"""How a transformer's weights are quantised while they are loaded: by which package, to what."""

KernelChoice = Literal["auto", "torch", "compile"]
"""What denoisers compute with: the fastest code that their device has; PyTorch's operators alone; or the former, and a
UNet's layers compiled by `torch.compile`, which takes minutes at the first start."""

EMBEDDED_MODEL = str(Path(__file__).resolve().parent.parent / "model_executor" / "embedded")

MAX_CACHE_BYTES = 2**46
"""Address space that a process can have."""


class AdapterConfig(msgspec.Struct, frozen=True):
    """A LoRA adapter that requests may choose by `name`. path: its safetensors file, or a folder that holds one."""

    name: str
    path: str

    def __post_init__(self) -> None:
        conform(self)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint a worker loads and how. `model` is a diffusers directory or a Hugging Face hub id.

    variant: of its weight files, such as fp16, where a part has them; "" = those without a name, else the only ones.
    dtype: auto, float32, bfloat16 or float16. quantization: of the denoiser's linear layers; products are taken in
    dtype. device: auto, cpu, cuda or cuda:N. kernels: see `KernelChoice`. threads: CPU threads per worker, 0 = its
    share of the cores but one. mask_aware: whether edits may skip untouched tokens. cache_keyframes: auto (the
    checkpoint's calibration, else 5), per-step, or a number from 2 on, spread evenly over noise levels 0..1.
    cache_dtype: how pages are kept: auto (likewise, else int8), int8, bfloat16 or float32. priming_prompt: what
    templates are primed with. adapters: served beside the model itself. Raises ConfigError for adapters of one name.
    """

    model: str = EMBEDDED_MODEL
    served_model_name: str = ""
    variant: str = ""
    dtype: str = "auto"
    quantization: Quantization = "none"
    device: str = "auto"
    kernels: KernelChoice = "auto"
    threads: int = 0
    mask_aware: bool = True
    cache_keyframes: str = "auto"
    cache_dtype: str = "auto"
    priming_prompt: str = ""
    adapters: tuple[AdapterConfig, ...] = ()

    def __post_init__(self) -> None:
        conform(self)
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice("cache_dtype", self.cache_dtype, ("auto", "int8", "bfloat16", "float32"))
        check_matches("device", self.device, r"auto|cpu|cuda(:[0-9]+)?", "auto, cpu, cuda or cuda:N")
        keyframes = "auto, per-step or a number from 2 to 64"
        check_matches("cache_keyframes", self.cache_keyframes, r"auto|per-step|0?[2-9]|[1-5][0-9]|6[0-4]", keyframes)
        check_integer("threads", self.threads, 0, 1024)
        names = [self.name, *(adapter.name for adapter in self.adapters)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"--lora {twice}: adapters need names of their own, other than the model's")

    @property
    def name(self) -> str:
        """The model id clients see."""
        if self.served_model_name:
            return self.served_model_name
        return "stencil-embedded" if self.model == EMBEDDED_MODEL else self.model


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one iteration. max_num_batched_tokens counts active image tokens plus text tokens of a step's batch.
    max_stage_ms: predicted milliseconds of encoding and decoding that may delay a step, if more than one item.
    max_plans_in_flight: plans a worker may hold, the running one included: more than one hides the round trip behind
    compute. max_ahead_ms: another plan follows one that runs only while what is out is predicted to take less: how much
    longer a newcomer may wait for its place.
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 65536
    max_stage_ms: float = 20.0
    max_plans_in_flight: int = 2
    max_ahead_ms: float = 10.0

    def __post_init__(self) -> None:
        conform(self)
        check_integer("max_num_seqs", self.max_num_seqs, 1, 4096)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**31)
        check_decimal("max_stage_ms", self.max_stage_ms, 0, 60000)
        check_integer("max_plans_in_flight", self.max_plans_in_flight, 1, 64)
        check_decimal("max_ahead_ms", self.max_ahead_ms, 0)


CacheScope = Literal["owner", "server"]
"""Whose requests may share what was computed for one of them: those of the same API key, or all."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The activation cache's limits, in bytes per engine, and what it keeps.

    device_bytes: device memory for pages; None: on a GPU what is left of `gpu_memory_utilization` (0..1), its share of
    all memory there, when weights and the largest batch have theirs; 0: none, and a CPU reads host pages in place.
    host_bytes: shared memory for pages.
    disk_bytes: files in `directory` ("" = stencil/pages in the user's cache folder), 0 = none; shared by all engines
    that name the same folder. admission: always keeps an edit's pages while there is room, manual only those of
    templates that were registered. block_plan: auto may compute leading blocks in full while pages come from a slower
    tier. scope: whose requests share what was computed: an owner's own, or the whole server's. Raises ConfigError for a
    share that is none.
    """

    device_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    host_bytes: int = 4 * 1024**3
    disk_bytes: int = 0
    directory: str = ""
    admission: Literal["always", "manual"] = "always"
    block_plan: Literal["off", "auto"] = "off"
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
        """Part of the key of all that is computed for an owner and kept: requests with the same salt share it. owner:
        digest of an API key, "" where no keys are asked for.
        """
        return owner if self.scope == "owner" else ""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its models, its scheduler, its workers. data_parallel_size: engines of this kind on this machine,
    which share its cores; data_parallel_rank: which of them this one is, counted from 0; its workers have GPUs of their
    own. hang_seconds: a worker is killed that gives no answer for so long, and for 20 times what its work is predicted
    to take; so is an engine that gives no sign of life for so long. start_seconds: an engine is killed that does not
    serve after so long. Raises ConfigError for several workers with a device tier, or with one GPU between them.
    """

    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    workers_per_engine: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    drain_seconds: float = 60.0
    hang_seconds: float = 10.0
    start_seconds: float = 1800.0
    otlp_traces_endpoint: str = ""  # URL that spans are sent to; "" = none are made

    def __post_init__(self) -> None:
        conform(self)
        check_integer("workers_per_engine", self.workers_per_engine, 1, 64)
        check_integer("data_parallel_size", self.data_parallel_size, 1, 256)
        check_integer("data_parallel_rank", self.data_parallel_rank, 0, self.data_parallel_size - 1)
        for name in ("drain_seconds", "hang_seconds", "start_seconds"):
            check_decimal(name, getattr(self, name), 0)
        if self.workers_per_engine > 1 and self.cache.device_bytes:
            raise ConfigError(
                f"{self.workers_per_engine} workers cannot share pages in device memory: the last worker decodes, "
                "and these pages lie with the first; give --workers-per-engine 1 or --cache-device-bytes 0"
            )
        numbered = next((model.device for model in self.models if ":" in model.device), None)
        if numbered and self.num_workers > 1:
            raise ConfigError(
                f"--device {numbered} is one device, and each worker takes one of its own; give --device "
                f"{numbered.partition(':')[0]}, or one engine with one worker"
            )

    @property
    def num_workers(self) -> int:
        """Of all engines on this machine."""
        return self.workers_per_engine * self.data_parallel_size

    def device_index(self, rank: int) -> int:
        """The place of a worker of this engine among all workers: the GPU it takes where no other one was named."""
        return self.workers_per_engine * self.data_parallel_rank + rank


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The image processors and what they accept. Sizes in bytes and pixels, per file."""

    image_workers: int = 2
    max_upload_bytes: int = 50 * 1024 * 1024
    max_pixels: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        conform(self)
        check_integer("image_workers", self.image_workers, 1, 256)
        check_integer("max_upload_bytes", self.max_upload_bytes, 1, 2**32)
        check_integer("max_pixels", self.max_pixels, 1, 2**31)


RouterPolicy = Literal["round-robin", "least-requests", "least-tokens", "batch-cost", "mask-aware"]
"""How the router picks an engine, see core/routing.py."""


class StencilConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an AsyncEngine needs. router_policy: how edits are spread over engines. max_retries: how often an
    image is begun anew after the death of the engine that had it. max_queue: images waiting or running before new ones
    are refused; slo_seconds: within which edits are to be done, 0 = as long as they take; arena_bytes: address space of
    the shared arena, whose memory is only taken while in use; template_bytes: encoded uploads kept for registered
    templates.
    """

    engine: EngineConfig = EngineConfig()
    router_policy: RouterPolicy = "mask-aware"
    max_retries: int = 2
    image: ImageConfig = ImageConfig()
    max_queue: int = 256
    slo_seconds: float = 0.0
    arena_bytes: int = 8 * 1024**3
    template_bytes: int = 256 * 1024**2

    def __post_init__(self) -> None:
        conform(self)
