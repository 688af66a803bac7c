"""The command line of the server: flags to StencilConfig. A bad flag is one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, get_args

from core.config import (
    EMBEDDED_MODEL,
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    ImageConfig,
    ModelConfig,
    Quantization,
    RouterPolicy,
    SchedulerConfig,
    StencilConfig,
)
from core.errors import ConfigError
from core.ipc.logs import LogFormat
from entrypoints.api_keys import KEY_VARIABLE, KEYS_VARIABLE, find_keys

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PAGE_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # other spellings
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_MAX_CACHE_BYTES = 2**46  # address space that a process can have


@dataclass(frozen=True)
class ServeOptions:
    """Everything the command line says."""

    host: str
    port: int
    api_keys: tuple[str, ...] = field(repr=False)
    rate_limit: int  # requests per minute and caller; 0: none
    playground: bool
    log_level: str
    log_format: LogFormat
    config: StencilConfig

    @property
    def model(self) -> ModelConfig:
        return self.config.engine.models[0]


def parse_options(argv: Sequence[str] | None) -> ServeOptions:
    """Exits with status 2 for a bad flag, 0 after --help."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        config = _config(args)
        api_keys = find_keys(args.api_keys, args.api_key_files, os.environ)
    except ConfigError as error:
        parser.error(str(error))
    return ServeOptions(
        args.host, args.port, api_keys, args.rate_limit, args.playground, args.log_level, args.log_format, config
    )


def _config(args: argparse.Namespace) -> StencilConfig:
    """Raises ConfigError for flags that exclude each other."""
    model = ModelConfig(
        model=args.model,
        served_model_name=args.served_model_name,
        variant=args.variant,
        dtype=args.dtype,
        quantization=args.quantization,
        device=args.device,
        threads=args.threads,
        mask_aware=args.mask_aware,
        cache_keyframes=args.cache_keyframes,
        cache_dtype=args.cache_dtype,
        priming_prompt=args.priming_prompt,
        adapters=tuple(args.loras),
    )
    cache = CacheConfig(
        device_bytes=args.cache_device_bytes,
        host_bytes=args.cache_host_bytes,
        disk_bytes=args.cache_disk_bytes,
        directory=args.cache_dir,
        admission=args.cache_admission,
        block_plan=args.block_plan,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_stage_ms=args.max_stage_ms,
    )
    engine = EngineConfig(
        models=(model,),
        scheduler=scheduler,
        cache=cache,
        workers_per_engine=args.workers_per_engine,
        data_parallel_size=args.data_parallel_size,
        drain_seconds=args.drain_seconds,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        start_seconds=args.start_seconds,
    )
    image = ImageConfig(
        image_workers=args.image_workers, max_upload_bytes=args.max_upload_bytes, max_pixels=args.max_pixels
    )
    return StencilConfig(
        engine=engine,
        router_policy=args.router_policy,
        max_retries=args.max_retries,
        image=image,
        max_queue=args.max_queue,
        slo_seconds=args.slo_ms / 1e3,
        template_bytes=args.template_bytes,
    )


