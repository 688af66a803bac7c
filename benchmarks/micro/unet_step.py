"""One denoising step of a UNet, mask-aware against exact.

FLOPs of convolutions, products and attentions are counted with the published configurations and no weights: the share
that the mask leaves bounds the speed-up. Masks are nearly square, in the picture's middle. With --time, steps of
pictures with that side in pixels are timed on one thread, with random weights and the transformers' depth cut to
--depth: medians of processor time, in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.command import command
from benchmarks.gpu.boxes import middle_box, tokens_in
from benchmarks.micro.rows import PAGES, pages_between, unet_row
from benchmarks.report import Value, print_report
from benchmarks.turns import medians, timed
from model_executor.models.base import Row
from model_executor.models.unet.unet import Unet

RATIOS = (0.05, 0.1, 0.2, 0.5)
TIMED = (0.1, 0.2)
TOKEN = 32
TEXT_TOKENS = 77
LAYERS = {"layers_per_block": 2, "in_channels": 4, "out_channels": 4}
FOUR = {
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "sd1.5": FOUR | {"cross_attention_dim": 768, "attention_head_dim": 8, "sample_size": 64},
    "sd2.1": FOUR
    | {
        "cross_attention_dim": 1024,
        "attention_head_dim": (5, 10, 20, 20),
        "use_linear_projection": True,
        "sample_size": 96,
    },
    "sdxl": {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "sample_size": 128,
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, dtype="float32", rounds=3)
    parser.add_argument("--unet", choices=CONFIGS, default="sdxl", help="whose shape")
    parser.add_argument(
        "--time", type=int, default=0, metavar="SIDE", help="time steps of pictures with this side in pixels"
    )
    parser.add_argument("--depth", type=int, default=2, help="most blocks of a transformer, where steps are timed")
    args = parser.parse_args(argv)
    config = LAYERS | CONFIGS[args.unet]
    side = 8 * config["sample_size"]
    flops = _count(config, side)
    lines, result = [("exact", f"{flops[1.0] / 1e12:.3f} TFLOP")], dict[str, Value](exact_flop=flops[1.0])
    for ratio in RATIOS:
        share = flops[ratio] / flops[1.0]
        lines.append((f"mask ratio {ratio}", f"{share:.3f} of it: at most {1 / share:.2f}x faster"))
        result[f"share_{ratio}"] = share
    print_report(f"A step of {args.unet} at {side} px, one row", lines, result, args.output)
    if args.time:
        _report_times(args, config)


def _report_times(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    depths = config.get("transformer_layers_per_block")
    cut = {**config, "transformer_layers_per_block": [min(each, args.depth) for each in depths]} if depths else config
    flops = _count(cut, args.time)
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    unet = Unet(UNet2DConditionModel(**cut).to(dtype).eval().requires_grad_(False), 1000, TOKEN)
    rows = _rows(unet, args.time // TOKEN, torch.device("cpu"), dtype)
    ways = {ratio: timed(partial(_step, unet, rows[ratio]), time.process_time) for ratio in (1.0, *TIMED)}
    seconds = medians(ways, args.rounds)
    lines, result = [("exact", f"{seconds[1.0] * 1e3:.0f} ms")], dict[str, Value](exact_ms=seconds[1.0] * 1e3)
    for ratio in TIMED:
        faster, bound = seconds[1.0] / seconds[ratio], flops[1.0] / flops[ratio]
        lines.append((f"mask ratio {ratio}", f"{faster:.2f}x faster, of {bound:.2f}x by FLOPs: {faster / bound:.2f}"))
        result |= {f"faster_{ratio}": faster, f"bound_{ratio}": bound}
    title = f"Timed at {args.time} px, transformers of depth {args.depth} at most, 1 thread, {args.dtype}"
    print_report(title, lines, result, args.output)


@torch.inference_mode()
def _step(unet: Unet, row: Row) -> None:
    unet.forward([row])


@torch.inference_mode()
def _count(config: Mapping[str, Any], side: int) -> dict[float, int]:
    """Mask ratio -> floating-point operations of a step of a picture with this side in pixels; 1 is an exact one."""
    with torch.device("meta"):
        unet = Unet(UNet2DConditionModel(**config).eval(), 1000, TOKEN)
    flops: dict[float, int] = {}
    for ratio, row in _rows(unet, side // TOKEN, torch.device("meta")).items():
        with FlopCounterMode(display=False) as counter:
            unet.forward([row])
        flops[ratio] = int(counter.get_total_flops())
    return flops


def _rows(unet: Unet, side: int, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[float, Row]:
    """Mask ratio -> a row of a square picture with this many tokens a side; 1 is an exact one."""
    whole = unet_row(unet, side, TEXT_TOKENS, lambda *size: torch.randn(size, dtype=dtype, device=device))
    entry_bytes = unet.page_layout(PAGES).entry_bytes(side * side)
    near, far = (torch.zeros(entry_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    rows = {1.0: whole}
    for ratio in RATIOS:
        box = middle_box(ratio, side)
        pages = pages_between(unet, whole, near, far)
        rows[ratio] = replace(whole, active=tokens_in(box, side, device), box=box, pages=pages)
    return rows


if __name__ == "__main__":
    main()
