"""Defines the flags of models, for `entrypoints.serve`: names, types, defaults and help texts."""

from __future__ import annotations

import argparse
from typing import get_args

from core.config import CudaGraphs, KernelChoice, ModelConfig, Quantization, SchedulerConfig
from entrypoints.flag_types import byte_count, device, named_adapter, whole_number
from entrypoints.model_paths import named_model


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    _add_checkpoint_flags(group)
    _add_adapter_flags(group)
    _add_computing_flags(group)


def _add_checkpoint_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        dest="models",
        action="append",
        default=[],
        type=named_model,
        metavar="[NAME=]DIR_OR_HUB_ID",
        help="diffusers checkpoint to serve, under this name; may be repeated, and requests choose by `model`, without "
        "which the first is meant; default: stencil-embedded, the embedded model",
    )
    group.add_argument(
        "--catalog",
        default="",
        metavar="FILE",
        help="TOML file that lists several models, each with settings of its own, instead of --model",
    )
    group.add_argument(
        "--served-model-name",
        default="",
        metavar="NAME",
        help="model id shown to clients, of a single model; empty: the value of --model, or stencil-embedded",
    )
    group.add_argument(
        "--variant",
        default=ModelConfig().variant,
        metavar="NAME",
        help="variant of the checkpoint's weight files, such as fp16; parts without it load their plain files",
    )


def _add_adapter_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--lora",
        dest="loras",
        action="append",
        default=[],
        type=named_adapter,
        metavar="NAME=PATH",
        help="a LoRA adapter that requests may choose by this name: a safetensors file, or a folder with one; "
        "may be repeated",
    )
    group.add_argument(
        "--allow-runtime-lora",
        dest="runtime_lora",
        action="store_true",
        help="let callers load and unload adapters (POST /v1/load_lora_adapter) from any file that the server may read",
    )


def _add_computing_flags(group: argparse._ArgumentGroup) -> None:
    default = ModelConfig()
    group.add_argument(
        "--dtype",
        default=default.dtype,
        choices=("auto", "float32", "bfloat16", "float16"),
        help="data type of weights and computation; auto: the fastest that is safe on the device",
    )
    group.add_argument(
        "--quantization",
        default=default.quantization,
        choices=get_args(Quantization),
        help="quantise the denoiser's linear layers at load time; torchao-int8 runs on any device and needs the extra "
        "'quantization'; bitsandbytes-8bit and bitsandbytes-4bit need a GPU and the package bitsandbytes",
    )
    group.add_argument(
        "--device", default=default.device, type=device, metavar="DEVICE", help="auto, cpu, cuda or cuda:N"
    )
    group.add_argument(
        "--kernels",
        default=default.kernels,
        choices=get_args(KernelChoice),
        help="operators of denoisers; auto: the fastest for the device; torch: PyTorch's only, slower, but need no "
        "compiler; compile: auto, and on a GPU a UNet's layers are compiled, which takes minutes at the first start",
    )
    group.add_argument(
        "--cuda-graphs",
        default=default.cuda_graphs,
        choices=get_args(CudaGraphs),
        help="auto: on a GPU, a mask-aware step or a UNet's step of one request, and an exact one of a small picture, "
        "is captured when its shape comes for the second time, and replayed from then on; off: no step is captured, "
        "which saves the memory of the graphs (on an H100 0.27 GB for FLUX, 0.49 GB for Stable Diffusion XL)",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="on a GPU, compute a picture with the same bits whatever shares its steps and however many workers "
        "compute them, which takes longer; on a CPU it changes nothing: in float32 this holds there anyway",
    )
    group.add_argument(
        "--model-bytes",
        default=SchedulerConfig().model_bytes,
        type=byte_count,
        metavar="BYTES",
        help="weights that each worker may hold; a model beyond it is loaded when a request needs it, in place of what "
        "was not used for longest; 0: no limit; a number of bytes, or with K, M or G",
    )
    group.add_argument(
        "--threads",
        default=default.threads,
        type=whole_number(0, 1024),
        metavar="N",
        help="CPU threads per worker; 0: all cores but one, split between the workers of all engines",
    )
