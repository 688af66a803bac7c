"""The table of the server's flags: the setting that each one sets, its limits, and its help text.

Types, defaults and choices are those of the settings themselves (core/config.py, serve_options.py). From the table
follow the command line and what it configures (serve_args.py), the keys of a catalog (catalog.py) and docs/flags.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from core.config import (
    MAX_ENGINES,
    CacheConfig,
    EngineConfig,
    ImageConfig,
    ModelConfig,
    SchedulerConfig,
    SchedulingPolicyName,
    StencilConfig,
)
from entrypoints.api_keys import KEY_VARIABLE, KEYS_VARIABLE
from entrypoints.flag_types import (
    auto_or_bytes,
    byte_count,
    decimal,
    device,
    engine_count,
    host,
    http_url,
    keyframes,
    milliseconds,
    named_adapter,
    page_dtype,
    web_origin,
    whole_number,
)
from entrypoints.model_paths import named_model, named_segmenter
from entrypoints.serve_options import ServeOptions


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag and the setting that it makes. Its default is the field's, and so are its type and choices, unless they
    are given here.
    """

    name: str
    config: type | None  # the class whose field it sets; None: serve_args.py reads it
    help: str
    metavar: str | None = None
    bounds: tuple[float, float] = (0, 0)  # of a number: the least and the greatest
    convert: Callable[[str], Any] | None = None  # makes the value of the flag's text
    choices: tuple[str, ...] = ()
    repeats: bool = False  # each time it is given adds a value
    field: str = ""  # if it is not called as the flag

    @property
    def sets(self) -> str:
        """The field's name."""
        return self.field or self.name.removeprefix("--").replace("-", "_")

    @property
    def default(self) -> Any:
        """The field's; "auto" for one that is None by default."""
        if self.config is None:
            return () if self.repeats else ""
        default = getattr(self.config(), self.sets)
        return "auto" if default is None else default

    @property
    def values(self) -> tuple[str, ...]:
        """The texts that it takes; empty: any that `parse` takes."""
        kind = self._kind
        return get_args(kind) if get_origin(kind) is Literal else self.choices

    @property
    def parse(self) -> Callable[[str], Any] | None:
        """Makes the value of the flag's text, or raises argparse.ArgumentTypeError; None: the text is the value."""
        low, high = self.bounds
        if self.convert is None and self._kind is int:
            return whole_number(int(low), int(high))
        return decimal(low, high) if self.convert is None and self._kind is float else self.convert

    @property
    def _kind(self) -> Any:
        """The field's annotation."""
        return str if self.config is None else get_type_hints(self.config)[self.sets]