def check_model(model: str) -> None:
    """Raises ConfigError for what can be neither a diffusers directory nor a hub id; the worker checks the rest."""
    path = Path(model)
    try:
        is_directory, is_there, has_index = path.is_dir(), path.exists(), (path / "model_index.json").is_file()
    except OSError as error:
        raise ConfigError(f"cannot read '{model}': {error.strerror}") from error
    if is_directory:
        if not has_index:
            raise ConfigError(f"'{model}' is not a diffusers checkpoint: it has no model_index.json")
    elif is_there:
        raise ConfigError(f"'{model}' is a file; --model takes a diffusers directory or a Hugging Face hub id")
    elif not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise ConfigError(f"there is no directory '{model}', and it is no Hugging Face hub id of the form owner/name")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"stencil: error: {message} (--help lists all flags)", file=sys.stderr)
        raise SystemExit(2)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not that there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in ("", None, []) else action.help


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m entrypoints.serve",
        description="Serve masked image editing behind the OpenAI images API.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    _add_model_flags(parser)
    _add_server_flags(parser)
    _add_engine_flags(parser)
    _add_cache_flags(parser)
    _add_image_flags(parser)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group, default = parser.add_argument_group("model"), ModelConfig()
    group.add_argument("--model", default=EMBEDDED_MODEL, metavar="DIR_OR_HUB_ID", help="diffusers checkpoint to serve")
    group.add_argument(
        "--served-model-name",
        default="",
        metavar="NAME",
        help="model id that clients see; empty: the value of --model, or stencil-embedded",
    )
    group.add_argument(
        "--variant",
        default=default.variant,
        metavar="NAME",
        help="variant of the checkpoint's weight files, such as fp16; parts that have none load their plain ones",
    )
    group.add_argument(
        "--lora",
        dest="loras",
        action="append",
        default=[],
        type=parse_adapter,
        metavar="NAME=PATH",
        help="a LoRA adapter that requests may choose by this name: a safetensors file, or a folder that holds one; "
        "may be repeated",
    )
    group.add_argument(
        "--dtype",
        default=default.dtype,
        choices=("auto", "float32", "bfloat16", "float16"),
        help="compute type of the weights; auto: the fastest that is safe on the device",
    )
    group.add_argument(
        "--quantization",
        default=default.quantization,
        choices=get_args(Quantization),
        help="of the transformer's weights, while they are loaded; torchao-int8 runs everywhere and needs the extra "
        "quantization, bitsandbytes-8bit and bitsandbytes-4bit need a GPU and that package",
    )
    group.add_argument(
        "--device", default=default.device, type=_device, metavar="DEVICE", help="auto, cpu, cuda or cuda:N"
    )
    group.add_argument(
        "--threads",
        default=default.threads,
        type=_integer(0, 1024),
        metavar="N",
        help="CPU threads per worker; 0: the cores but one, split between the workers of all engines",
    )


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for every interface")
    group.add_argument("--port", default=8000, type=_integer(0, 65535), help="TCP port; 0: any free one")
    group.add_argument(
        "--api-key",
        dest="api_keys",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that opens /v1/*; may be repeated; every user of the machine sees it in ps, so rather give "
        f"--api-key-file, or without either {KEY_VARIABLE} or {KEYS_VARIABLE} (comma-separated) in the environment; "
        "no key at all: open to everybody",
    )
    group.add_argument(
        "--api-key-file",
        dest="api_key_files",
        action="append",
        default=[],
        metavar="FILE",
        help="keys, one a line, # begins a comment; may be repeated; a file of yours must be readable by you alone",
    )
    group.add_argument(
        "--rate-limit",
        default=0,
        type=_integer(0, 1_000_000),
        metavar="N",
        help="edits, generations and registrations of templates per minute and key, or client address where there are "
        "no keys, before 429; 0: no limit",
    )
    group.add_argument(
        "--no-playground",
        dest="playground",
        action="store_false",
        default=True,
        help="serve the API alone, without the pages at / and /status",
    )
    group.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="what is logged to stderr"
    )
    group.add_argument("--log-format", default="text", choices=("text", "json"), help="json: one object a line")
    group.add_argument(
        "--otlp-traces-endpoint",
        default=EngineConfig().otlp_traces_endpoint,
        type=_http_url,
        metavar="URL",
        help="OpenTelemetry collector that traces are sent to, such as http://localhost:4318/v1/traces; empty: none",
    )
    group.add_argument(
        "--drain-seconds",
        default=EngineConfig().drain_seconds,
        type=_decimal(0, 86400),
        metavar="S",
        help="how long running edits may take to finish after SIGTERM or Ctrl-C",
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group, default = parser.add_argument_group("engine"), SchedulerConfig()
    group.add_argument(
        "--max-num-seqs",
        default=default.max_num_seqs,
        type=_integer(1, 4096),
        metavar="N",
        help="most images that share one denoising step",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        default=default.max_num_batched_tokens,
        type=_integer(1, 2**31),
        metavar="N",
        help="most tokens, image and text, that share one denoising step; a larger image runs alone",
    )
    group.add_argument(
        "--max-stage-ms",
        default=default.max_stage_ms,
        type=_decimal(0, 60000),
        metavar="MS",
        help="encoding and decoding time that may be added to one denoising step",
    )
    group.add_argument(
        "--max-queue",
        default=StencilConfig().max_queue,
        type=_integer(1, 1_000_000),
        metavar="N",
        help="images waiting or running before new ones are refused with 503",
    )
    group.add_argument(
        "--slo-ms",
        default=StencilConfig().slo_seconds * 1e3,
        type=_decimal(0, 86_400_000),
        metavar="MS",
        help="time from an edit's arrival to its finished picture that is aimed for; what is predicted to miss it is "
        "refused with 503 while others are served; 0: none",
    )
    group.add_argument(
        "--max-retries",
        default=StencilConfig().max_retries,
        type=_integer(0, 100),
        metavar="N",
        help="times that an edit is begun anew after the death of the engine that had it",
    )
    group.add_argument(
        "--start-seconds",
        default=EngineConfig().start_seconds,
        type=_decimal(1, 86400),
        metavar="S",
        help="an engine that does not serve so long after its start, downloads included, is killed: it hangs",
    )
    group.add_argument(
        "--workers-per-engine",
        default=EngineConfig().workers_per_engine,
        type=_integer(1, 64),
        metavar="N",
        help="worker processes of each engine",
    )
    group.add_argument(
        "--data-parallel-size",
        default=EngineConfig().data_parallel_size,
        type=_integer(1, 256),
        metavar="N",
        help="engines that edits are spread over, each with its own model, cache and workers; they share the cores, or "
        "take one GPU a worker",
    )
    group.add_argument(
        "--router-policy",
        choices=get_args(RouterPolicy),
        default=StencilConfig().router_policy,
        help="how an engine is picked for an edit; mask-aware: where it is predicted to be done first",
    )


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    group, model = parser.add_argument_group("mask-aware execution and its cache"), ModelConfig()
    group.add_argument(
        "--no-mask-aware",
        dest="mask_aware",
        action="store_false",
        default=True,
        help="compute every token of every edit, and cache nothing",
    )
    group.add_argument(
        "--cache-keyframes",
        default=model.cache_keyframes,
        type=_keyframes,
        metavar="N",
        help="noise levels that a template's activations are kept at: auto (the checkpoint's calibration, else 5), "
        "per-step, or 2 to 64",
    )
    group.add_argument(
        "--cache-dtype",
        default=model.cache_dtype,
        type=_page_dtype,
        choices=("auto", "int8", "bfloat16", "float32"),
        help="how activations are kept; auto: the checkpoint's calibration, else int8",
    )
    group.add_argument(
        "--priming-prompt",
        default=model.priming_prompt,
        metavar="TEXT",
        help="prompt that a template's activations are computed with",
    )
    _add_tier_flags(group)


def _add_tier_flags(group: argparse._ArgumentGroup) -> None:
    cache = CacheConfig()
    for flag, default, what in (
        ("--cache-device-bytes", cache.device_bytes, "device memory for cached activations; 0: a CPU reads the host's"),
        ("--cache-host-bytes", cache.host_bytes, "shared memory for cached activations, of each engine"),
        ("--cache-disk-bytes", cache.disk_bytes, "files of cached activations, made of users' images; 0: none"),
        ("--template-bytes", StencilConfig().template_bytes, "encoded uploads kept for registered templates"),
    ):
        text = f"{what}; a number of bytes, or with K, M or G"
        group.add_argument(flag, default=default, type=_bytes, metavar="BYTES", help=text)
    group.add_argument(
        "--cache-dir",
        default=cache.directory,
        metavar="DIR",
        help="where these files lie; engines may share it; empty: stencil/pages in the user's cache folder",
    )
    group.add_argument(
        "--cache-admission",
        default=cache.admission,
        choices=("always", "manual"),
        help="always: keep the activations of every edit while there is room; manual: of registered templates only",
    )
    group.add_argument(
        "--block-plan",
        default=cache.block_plan,
        choices=("off", "auto"),
        help="auto: may compute leading blocks in full while activations load, which changes pixels slightly",
    )


def _add_image_flags(parser: argparse.ArgumentParser) -> None:
    group, default = parser.add_argument_group("images"), ImageConfig()
    group.add_argument(
        "--image-workers",
        default=default.image_workers,
        type=_integer(1, 256),
        metavar="N",
        help="processes that decode and encode images",
    )
    group.add_argument(
        "--max-upload-bytes",
        default=default.max_upload_bytes,
        type=_integer(1, 2**32),
        metavar="BYTES",
        help="largest file of an upload",
    )
    group.add_argument(
        "--max-pixels",
        default=default.max_pixels,
        type=_integer(256, 2**31),
        metavar="N",
        help="most pixels of an uploaded image",
    )


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {low} to {high}")
        return int(text)

    return parse


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18})([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else -1
    if not 0 <= size <= _MAX_CACHE_BYTES:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes, such as 1000000, 512M or 4G")
    return size


def _keyframes(text: str) -> str:
    if text not in ("auto", "per-step") and not (re.fullmatch(r"[0-9]{1,2}", text) and 2 <= int(text) <= 64):
        raise argparse.ArgumentTypeError(f"'{text}' is none of auto, per-step, 2 to 64")
    return text


def _page_dtype(text: str) -> str:
    return _PAGE_DTYPES.get(text, text)


def _decimal(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number from {low:g} to {high:g}")
        return value

    return parse


def _http_url(text: str) -> str:
    if text and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not an http:// or https:// URL")
    return text


def parse_adapter(text: str) -> AdapterConfig:
    """NAME=PATH. Raises argparse.ArgumentTypeError."""
    name, _, path = text.partition("=")
    if not re.fullmatch(r"[\w.:-]+", name) or not path:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=PATH, with a name of letters, digits and _ . : -")
    if not Path(path).expanduser().exists():
        raise argparse.ArgumentTypeError(f"there is no file '{path}'")
    return AdapterConfig(name, path)


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is none of auto, cpu, cuda, cuda:N")
    return text
