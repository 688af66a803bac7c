"""Defines the server's flags, group by group, except those of models: names, types, defaults and help texts."""

from __future__ import annotations

import argparse
from typing import get_args

from core.config import (
    CacheConfig,
    CacheScope,
    EngineConfig,
    ImageConfig,
    ModelConfig,
    OnLate,
    RouterPolicy,
    SchedulerConfig,
    SchedulingPolicyName,
    StencilConfig,
)
from core.step_schedule import StepScheduleName
from entrypoints.api_keys import KEY_VARIABLE, KEYS_VARIABLE
from entrypoints.flag_types import (
    auto_or_bytes,
    byte_count,
    decimal,
    host,
    http_url,
    keyframes,
    page_dtype,
    web_origin,
    whole_number,
)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for every interface")
    group.add_argument("--port", default=8000, type=whole_number(0, 65535), help="TCP port; 0: any free one")
    _add_access_flags(group)
    _add_operation_flags(group)


def _add_access_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        dest="api_keys",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that requests to /v1/* must send; may be repeated; visible to all users of the machine in ps, so "
        f"prefer --api-key-file; without either flag, {KEY_VARIABLE} or {KEYS_VARIABLE} (comma-separated) of the "
        "environment are used; without any key, the API is open",
    )
    group.add_argument(
        "--api-key-file",
        dest="api_key_files",
        action="append",
        default=[],
        metavar="FILE",
        help="file of keys, one per line, lines that begin with # are comments; may be repeated; if you own the file, "
        "it must be accessible to you only; SIGHUP reloads all files",
    )
    group.add_argument(
        "--rate-limit",
        default=0,
        type=whole_number(0, 1_000_000),
        metavar="N",
        help="edits, generations and template registrations per minute for each key, or without keys for each client "
        "address; more get 429; 0: no limit",
    )
    group.add_argument(
        "--allowed-origin",
        dest="allowed_origins",
        action="append",
        default=[],
        type=web_origin,
        metavar="ORIGIN",
        help="an origin such as https://app.example whose web pages may use the API; may be repeated; *: any origin, "
        "for servers with keys",
    )
    group.add_argument(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        default=[],
        type=host,
        metavar="HOST",
        help="a name or address that a request's Host header may name, besides loopback, such as one that a proxy "
        "passes on; may be repeated; *: any; default: any, or if --host is a loopback address, none",
    )


def _add_operation_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--no-playground",
        dest="playground",
        action="store_false",
        default=True,
        help="serve the API only, without the pages at / and /status",
    )
    group.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="lowest level that is logged",
    )
    group.add_argument("--log-format", default="text", choices=("text", "json"), help="json: one object per line")
    group.add_argument(
        "--otlp-traces-endpoint",
        default=EngineConfig().otlp_traces_endpoint,
        type=http_url,
        metavar="URL",
        help="OpenTelemetry collector that traces are sent to, such as http://localhost:4318/v1/traces; empty: none",
    )
    group.add_argument(
        "--drain-seconds",
        default=EngineConfig().drain_seconds,
        type=decimal(0, 86400),
        metavar="S",
        help="how long running edits may take to finish after SIGTERM or Ctrl-C",
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    _add_batch_flags(group)
    _add_queue_flags(group)
    _add_process_flags(group)


def _add_batch_flags(group: argparse._ArgumentGroup) -> None:
    default = SchedulerConfig()
    group.add_argument(
        "--scheduling-policy",
        default=default.policy,
        metavar="NAME",
        help=f"what decides which requests run together: {', '.join(get_args(SchedulingPolicyName))}, or module:Class, "
        "a policy of your own; step_batching: the most urgent ones share a denoising step; goodput: those of which "
        "most meet the latency objective (--slo-ms); elastic: each on as many of the engine's workers as are useful "
        "and free; neustream, ddit: baselines",
    )
    group.add_argument(
        "--on-late",
        choices=get_args(OnLate),
        default=default.on_late,
        help="of the policies goodput and neustream: requests that cannot meet the latency objective end with an "
        "error, or run when no other needs the worker, unless they would miss their timeout",
    )
    group.add_argument(
        "--max-num-seqs",
        default=default.max_num_seqs,
        type=whole_number(1, 4096),
        metavar="N",
        help="maximum number of images that share one denoising step",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        default=default.max_num_batched_tokens,
        type=whole_number(1, 2**31),
        metavar="N",
        help="maximum number of image and text tokens that share one denoising step; a larger image runs alone",
    )
    group.add_argument(
        "--max-stage-ms",
        default=default.max_stage_ms,
        type=decimal(0, 60000),
        metavar="MS",
        help="maximum encoding and decoding time added to one denoising step",
    )


def _add_queue_flags(group: argparse._ArgumentGroup) -> None:
    default = StencilConfig()
    group.add_argument(
        "--max-queue",
        default=default.max_queue,
        type=whole_number(1, 1_000_000),
        metavar="N",
        help="maximum number of waiting and running images; further requests are refused with 503",
    )
    group.add_argument(
        "--slo-ms",
        default=default.slo_seconds * 1e3,
        type=decimal(0, 86_400_000),
        metavar="MS",
        help="latency objective, from an edit's arrival to its finished picture; while other edits run, one that is "
        "predicted to miss it is refused with 503; 0: none",
    )
    group.add_argument(
        "--step-schedule",
        default=default.step_schedule,
        choices=get_args(StepScheduleName),
        help="denoising steps of requests that do not say and do not ask to be exact: full, or calibrated: of a model "
        "with a calibrated schedule, only those that matter",
    )
    group.add_argument(
        "--max-retries",
        default=default.engine.scheduler.max_retries,
        type=whole_number(0, 100),
        metavar="N",
        help="how often an edit is run again after the engine or worker that ran it has died",
    )


def _add_process_flags(group: argparse._ArgumentGroup) -> None:
    default = EngineConfig()
    group.add_argument(
        "--start-seconds",
        default=default.start_seconds,
        type=decimal(1, 86400),
        metavar="S",
        help="kill an engine that is not ready this long after its start, downloads included, because it hangs",
    )
    group.add_argument(
        "--workers-per-engine",
        default=default.workers_per_engine,
        type=whole_number(1, 64),
        metavar="N",
        help="worker processes of each engine",
    )
    group.add_argument(
        "--degree",
        default=default.scheduler.degree,
        type=whole_number(1, 64),
        metavar="N",
        help="workers of an engine that compute each denoising step together; with the policies elastic and ddit these "
        "decide",
    )
    group.add_argument(
        "--max-degree",
        default=default.scheduler.max_degree,
        type=whole_number(1, 64),
        metavar="N",
        help="most workers that the policies elastic and ddit let compute a step together",
    )
    group.add_argument(
        "--data-parallel-size",
        default=default.data_parallel_size,
        type=whole_number(1, 256),
        metavar="N",
        help="number of engines, each with its own model, cache and workers, between which edits are distributed; they "
        "share the CPU cores, or take one GPU per worker",
    )
    group.add_argument(
        "--router-policy",
        choices=get_args(RouterPolicy),
        default=StencilConfig().router_policy,
        help="how an edit's engine is chosen; mask-aware: the one predicted to finish it first",
    )


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    group, model = parser.add_argument_group("mask-aware execution and its cache"), ModelConfig()
    group.add_argument(
        "--no-mask-aware",
        dest="mask_aware",
        action="store_false",
        default=True,
        help="compute every token of every edit, and cache no activations",
    )
    group.add_argument(
        "--cache-keyframes",
        default=model.cache_keyframes,
        type=keyframes,
        metavar="N",
        help="number of noise levels at which a template's activations are cached: auto (the checkpoint's calibration, "
        "else 5), per-step, or 2 to 64",
    )
    group.add_argument(
        "--cache-dtype",
        default=model.cache_dtype,
        type=page_dtype,
        choices=("auto", "int8", "bfloat16", "float32"),
        help="data type of cached activations; auto: the checkpoint's calibration, else int8",
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
    group.add_argument(
        "--gpu-memory-utilization",
        default=cache.gpu_memory_utilization,
        type=decimal(0.01, 1),
        metavar="SHARE",
        help="share of a GPU's memory that a worker may use; what weights and the largest batch leave of it holds "
        "cached activations",
    )
    group.add_argument(
        "--cache-device-bytes",
        default="auto",
        type=auto_or_bytes,
        metavar="BYTES",
        help="device memory of each worker for cached activations; auto: what --gpu-memory-utilization leaves; 0: "
        "none, a CPU then reads them from host memory; a number of bytes, or with K, M or G",
    )
    for flag, default, what in (
        ("--cache-host-bytes", cache.host_bytes, "shared memory of each engine for cached activations"),
        ("--cache-disk-bytes", cache.disk_bytes, "disk space for cached activations of users' images; 0: none"),
        ("--template-bytes", StencilConfig().template_bytes, "memory for the uploads of registered templates"),
    ):
        text = f"{what}; a number of bytes, or with K, M or G"
        group.add_argument(flag, default=default, type=byte_count, metavar="BYTES", help=text)
    group.add_argument(
        "--cache-dir",
        default=cache.directory,
        metavar="DIR",
        help="folder of cached activations on disk; engines may share it; empty: stencil/pages in the user's cache "
        "folder",
    )
    group.add_argument(
        "--cache-admission",
        default=cache.admission,
        choices=("always", "manual"),
        help="always: cache the activations of every edit while there is room; manual: of registered templates only",
    )
    group.add_argument(
        "--cache-scope",
        default=cache.scope,
        choices=get_args(CacheScope),
        help="owner: reuse activations and embedded prompts only for the API key that they were computed for, so that "
        "neither times nor answers reveal what other keys have sent; server: reuse them for all keys",
    )
    group.add_argument(
        "--block-plan",
        default=cache.block_plan,
        choices=("off", "auto"),
        help="auto: may compute leading blocks in full while cached activations load, which changes pixels slightly",
    )


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    group, default = parser.add_argument_group("images"), ImageConfig()
    group.add_argument(
        "--image-workers",
        default=default.image_workers,
        type=whole_number(1, 256),
        metavar="N",
        help="number of image processors, which decode and encode images",
    )
    group.add_argument(
        "--max-upload-bytes",
        default=default.max_upload_bytes,
        type=whole_number(1, 2**32),
        metavar="BYTES",
        help="maximum size of an uploaded file",
    )
    group.add_argument(
        "--max-pixels",
        default=default.max_pixels,
        type=whole_number(256, 2**31),
        metavar="N",
        help="maximum number of pixels of an uploaded image",
    )