FLAGS: dict[str, tuple[Flag, ...]] = {
    "model": (
        Flag(
            "--model",
            None,
            "diffusers checkpoint to serve, under this name; may be repeated, and requests choose by `model`, without "
            "which the first is meant; default: stencil-embedded, the embedded model",
            "[NAME=]DIR_OR_HUB_ID",
            convert=named_model,
            repeats=True,
            field="models",
        ),
        Flag(
            "--catalog",
            None,
            "TOML file that lists several models, each with settings of its own, instead of --model",
            "FILE",
        ),
        Flag(
            "--served-model-name",
            None,
            "model id shown to clients, of a single model; empty: the value of --model, or stencil-embedded",
            "NAME",
        ),
        Flag(
            "--variant",
            ModelConfig,
            "variant of the checkpoint's weight files, such as fp16; parts without it load their plain files",
            "NAME",
        ),
        Flag(
            "--lora",
            None,
            "a LoRA adapter that requests may choose by this name: a safetensors file, or a folder with one; "
            "may be repeated",
            "NAME=PATH",
            convert=named_adapter,
            repeats=True,
            field="loras",
        ),
        Flag(
            "--segmenter",
            ModelConfig,
            "checkpoint of a model that finds masks for words, points or boxes: CLIPSeg, SAM 3, SAM 2, or SAM 2 beside "
            "Grounding DINO, for which the flag is given twice; none: no masks are found; default: with the embedded "
            "model one for its pictures, else none",
            "DIR_OR_HUB_ID",
            convert=named_segmenter,
            repeats=True,
        ),
        Flag(
            "--allow-runtime-lora",
            ServeOptions,
            "let callers load and unload adapters (POST /v1/load_lora_adapter) from any file that the server may read",
            field="runtime_lora",
        ),
        Flag(
            "--workflow",
            ServeOptions,
            "file of workflows, or folder of such files, to register at the start; its code runs in workers, with all "
            "that they may read; or a ComfyUI graph in the form of its API, .json; may be repeated",
            "FILE_OR_FOLDER",
            repeats=True,
            field="workflow_files",
        ),
        Flag(
            "--allow-runtime-workflows",
            ServeOptions,
            "let those with a key of --admin-key-file register and delete workflows (POST and DELETE /v1/workflows), "
            "whose code runs in workers, with all that they may read, pictures of all owners included",
            field="runtime_workflows",
        ),
        Flag(
            "--dtype",
            ModelConfig,
            "data type of weights and computation; auto: the fastest that is safe on the device",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
        Flag(
            "--quantization",
            ModelConfig,
            "quantise the denoiser's linear layers at load time; torchao-int8 runs on any device and needs the extra "
            "'quantization'; bitsandbytes-8bit and bitsandbytes-4bit need a GPU and the package bitsandbytes",
        ),
        Flag("--device", ModelConfig, "auto, cpu, cuda or cuda:N", "DEVICE", convert=device),
        Flag(
            "--kernels",
            ModelConfig,
            "operators of denoisers; auto: the fastest for the device; torch: PyTorch's only, slower, but need no "
            "compiler; compile: auto, and on a GPU a UNet's layers are compiled, which takes minutes at the first "
            "start",
        ),
        Flag(
            "--cuda-graphs",
            ModelConfig,
            "auto: on a GPU, a mask-aware step or a UNet's step of one request, and an exact one of a small picture, "
            "is captured when its shape comes for the second time, and replayed from then on; off: no step is "
            "captured, which saves the memory of the graphs (on an H100 0.27 GB for FLUX, 0.49 GB for Stable "
            "Diffusion XL)",
        ),
        Flag(
            "--offload",
            ModelConfig,
            "host: on a GPU, text encoders and VAE are in host memory, pinned by each worker, and are copied to the "
            "GPU each time they are used, which the log prices at the start; the denoiser, and what is quantised, "
            "stays on the GPU",
        ),
        Flag(
            "--batch-invariant",
            ModelConfig,
            "on a GPU, compute a picture with the same bits whatever shares its steps and however many workers "
            "compute them, which takes longer; on a CPU it changes nothing: this holds there anyway, with AMX in "
            "bfloat16 where our kernels compute, that is with one thread",
        ),
        Flag(
            "--model-bytes",
            SchedulerConfig,
            "weights that each worker may hold; a model beyond it is loaded when a request needs it, in place of what "
            "was not used for longest; 0: no limit; a number of bytes, or with K, M or G",
            "BYTES",
            convert=byte_count,
        ),
        Flag(
            "--threads",
            ModelConfig,
            "CPU threads per worker; 0: all cores but one, split between the workers of all engines",
            "N",
            bounds=(0, 1024),
        ),
    ),
    "server": (
        Flag("--host", ServeOptions, "address to listen on; 0.0.0.0 for every interface"),
        Flag("--port", ServeOptions, "TCP port; 0: any free one", bounds=(0, 65535)),
        Flag(
            "--api-key",
            None,
            "a key that requests to /v1/* must send, and those of --comfy-api; may be repeated; visible to all users "
            f"of the machine in ps, so prefer --api-key-file; without either flag, {KEY_VARIABLE} or {KEYS_VARIABLE} "
            "(comma-separated) of the environment are used; without any key, the API is open",
            "KEY",
            repeats=True,
            field="api_keys",
        ),
        Flag(
            "--api-key-file",
            None,
            "file of keys, one per line, lines that begin with # are comments; may be repeated; if you own the file, "
            "it must be accessible to you only; SIGHUP reloads all files",
            "FILE",
            repeats=True,
            field="api_key_files",
        ),
        Flag(
            "--admin-key-file",
            ServeOptions,
            "file of the keys for --allow-runtime-workflows, read and reloaded as that of --api-key-file; these keys "
            "open nothing else",
            "FILE",
        ),
        Flag(
            "--rate-limit",
            ServeOptions,
            "edits, generations, masks, prompts, templates and adapter loads per minute for each key, or without keys "
            "for each client address; more get 429; 0: no limit",
            "N",
            bounds=(0, 1_000_000),
        ),
        Flag(
            "--allowed-origin",
            ServeOptions,
            "an origin such as https://app.example whose web pages may use the API; may be repeated; *: any origin, "
            "for servers with keys",
            "ORIGIN",
            convert=web_origin,
            repeats=True,
            field="allowed_origins",
        ),
        Flag(
            "--allowed-host",
            ServeOptions,
            "a name or address that a request's Host header may name, besides loopback, such as one that a proxy "
            "passes on; may be repeated; *: any; default: any, or if --host is a loopback address, none",
            "HOST",
            convert=host,
            repeats=True,
            field="allowed_hosts",
        ),
        Flag(
            "--comfy-api",
            ServeOptions,
            "serve ComfyUI's API, too, for its API clients: POST /prompt, /history, /view, /upload/image, /queue, /ws",
        ),
        Flag(
            "--no-playground",
            ServeOptions,
            "serve the API only, without its pages",
            field="playground",
        ),
        Flag("--log-level", ServeOptions, "lowest level that is logged"),
        Flag("--log-format", ServeOptions, "json: one object per line"),
        Flag(
            "--otlp-traces-endpoint",
            EngineConfig,
            "OpenTelemetry collector that traces are sent to, such as http://localhost:4318/v1/traces; empty: none",
            "URL",
            convert=http_url,
        ),
        Flag(
            "--drain-seconds",
            EngineConfig,
            "how long running edits may take to finish after SIGTERM or Ctrl-C",
            "S",
            bounds=(0, 86400),
        ),
    ),
    "engine": (
        Flag(
            "--scheduling-policy",
            SchedulerConfig,
            f"what decides which requests run together: {', '.join(get_args(SchedulingPolicyName))}, or module:Class, "
            "a policy of your own; neustream, ddit, lego: baselines",
            "NAME",
            field="policy",
        ),
        Flag(
            "--on-late",
            SchedulerConfig,
            "requests that cannot meet the latency objective end with an error, or run when no other needs the worker, "
            "unless they would miss their timeout",
        ),
        Flag(
            "--max-num-seqs",
            SchedulerConfig,
            "maximum number of images that share one denoising step",
            "N",
            bounds=(1, 4096),
        ),
        Flag(
            "--max-num-batched-tokens",
            SchedulerConfig,
            "maximum number of image and text tokens that share one denoising step; a larger image runs alone",
            "N",
            bounds=(1, 2**31),
        ),
        Flag(
            "--max-stage-ms",
            SchedulerConfig,
            "maximum encoding and decoding time added to one denoising step",
            "MS",
            bounds=(0, 60000),
        ),
        Flag(
            "--max-queue",
            StencilConfig,
            "maximum number of waiting and running images; further requests are refused with 503",
            "N",
            bounds=(1, 1_000_000),
        ),
        Flag(
            "--slo-ms",
            StencilConfig,
            "latency objective, from an edit's arrival to its finished picture; one that cannot meet it any more "
            "while others can ends with 503 (--on-late); 0: none",
            "MS",
            convert=milliseconds,
            field="slo_seconds",
        ),
        Flag(
            "--step-schedule",
            StencilConfig,
            "denoising steps of requests that do not say and do not ask to be exact: full, or calibrated: of a model "
            "with a calibrated schedule, only those that matter",
        ),
        Flag(
            "--max-retries",
            SchedulerConfig,
            "how often an edit is run again after the engine or worker that ran it has died",
            "N",
            bounds=(0, 100),
        ),
        Flag(
            "--start-seconds",
            EngineConfig,
            "kill an engine that is not ready this long after its start, downloads included, because it hangs",
            "S",
            bounds=(1, 86400),
        ),
        Flag("--workers-per-engine", EngineConfig, "worker processes of each engine", "N", bounds=(1, 64)),
        Flag(
            "--degree",
            SchedulerConfig,
            "workers of an engine that compute each denoising step together; 1: as many as are useful and free, found "
            "from a profile (--degrees)",
            "N",
            bounds=(1, 64),
        ),
        Flag(
            "--max-degree",
            SchedulerConfig,
            "most workers that compute a step together where --degree is 1",
            "N",
            bounds=(1, 64),
        ),
        Flag(
            "--data-parallel-size",
            EngineConfig,
            "number of engines, each with its own model, cache and workers, between which edits are distributed; they "
            "share the CPU cores, or take one GPU per worker; auto: as many as a Ray cluster has room for",
            "N|auto",
            convert=engine_count,
        ),
        Flag(
            "--data-parallel-backend",
            EngineConfig,
            "what starts engines; mp: the server, on its machine; ray: a Ray cluster (docs/cluster.md)",
        ),
        Flag(
            "--data-parallel-size-local",
            EngineConfig,
            "with --data-parallel-backend ray: engines that are on the server's machine all the same",
            "N",
            bounds=(0, MAX_ENGINES),
        ),
        Flag(
            "--ray-address",
            EngineConfig,
            "the Ray cluster's address; auto: the one that this machine is of",
            "HOST:PORT",
        ),
        Flag(
            "--router-policy",
            StencilConfig,
            "how an edit's engine is chosen; mask-aware: the one predicted to finish it first",
        ),
    ),
    "mask-aware execution and its cache": (
        Flag(
            "--no-mask-aware",
            ModelConfig,
            "compute every token of every edit, and cache no activations",
            field="mask_aware",
        ),
        Flag(
            "--cache-keyframes",
            ModelConfig,
            "number of noise levels at which a template's activations are cached: auto (the checkpoint's calibration, "
            "else 5), per-step, or 2 to 64",
            "N",
            convert=keyframes,
        ),
        Flag(
            "--cache-dtype",
            ModelConfig,
            "data type of cached activations; auto: the checkpoint's calibration, else int8",
            convert=page_dtype,
            choices=("auto", "int8", "bfloat16", "float32"),
        ),
        Flag("--priming-prompt", ModelConfig, "prompt that a template's activations are computed with", "TEXT"),
        Flag(
            "--gpu-memory-utilization",
            CacheConfig,
            "share of a GPU's memory that a worker may use; what weights and the largest batch leave of it holds "
            "cached activations",
            "SHARE",
            bounds=(0.01, 1),
        ),
        Flag(
            "--cache-device-bytes",
            CacheConfig,
            "device memory of each worker for cached activations; auto: what --gpu-memory-utilization leaves; 0: "
            "none, a CPU then reads them from host memory; a number of bytes, or with K, M or G",
            "BYTES",
            convert=auto_or_bytes,
            field="device_bytes",
        ),
        Flag(
            "--cache-host-bytes",
            CacheConfig,
            "shared memory of each engine for cached activations; a number of bytes, or with K, M or G",
            "BYTES",
            convert=byte_count,
            field="host_bytes",
        ),
        Flag(
            "--cache-disk-bytes",
            CacheConfig,
            "disk space for cached activations of users' images; 0: none; a number of bytes, or with K, M or G",
            "BYTES",
            convert=byte_count,
            field="disk_bytes",
        ),
        Flag(
            "--template-bytes",
            StencilConfig,
            "memory for the uploads of registered templates; a number of bytes, or with K, M or G",
            "BYTES",
            convert=byte_count,
        ),
        Flag(
            "--approximate-cache-bytes",
            StencilConfig,
            "shared memory for states of pictures, in which later ones of the same API key with similar prompts begin, "
            "where requests or workflows ask for it (`approximate_caching`); 0: none; a number of bytes, or with K, M "
            "or G",
            "BYTES",
            convert=byte_count,
        ),
        Flag(
            "--cache-dir",
            CacheConfig,
            "folder of cached activations on disk; engines may share it; empty: stencil/pages in the user's cache "
            "folder",
            "DIR",
            field="directory",
        ),
        Flag(
            "--cache-admission",
            CacheConfig,
            "always: cache the activations of every edit while there is room; manual: of registered templates only",
            field="admission",
        ),
        Flag(
            "--cache-scope",
            CacheConfig,
            "owner: reuse activations and embedded prompts only for the API key that they were computed for, so that "
            "neither times nor answers reveal what other keys have sent; server: reuse them for all keys",
            field="scope",
        ),
        Flag(
            "--block-plan",
            CacheConfig,
            "auto: may compute leading blocks in full while cached activations load, which changes pixels slightly",
        ),
    ),
    "images": (
        Flag(
            "--image-workers",
            ImageConfig,
            "number of image processors, which decode and encode images",
            "N",
            bounds=(1, 256),
        ),
        Flag("--max-upload-bytes", ImageConfig, "maximum size of an uploaded file", "BYTES", bounds=(1, 2**32)),
        Flag("--max-pixels", ImageConfig, "maximum number of pixels of an uploaded image", "N", bounds=(256, 2**31)),
    ),
}
"""The flags by group, in the order of --help."""


def flags_of(config: type) -> tuple[Flag, ...]:
    """The flags that set fields of a class of configuration."""
    return tuple(flag for group in FLAGS.values() for flag in group if flag.config is config)
