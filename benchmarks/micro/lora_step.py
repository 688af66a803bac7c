"""One denoising step of a batch whose requests use different adapters, against the same batch without.

Blocks shaped like FLUX's with random weights: 4 + 8 of width 512, and one pair of FLUX's own width, 3072. Eight
mask-aware edits of templates of their own; adapters of rank 16 for every linear layer. Batches take turns in one
process; figures are medians over rounds of the speed relative to the batch without. The bound is the ratio of
floating-point operations of linear layers and attention: what the adapters add, if it ran as fast as all else.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import nn

from benchmarks.command import command
from benchmarks.micro.denoiser_step import BATCH, FLUX_SHAPE
from benchmarks.micro.rows import Call, modulated, pages_between, primed_entry, transformer_row
from benchmarks.report import Value, print_report
from benchmarks.turns import in_turns, median_ratio, timed
from core.patches import Patch, PatchSet, patch_set
from model_executor.kernels.low_rank import LowRank
from model_executor.models.base import Row
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.patches.adapters import Adapter, Layers

RANK = 16
ADAPTERS = "abc"


@dataclass(frozen=True)
class Shape:
    """A module, the sizes of its step, and the speed that its batches must keep."""

    name: str
    config: Mapping[str, Any]
    side: int  # image tokens of the picture's side
    active: int  # image tokens that each edit computes
    text_tokens: int
    bar: float


SHAPES = {
    512: Shape("hidden 512, 4 + 8 blocks", FLUX_SHAPE, side=32, active=128, text_tokens=64, bar=0.8),
    3072: Shape(
        "hidden 3072, one pair of blocks",
        FLUX_SHAPE
        | {
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "axes_dims_rope": (16, 56, 56),
        },
        side=16,
        active=64,
        text_tokens=64,
        bar=0.9,
    ),
}

BATCHES: dict[str, list[PatchSet]] = {
    "1 adapter, on every request": [(Patch("a"),)] * BATCH,
    "2 adapters, one on each request": [(Patch("ab"[number % 2]),) for number in range(BATCH)],
    "3 adapters, one on each request": [(Patch("abc"[number % 3]),) for number in range(BATCH)],
    "3 adapters and none, in turn": [() if number % 4 == 3 else (Patch("abc"[number % 4]),) for number in range(BATCH)],
    "3 adapters on each request, scaled": [
        patch_set(Patch(name, 0.5 + 0.1 * number) for name in ADAPTERS) for number in range(BATCH)
    ],
}
"""Name -> the patches of each request."""


class Bench:
    """A shape's denoiser with its adapters, and the rows of eight edits."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        torch.manual_seed(0)
        with torch.inference_mode(False):
            module: Any = FluxTransformer2DModel(**shape.config).to(dtype).eval().requires_grad_(False)
        self._layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        self._denoiser = FluxTransformer(module, 1000)
        for seed, name in enumerate(ADAPTERS):
            prepared = self._denoiser.patches.prepare(
                Adapter(name, Path(f"{name}.safetensors"), name, {}), random_layers(module, seed)
            )
            self._denoiser.patches.put(name, prepared)
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
        row = transformer_row(self._denoiser, shape.side, shape.text_tokens, lambda *size: draw(size).to(dtype))
        entries = [primed_entry(self._denoiser, row, sigma) for sigma in (0.75, 0.5)]
        self._rows = [self._edit(row, entries, seed) for seed in range(BATCH)]

    def step(self, patches: Sequence[PatchSet]) -> Call:
        """One step of all requests, each with these patches."""
        rows = [
            modulated(self._denoiser, replace(row, patches=its)) for row, its in zip(self._rows, patches, strict=True)
        ]
        return partial(self._denoiser.forward, rows)

    def bound(self, patches: Sequence[PatchSet]) -> float:
        """Operations of a step without patches over those of one with them."""
        plain, added = self._operations()
        mean = sum(map(len, patches)) / len(patches)
        return plain / (plain + mean * added)

    def _operations(self) -> tuple[float, float]:
        """Multiplications per computed token: of the blocks' linear layers and attentions, and of one adapter."""
        config, width = self.shape.config, self._denoiser.module.inner_dim
        keys = self.shape.side**2 + self.shape.text_tokens
        num_blocks = config["num_layers"] + config["num_single_layers"]
        # A token passes through the text or the image layers of a double block, which are alike.
        pairs = [(width, 3 * width, 3), (width, width, 1), (width, 4 * width, 1), (4 * width, width, 1)]
        single = [(width, 3 * width, 3), (width, 4 * width, 1), (5 * width, width, 1)]
        layers = pairs * config["num_layers"] + single * config["num_single_layers"]
        plain = sum(inputs * outputs for inputs, outputs, _ in layers) + num_blocks * 2 * keys * width
        return plain, RANK * sum(inputs * number + outputs for inputs, outputs, number in layers)

    def _edit(self, row: Row, entries: Sequence[torch.Tensor], seed: int) -> Row:
        generator = torch.Generator().manual_seed(seed)
        active = torch.randperm(self.shape.side**2, generator=generator)[: self.shape.active].sort().values
        near, far = (entry.clone() for entry in entries)
        return replace(row, active=active, pages=pages_between(self._denoiser, row, near, far))


def random_layers(module: nn.Module, seed: int) -> Layers:
    """An adapter of every linear layer, which changes its output by a tenth."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        numbers: torch.Tensor = torch.randn(size, generator=generator) / size[1] ** 0.5
        return numbers

    return {
        name: LowRank(draw(RANK, layer.in_features), 0.1 * draw(layer.out_features, RANK))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, dtype="float32", threads=1, rounds=5)
    parser.add_argument("--width", type=int, choices=SHAPES, help="only blocks of this width")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        for width in [args.width] if args.width else SHAPES:
            measure(Bench(SHAPES[width], getattr(torch, args.dtype)), args)


def measure(bench: Bench, args: argparse.Namespace) -> None:
    """Time all batches in turns, and print them."""
    plain = "8 requests without"
    calls = {plain: bench.step([()] * BATCH)} | {name: bench.step(patches) for name, patches in BATCHES.items()}
    seconds = in_turns({name: timed(call) for name, call in calls.items()}, args.rounds)
    shape, rows = bench.shape, [(plain, _ms(seconds[plain]))]
    result: dict[str, Value] = {"benchmark": "lora_step", "shape": shape.name, "dtype": args.dtype}
    for name, patches in BATCHES.items():
        speed, bound = median_ratio(seconds[plain], seconds[name]), bench.bound(patches)
        rows.append((name, f"{_ms(seconds[name])}   speed {speed:4.2f}   bound {bound:4.2f}"))
        key = name.replace(",", "").replace(" ", "_")
        result |= {f"speed_{key}": speed, f"bound_{key}": bound}
    title = f"Denoiser step with adapters of rank {RANK}, {shape.name}; {args.dtype}, {args.threads} thread(s)"
    print_report(f"{title}; bar {shape.bar} with up to one adapter a request", rows, result, args.output)


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):8.1f} ms"


if __name__ == "__main__":
    main()
