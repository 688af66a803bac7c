"""Parses the server's command line into ServeOptions. A bad flag is one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from core.config import (
    EMBEDDED_MODEL,
    CacheConfig,
    EngineConfig,
    ImageConfig,
    ModelConfig,
    SchedulerConfig,
    StencilConfig,
)
from core.errors import ConfigError
from core.ipc.logs import LogFormat, one_line
from core.scheduling.policies import make_policy
from entrypoints.api_keys import KeySource
from entrypoints.catalog import read_catalog
from entrypoints.model_flags import add_model_flags
from entrypoints.serve_flags import (
    add_cache_flags,
    add_engine_flags,
    add_image_flags,
    add_server_flags,
)


@dataclass(frozen=True)
class ServeOptions:
    """The parsed command line: settings of the HTTP server, and the engine's StencilConfig."""

    host: str
    port: int  # 0: any free port
    api_keys: tuple[str, ...] = field(repr=False)  # empty: no key is required
    key_source: KeySource  # where api_keys come from, to read them again
    allowed_origins: tuple[str, ...]  # of web pages other than the server's own
    allowed_hosts: tuple[str, ...]  # in `Host` headers, besides the server's own
    rate_limit: int  # requests per minute and caller; 0: no limit
    runtime_lora: bool  # whether callers may load adapters from files of this machine
    playground: bool  # whether to serve the playground's pages
    log_level: str
    log_format: LogFormat
    config: StencilConfig

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """At least one; the first is the default."""
        return self.config.engine.models


def parse_options(argv: Sequence[str] | None) -> ServeOptions:
    """Parse `argv`, by default the process's arguments. Exits with status 2 for a bad flag, 0 after --help."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        config = _config(args)
        key_source = KeySource(tuple(args.api_keys), tuple(args.api_key_files), os.environ)
        api_keys = key_source.read()
    except ConfigError as error:
        parser.error(str(error))
    return ServeOptions(
        host=args.host,
        port=args.port,
        api_keys=api_keys,
        key_source=key_source,
        allowed_origins=tuple(args.allowed_origins),
        allowed_hosts=tuple(args.allowed_hosts),
        rate_limit=args.rate_limit,
        runtime_lora=args.runtime_lora,
        playground=args.playground,
        log_level=args.log_level,
        log_format=args.log_format,
        config=config,
    )


def _config(args: argparse.Namespace) -> StencilConfig:
    """The engine's configuration. Raises ConfigError for flags that exclude each other, and for a policy that cannot be
    made.
    """
    cache = CacheConfig(
        device_bytes=args.cache_device_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        host_bytes=args.cache_host_bytes,
        disk_bytes=args.cache_disk_bytes,
        directory=args.cache_dir,
        admission=args.cache_admission,
        block_plan=args.block_plan,
        scope=args.cache_scope,
    )
    make_policy(args.scheduling_policy)
    scheduler = SchedulerConfig(
        policy=args.scheduling_policy,
        on_late=args.on_late,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_stage_ms=args.max_stage_ms,
        degree=args.degree,
        max_degree=args.max_degree,
        model_bytes=args.model_bytes,
        max_retries=args.max_retries,
    )
    engine = EngineConfig(
        models=_models(args),
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
        image=image,
        max_queue=args.max_queue,
        slo_seconds=args.slo_ms / 1e3,
        step_schedule=args.step_schedule,
        template_bytes=args.template_bytes,
    )


def _models(args: argparse.Namespace) -> tuple[ModelConfig, ...]:
    """The models to serve. Raises ConfigError."""
    common = ModelConfig(
        variant=args.variant,
        dtype=args.dtype,
        quantization=args.quantization,
        kernels=args.kernels,
        cuda_graphs=args.cuda_graphs,
        batch_invariant=args.batch_invariant,
        device=args.device,
        threads=args.threads,
        mask_aware=args.mask_aware,
        cache_keyframes=args.cache_keyframes,
        cache_dtype=args.cache_dtype,
        priming_prompt=args.priming_prompt,
    )
    named = args.models or [("", EMBEDDED_MODEL)]
    _check_flags_of_one(args, is_alone=len(named) == 1 and not args.catalog)
    if args.catalog:
        return read_catalog(Path(args.catalog), common)
    adapters = tuple(args.loras)
    return tuple(
        msgspec.structs.replace(
            common, model=model, served_model_name=name or args.served_model_name, adapters=adapters
        )
        for name, model in named
    )


def _check_flags_of_one(args: argparse.Namespace, *, is_alone: bool) -> None:
    """Raises ConfigError for flags that belong to one model, where there may be several."""
    if args.catalog and args.models:
        raise ConfigError("--catalog lists the models; leave --model out, or list that model there too")
    if is_alone:
        if args.served_model_name and args.models and args.models[0][0]:
            raise ConfigError("--served-model-name and --model NAME=... both name the model; give one of them")
        return
    if args.served_model_name:
        raise ConfigError(
            "--served-model-name is the name of one model; with several give --model NAME=DIR_OR_HUB_ID, or `name` in "
            "the catalog"
        )
    if args.loras:
        raise ConfigError("--lora is an adapter of one model; with several list each model's as `loras` in a --catalog")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"stencil: error: {one_line(message)} (--help lists all flags)", file=sys.stderr)
        raise SystemExit(2)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends the default to each flag's help, unless it is empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in ("", None, []) else action.help


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m entrypoints.serve",
        description="Serve masked image editing behind the OpenAI images API.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    add_model_flags(parser)
    add_server_flags(parser)
    add_engine_flags(parser)
    add_cache_flags(parser)
    add_image_flags(parser)
    return parser
